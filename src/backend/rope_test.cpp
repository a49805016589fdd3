// rope against complex multiplication; the inverse undoes it and is its gradient.
#include <cmath>
#include <complex>

#include "backend/operation_testing.h"

namespace agoq {
namespace {

using namespace testing_operations;

constexpr auto kFp64 = ElementType::kFp64, kFp32 = ElementType::kFp32, kBf16 = ElementType::kBf16;

struct Rope {
  AttentionShape shape{3, 1, 10};
  std::vector<std::int32_t> positions{0, 1, 2, 0, 7, 31};
  std::int64_t tokens() const { return static_cast<std::int64_t>(positions.size()); }
  std::int64_t count() const { return tokens() * shape.qkv_width(); }
  double angle(std::int64_t position, int i) const {
    return static_cast<double>(position) * std::pow(100.0, -2.0 * i / shape.head_size);
  }
  Values table(std::int64_t positions_known) const {
    Values values;
    for (std::int64_t position = 0; position < positions_known; ++position) {
      for (int i = 0; i < shape.head_size / 2; ++i) {
        values.push_back(std::cos(angle(position, i)));
        values.push_back(std::sin(angle(position, i)));
      }
    }
    return values;
  }
};

Values rotate(Bench& bench, const Rope& rope, ElementType type, const Values& x, bool inverse) {
  const Tensor qkv = bench.of(type, Shape{rope.tokens(), rope.shape.qkv_width()}, x);
  const Tensor table =
      bench.of(statistics_type(type), Shape{32, rope.shape.head_size / 2, 2}, rope.table(32));
  bench.context.backend.rope(bench.context, rope.shape, qkv, bench.integers(rope.positions), table,
                             inverse);
  return Bench::get(qkv);
}

TEST(Rope, TurnsPairsOfQueriesAndKeysAndLeavesValues) {
  const Rope rope;
  const Values x = normal(rope.count(), 1);
  const int half = rope.shape.head_size / 2;
  Values expected = x;
  for (std::int64_t token = 0; token < rope.tokens(); ++token) {
    for (int head = 0; head < rope.shape.heads + rope.shape.kv_heads; ++head) {
      for (int i = 0; i < half; ++i) {
        const auto first =
            static_cast<std::size_t>(token * rope.shape.qkv_width() + head * rope.shape.head_size + i);
        const double angle = rope.angle(rope.positions[static_cast<std::size_t>(token)], i);
        const std::complex<double> turned =
            std::complex<double>(x[first], x[first + static_cast<std::size_t>(half)]) *
            std::polar(1.0, angle);
        expected[first] = turned.real();
        expected[first + static_cast<std::size_t>(half)] = turned.imag();
      }
    }
  }
  for (const Build& build : builds()) {
    Bench bench(*build.backend);
    EXPECT_LE(relative_error(rotate(bench, rope, kFp64, x, false), expected), 1e-14);
    EXPECT_LE(relative_error(rotate(bench, rope, kFp32, x, false), expected), 1e-6);
    EXPECT_LE(relative_error(rotate(bench, rope, kBf16, x, false), expected), 4e-3);
  }
}

TEST(Rope, InverseUndoesItAndIsItsGradient) {
  const Rope rope;
  Bench bench;
  const Values x = normal(rope.count(), 1), dy = normal(rope.count(), 2);
  EXPECT_LE(relative_error(rotate(bench, rope, kFp64, rotate(bench, rope, kFp64, x, false), true), x),
            1e-14);
  const Tensor input = bench.of(kFp64, Shape{rope.count()}, x);
  const auto loss = [&] {
    Bench inner;
    return dot(rotate(inner, rope, kFp64, Bench::get(input), false), dy);
  };
  EXPECT_LE(relative_error(rotate(bench, rope, kFp64, dy, true), finite_differences(input, loss)), 1e-6);
}

TEST(Rope, RefusesPositionsBeyondTheTableAndOddHeads) {
  Bench bench;
  Rope rope;
  rope.positions.back() = 32;
  EXPECT_THROW(rotate(bench, rope, kFp32, normal(rope.count(), 1), false), Error);
  rope.positions.back() = -1;
  EXPECT_THROW(rotate(bench, rope, kFp32, normal(rope.count(), 1), false), Error);
  const Tensor qkv = bench.empty(kFp32, Shape{6, 15});
  EXPECT_THROW(bench.context.backend.rope(bench.context, {1, 1, 5}, qkv, bench.integers(rope.positions),
                                          bench.empty(kFp32, Shape{32, 2, 2}), false),
               Error);
}

}  // namespace
}  // namespace agoq

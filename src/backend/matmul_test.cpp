// matmul against a plain triple loop in double precision.
#include <cmath>

#include "backend/operation_testing.h"

namespace agoq {
namespace {

using namespace testing_operations;

Values plain_product(std::int64_t m, std::int64_t n, std::int64_t k, const Values& a, bool flip_a,
                     const Values& b, bool flip_b, Values c) {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (std::int64_t p = 0; p < k; ++p) {
        sum += a[static_cast<std::size_t>(flip_a ? p * m + i : i * k + p)] *
               b[static_cast<std::size_t>(flip_b ? j * k + p : p * n + j)];
      }
      c[static_cast<std::size_t>(i * n + j)] += sum;
    }
  }
  return c;
}

struct Types {
  ElementType a, b, c;
  double tolerance;  // relative L2: rounding of FP64, FP32 sums, BF16 results (at most 2^-8)
};
constexpr auto kFp64 = ElementType::kFp64, kFp32 = ElementType::kFp32, kBf16 = ElementType::kBf16;
constexpr Types kTypes[] = {{kFp64, kFp64, kFp64, 1e-15}, {kFp32, kFp32, kFp32, 1e-6},
                            {kBf16, kBf16, kBf16, 4e-3},  {kBf16, kBf16, kFp32, 1e-6},
                            {kBf16, kFp32, kFp32, 1e-6},  {kFp32, kBf16, kBf16, 4e-3}};

void expect_product(Backend& backend, std::int64_t m, std::int64_t n, std::int64_t k) {
  const Values a = normal(m * k, 1), b = normal(k * n, 2), c = normal(m * n, 3);
  for (const Types& types : kTypes) {
    for (const bool flip_a : {false, true}) {
      for (const bool flip_b : {false, true}) {
        for (const bool accumulate : {false, true}) {
          Bench bench(backend);
          const Tensor left = bench.of(types.a, flip_a ? Shape{k, m} : Shape{m, k}, a);
          const Tensor right = bench.of(types.b, flip_b ? Shape{n, k} : Shape{k, n}, b);
          const Tensor product = bench.of(types.c, Shape{m, n}, c);
          backend.matmul(bench.context, left, flip_a ? Transpose::kYes : Transpose::kNo, right,
                         flip_b ? Transpose::kYes : Transpose::kNo, product, accumulate);
          const Values zero(c.size(), 0.0);
          const Values expected = plain_product(m, n, k, a, flip_a, b, flip_b, accumulate ? c : zero);
          EXPECT_LE(relative_error(Bench::get(product), expected), types.tolerance)
              << m << " x " << n << " x " << k << ", a " << name_of(types.a) << " b " << name_of(types.b)
              << " c " << name_of(types.c) << " transposed " << flip_a << flip_b << " accumulate "
              << accumulate;
          EXPECT_EQ(bench.workspace().used(), 0u);
        }
      }
    }
  }
}

TEST(Matmul, EqualsThePlainLoopForEveryTranspositionTypeAndOddShapes) {
  for (const Build& build : builds()) {
    SCOPED_TRACE(build.name);
    expect_product(*build.backend, 1, 1, 1);
    expect_product(*build.backend, 1, 257, 33);
    expect_product(*build.backend, 7, 5, 300);
    expect_product(*build.backend, 129, 1, 17);
    expect_product(*build.backend, 130, 259, 65);
    expect_product(*build.backend, 128, 256, 64);
  }
}

TEST(Matmul, CrossesSlabs) {
  Bench bench;
  const std::int64_t m = 2055, n = 2051, k = 3;
  const Values a = normal(m * k, 1), b = normal(k * n, 2);
  const Tensor product = bench.empty(kFp32, Shape{m, n});
  for (const ElementType type : {kFp32, kBf16}) {
    bench.context.backend.matmul(bench.context, bench.of(type, Shape{m, k}, a), Transpose::kNo,
                                 bench.of(type, Shape{n, k}, b), Transpose::kYes, product);
    const Values expected =
        plain_product(m, n, k, a, false, b, true, Values(static_cast<std::size_t>(m * n), 0.0));
    EXPECT_LE(relative_error(Bench::get(product), expected), 1e-6) << name_of(type);
  }
}

TEST(Matmul, RefusesShapesAndTypesThatDoNotFit) {
  Bench bench;
  Backend& backend = bench.context.backend;
  const Tensor a = bench.empty(kFp32, Shape{2, 3}), b = bench.empty(kFp32, Shape{3, 4});
  const Tensor c = bench.empty(kFp32, Shape{2, 4});
  EXPECT_THROW(backend.matmul(bench.context, a, Transpose::kNo, b, Transpose::kYes, c), Error);
  EXPECT_THROW(backend.matmul(bench.context, a, Transpose::kYes, b, Transpose::kNo, c), Error);
  EXPECT_THROW(backend.matmul(bench.context, a, Transpose::kNo, b, Transpose::kNo, a), Error);
  EXPECT_THROW(backend.matmul(bench.context, a, Transpose::kNo, b, Transpose::kNo,
                              bench.empty(kFp64, Shape{2, 4})),
               Error);
  EXPECT_THROW(backend.matmul(bench.context, a, Transpose::kNo, b, Transpose::kNo, {}), Error);
}

TEST(Matmul, GradientsOfAProductAreProducts) {
  Bench bench;
  Backend& backend = bench.context.backend;
  const std::int64_t tokens = 5, in = 7, out = 3;
  const Tensor x = bench.of(kFp64, Shape{tokens, in}, normal(tokens * in, 1));
  const Tensor w = bench.of(kFp64, Shape{out, in}, normal(out * in, 2));
  const Tensor y = bench.empty(kFp64, Shape{tokens, out});
  const Values dy = normal(tokens * out, 3);
  const auto loss = [&] {
    backend.matmul(bench.context, x, Transpose::kNo, w, Transpose::kYes, y);
    return dot(Bench::get(y), dy);
  };
  const Tensor dy_tensor = bench.of(kFp64, Shape{tokens, out}, dy);
  const Tensor dx = bench.empty(kFp64, Shape{tokens, in}), dw = bench.empty(kFp64, Shape{out, in});
  backend.matmul(bench.context, dy_tensor, Transpose::kNo, w, Transpose::kNo, dx);
  backend.matmul(bench.context, dy_tensor, Transpose::kYes, x, Transpose::kNo, dw);
  EXPECT_LE(relative_error(Bench::get(dx), finite_differences(x, loss)), 1e-6);
  EXPECT_LE(relative_error(Bench::get(dw), finite_differences(w, loss)), 1e-6);
}

}  // namespace
}  // namespace agoq

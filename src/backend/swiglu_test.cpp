// swiglu against the definition and finite differences; FP32 and BF16 against FP64.
#include <cmath>

#include "backend/operation_testing.h"

namespace agoq {
namespace {

using namespace testing_operations;

constexpr auto kFp64 = ElementType::kFp64, kFp32 = ElementType::kFp32, kBf16 = ElementType::kBf16;

struct Result {
  Values hidden, dgate_up, hidden_again;
};

Result run(Backend& backend, ElementType type, std::int64_t rows, std::int64_t width,
           const Values& gate_up) {
  Bench bench(backend);
  const Tensor in = bench.of(type, Shape{rows, 2 * width}, gate_up);
  const Tensor hidden = bench.empty(type, Shape{rows, width}), again = bench.empty(type, hidden.shape);
  const Tensor dgate_up = bench.empty(type, in.shape);
  backend.swiglu_forward(bench.context, in, hidden);
  backend.swiglu_backward(bench.context, bench.of(type, hidden.shape, normal(rows * width, 2)), in,
                          dgate_up, again);
  return {Bench::get(hidden), Bench::get(dgate_up), Bench::get(again)};
}

TEST(Swiglu, EqualsTheDefinitionAndRecomputesIt) {
  const std::int64_t rows = 11, width = 21;
  const Values gate_up = normal(rows * 2 * width, 1, 3.0);
  Values expected;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < width; ++i) {
      const double gate = gate_up[static_cast<std::size_t>(row * 2 * width + i)];
      const double up = gate_up[static_cast<std::size_t>(row * 2 * width + width + i)];
      expected.push_back(gate / (1 + std::exp(-gate)) * up);
    }
  }
  for (const Build& build : builds()) {
    const Result exact = run(*build.backend, kFp64, rows, width, gate_up);
    EXPECT_LE(relative_error(exact.hidden, expected), 1e-15);
    const Result single = run(*build.backend, kFp32, rows, width, gate_up);
    const Result brain = run(*build.backend, kBf16, rows, width, gate_up);
    EXPECT_LE(relative_error(single.hidden, expected), 5e-7);
    EXPECT_LE(relative_error(single.dgate_up, exact.dgate_up), 5e-7);
    EXPECT_LE(relative_error(brain.hidden, expected), 4e-3);
    EXPECT_LE(relative_error(brain.dgate_up, exact.dgate_up), 4e-3);
    EXPECT_EQ(exact.hidden_again, exact.hidden);
    EXPECT_EQ(single.hidden_again, single.hidden);
    EXPECT_EQ(brain.hidden_again, brain.hidden);
  }
}

TEST(Swiglu, BackwardEqualsFiniteDifferences) {
  const std::int64_t rows = 3, width = 7;
  Bench bench;
  const Values values = normal(rows * 2 * width, 1, 2.0), dhidden = normal(rows * width, 2);
  const Tensor gate_up = bench.of(kFp64, Shape{rows, 2 * width}, values);
  const Tensor hidden = bench.empty(kFp64, Shape{rows, width});
  const auto loss = [&] {
    bench.context.backend.swiglu_forward(bench.context, gate_up, hidden);
    return dot(Bench::get(hidden), dhidden);
  };
  const Result result = run(cpu_backend(), kFp64, rows, width, values);
  EXPECT_LE(relative_error(result.dgate_up, finite_differences(gate_up, loss)), 1e-6);
}

TEST(Swiglu, StaysFiniteForLargeGates) {
  for (const ElementType type : {kFp64, kFp32, kBf16}) {
    const Result result = run(cpu_backend(), type, 1, 4, {-1e30, -100, 100, 1e30, 1, 1, 1, 1});
    for (const double value : result.dgate_up) EXPECT_TRUE(std::isfinite(value)) << name_of(type);
    EXPECT_NEAR(result.hidden[0], 0.0, 1e-7);
    EXPECT_NEAR(result.hidden[1], 0.0, 1e-40);
    EXPECT_EQ(result.hidden[2], 100.0);
  }
}

TEST(Swiglu, MayWriteOverItsInput) {
  Bench bench;
  const std::int64_t rows = 3, width = 9;
  const Values values = normal(rows * 2 * width, 1);
  const Result expected = run(cpu_backend(), kFp32, rows, width, values);
  const Tensor gate_up = bench.of(kFp32, Shape{rows, 2 * width}, values);
  const Tensor hidden = bench.empty(kFp32, Shape{rows, width});
  bench.context.backend.swiglu_backward(
      bench.context, bench.of(kFp32, hidden.shape, normal(rows * width, 2)), gate_up, gate_up, hidden);
  EXPECT_EQ(Bench::get(gate_up), expected.dgate_up);
  EXPECT_EQ(Bench::get(hidden), expected.hidden);
}

}  // namespace
}  // namespace agoq

// norm against the definition and finite differences; FP32 and BF16 against FP64.
#include <cmath>

#include "backend/operation_testing.h"

namespace agoq {
namespace {

using namespace testing_operations;

constexpr auto kFp64 = ElementType::kFp64, kFp32 = ElementType::kFp32, kBf16 = ElementType::kBf16;
constexpr double kEpsilon = 1e-5;
constexpr NormKind kKinds[] = {NormKind::kRmsNorm, NormKind::kLayerNorm};

// Off-centre, so that a mean that is left out shows; still exact in BF16.
Values rows_of(std::int64_t count) {
  Values x = normal(count, 1);
  for (double& value : x) value = to_float(to_bf16(static_cast<float>(value + 0.75)));
  return x;
}

struct Result {
  Values y, rstd, dx, dweight;
};

Result run(Backend& backend, ElementType type, NormKind kind, std::int64_t rows, std::int64_t width,
           bool keep_rstd) {
  Bench bench(backend);
  const Shape shape{rows, width};
  const Tensor x = bench.of(type, shape, rows_of(rows * width));
  Tensor weight, dweight, rstd = bench.empty(statistics_type(type), Shape{rows});
  if (kind == NormKind::kRmsNorm) {
    weight = bench.of(type, Shape{width}, normal(width, 2));
    dweight = bench.of(statistics_type(type), Shape{width}, normal(width, 3));
  }
  const Tensor y = bench.empty(type, shape);
  const Tensor dx = bench.of(type, shape, normal(rows * width, 4));
  backend.norm_forward(bench.context, kind, x, weight, kEpsilon, y, rstd);
  backend.norm_backward(bench.context, kind, bench.of(type, shape, normal(rows * width, 5)), x, weight,
                        kEpsilon, keep_rstd ? rstd : Tensor{}, dx, dweight);
  EXPECT_EQ(bench.workspace().used(), 0u);
  return {Bench::get(y), Bench::get(rstd), Bench::get(dx), dweight ? Bench::get(dweight) : Values{}};
}

TEST(Norm, ForwardEqualsTheDefinition) {
  const std::int64_t rows = 5, width = 37;
  const Values x = rows_of(rows * width), weight = normal(width, 2);
  for (const NormKind kind : kKinds) {
    const Result result = run(cpu_backend(), kFp64, kind, rows, width, true);
    for (std::int64_t row = 0; row < rows; ++row) {
      const double* in = x.data() + row * width;
      double mean = 0, squares = 0;
      for (std::int64_t i = 0; i < width; ++i) mean += in[i] / static_cast<double>(width);
      if (kind == NormKind::kRmsNorm) mean = 0;
      for (std::int64_t i = 0; i < width; ++i) {
        squares += (in[i] - mean) * (in[i] - mean) / static_cast<double>(width);
      }
      const double rstd = 1 / std::sqrt(squares + kEpsilon);
      EXPECT_NEAR(result.rstd[static_cast<std::size_t>(row)], rstd, 1e-14);
      for (std::int64_t i = 0; i < width; ++i) {
        const double w = kind == NormKind::kRmsNorm ? weight[static_cast<std::size_t>(i)] : 1.0;
        EXPECT_NEAR(result.y[static_cast<std::size_t>(row * width + i)], (in[i] - mean) * rstd * w,
                    1e-13);
      }
    }
  }
}

TEST(Norm, BackwardAddsWhatFiniteDifferencesSay) {
  for (const NormKind kind : kKinds) {
    for (const bool keep_rstd : {false, true}) {
      const std::int64_t rows = 67, width = 19;  // more rows than one partial sum of dweight takes
      const Result result = run(cpu_backend(), kFp64, kind, rows, width, keep_rstd);
      Bench bench;
      const Tensor x = bench.of(kFp64, Shape{rows, width}, rows_of(rows * width));
      const Tensor weight =
          kind == NormKind::kRmsNorm ? bench.of(kFp64, Shape{width}, normal(width, 2)) : Tensor{};
      const Tensor y = bench.empty(kFp64, x.shape);
      const Values dy = normal(rows * width, 5);
      const auto loss = [&] {
        bench.context.backend.norm_forward(bench.context, kind, x, weight, kEpsilon, y, {});
        return dot(Bench::get(y), dy);
      };
      Values dx = result.dx;
      const Values dx_before = normal(rows * width, 4);
      for (std::size_t i = 0; i < dx.size(); ++i) dx[i] -= dx_before[i];
      EXPECT_LE(relative_error(dx, finite_differences(x, loss)), 1e-6);
      if (kind == NormKind::kLayerNorm) continue;
      Values dweight = result.dweight;
      const Values dweight_before = normal(width, 3);
      for (std::size_t i = 0; i < dweight.size(); ++i) dweight[i] -= dweight_before[i];
      EXPECT_LE(relative_error(dweight, finite_differences(weight, loss)), 1e-6);
    }
  }
}

TEST(Norm, NarrowTypesAgreeWithDoublePrecision) {
  for (const Build& build : builds()) {
    for (const NormKind kind : kKinds) {
      for (const std::int64_t width : {1, 15, 256, 1000}) {
        SCOPED_TRACE(build.name + " width " + std::to_string(width));
        if (kind == NormKind::kLayerNorm && width == 1) continue;  // 0 whatever x is
        const Result exact = run(*build.backend, kFp64, kind, 130, width, true);
        const Result single = run(*build.backend, kFp32, kind, 130, width, true);
        const Result brain = run(*build.backend, kBf16, kind, 130, width, false);
        EXPECT_LE(relative_error(single.y, exact.y), 1e-6);
        EXPECT_LE(relative_error(single.dx, exact.dx), 1e-6);
        EXPECT_LE(relative_error(brain.y, exact.y), 4e-3);  // one rounding to BF16: at most 2^-8
        EXPECT_LE(relative_error(brain.dx, exact.dx), 4e-3);
        if (kind == NormKind::kLayerNorm) continue;
        EXPECT_LE(relative_error(single.dweight, exact.dweight), 1e-6);
        EXPECT_LE(relative_error(brain.dweight, exact.dweight), 1e-6);  // FP32 sums of exact inputs
      }
    }
  }
}

TEST(Norm, RefusesAWeightThatIsMissingOrTooMuch) {
  Bench bench;
  Backend& backend = bench.context.backend;
  const Tensor x = bench.of(kFp32, Shape{2, 4}, normal(8, 1)), y = bench.empty(kFp32, Shape{2, 4});
  const Tensor weight = bench.of(kFp32, Shape{4}, normal(4, 2));
  const auto forward = [&](NormKind kind, const Tensor& w, const Tensor& out) {
    backend.norm_forward(bench.context, kind, x, w, kEpsilon, out, {});
  };
  EXPECT_NO_THROW(forward(NormKind::kRmsNorm, weight, y));
  EXPECT_THROW(forward(NormKind::kRmsNorm, {}, y), Error);
  EXPECT_THROW(forward(NormKind::kLayerNorm, weight, y), Error);
  EXPECT_THROW(forward(NormKind::kRmsNorm, weight, bench.empty(kFp32, Shape{2, 3})), Error);
  EXPECT_THROW(forward(NormKind::kRmsNorm, weight, bench.empty(kBf16, Shape{2, 4})), Error);
}

}  // namespace
}  // namespace agoq

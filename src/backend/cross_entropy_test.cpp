// cross_entropy against the definition and finite differences; weights of zero; targets out of range.
#include <cmath>
#include <limits>

#include "backend/operation_testing.h"

namespace agoq {
namespace {

using namespace testing_operations;

constexpr auto kFp64 = ElementType::kFp64, kFp32 = ElementType::kFp32;

struct Result {
  Values loss, logits;
};

Result run(Backend& backend, ElementType type, std::int64_t vocabulary, const Values& logits,
           const std::vector<std::int32_t>& targets, const Values& weights, bool with_gradient) {
  Bench bench(backend);
  const auto rows = static_cast<std::int64_t>(targets.size());
  const Tensor tensor = bench.of(type, Shape{rows, vocabulary}, logits);
  const Tensor loss = bench.empty(type, Shape{rows});
  backend.cross_entropy(bench.context, tensor, bench.integers(targets),
                        bench.of(kFp32, Shape{rows}, weights), loss, with_gradient ? tensor : Tensor{});
  return {Bench::get(loss), Bench::get(tensor)};
}

const std::vector<std::int32_t> kTargets{0, 36, 5, 5};
const Values kWeights{1.0, 0.5, 0.0, 2.0};
constexpr std::int64_t kVocabulary = 37;

TEST(CrossEntropy, EqualsTheDefinition) {
  const Values logits = normal(4 * kVocabulary, 1, 4.0);
  Values loss, gradient;
  for (std::size_t row = 0; row < 4; ++row) {
    const double* in = logits.data() + row * kVocabulary;
    double total = 0;
    for (std::int64_t i = 0; i < kVocabulary; ++i) total += std::exp(in[i]);
    loss.push_back(kWeights[row] * (std::log(total) - in[kTargets[row]]));
    for (std::int64_t i = 0; i < kVocabulary; ++i) {
      gradient.push_back(kWeights[row] * (std::exp(in[i]) / total - (i == kTargets[row] ? 1.0 : 0.0)));
    }
  }
  for (const Build& build : builds()) {
    const Result exact = run(*build.backend, kFp64, kVocabulary, logits, kTargets, kWeights, true);
    EXPECT_LE(relative_error(exact.loss, loss), 1e-14);
    EXPECT_LE(relative_error(exact.logits, gradient), 1e-14);
    const Result single = run(*build.backend, kFp32, kVocabulary, logits, kTargets, kWeights, true);
    EXPECT_LE(relative_error(single.loss, loss), 5e-7);
    EXPECT_LE(relative_error(single.logits, gradient), 1e-6);
    const Result only_loss = run(*build.backend, kFp32, kVocabulary, logits, kTargets, kWeights, false);
    EXPECT_EQ(only_loss.loss, single.loss);
    EXPECT_EQ(only_loss.logits, logits);
  }
}

TEST(CrossEntropy, WritesTheGradientBesideTheLogitsInAnotherType) {
  const Values logits = normal(4 * kVocabulary, 1, 4.0);
  for (const Build& build : builds()) {
    const Result single = run(*build.backend, kFp32, kVocabulary, logits, kTargets, kWeights, true);
    Bench bench(*build.backend);
    const Tensor tensor = bench.of(kFp32, Shape{4, kVocabulary}, logits);
    const Tensor gradient = bench.empty(ElementType::kBf16, tensor.shape),
                 loss = bench.empty(kFp32, Shape{4});
    build.backend->cross_entropy(bench.context, tensor, bench.integers(kTargets),
                                 bench.of(kFp32, Shape{4}, kWeights), loss, gradient);
    EXPECT_EQ(Bench::get(loss), single.loss);
    EXPECT_EQ(Bench::get(tensor), logits);
    const Values rounded = Bench::get(gradient);
    for (std::size_t i = 0; i < rounded.size(); ++i) {
      EXPECT_EQ(rounded[i], to_float(to_bf16(static_cast<float>(single.logits[i])))) << i;
    }
  }
}

TEST(CrossEntropy, GradientEqualsFiniteDifferences) {
  Bench bench;
  const Values values = normal(4 * kVocabulary, 1);
  const Tensor logits = bench.of(kFp64, Shape{4, kVocabulary}, values),
               loss = bench.empty(kFp64, Shape{4});
  const Tensor targets = bench.integers(kTargets), weights = bench.of(kFp32, Shape{4}, kWeights);
  const auto total = [&] {
    bench.context.backend.cross_entropy(bench.context, logits, targets, weights, loss, {});
    return dot(Bench::get(loss), Values(4, 1.0));
  };
  const Result result = run(cpu_backend(), kFp64, kVocabulary, values, kTargets, kWeights, true);
  EXPECT_LE(relative_error(result.logits, finite_differences(logits, total)), 1e-6);
}

TEST(CrossEntropy, RowsOfWeightZeroAreNotRead) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  for (const ElementType type : {kFp64, kFp32}) {
    const Result result =
        run(cpu_backend(), type, 3, {nan, infinity, 1, 1, 2, 3}, {-100, 1}, {0, 1}, true);
    EXPECT_EQ(result.loss[0], 0.0);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(result.logits[i], 0.0);
    EXPECT_NEAR(result.loss[1], 1.4076059644443804, 1e-6);
  }
}

TEST(CrossEntropy, IsSafeForLargeLogitsAndMaskedOnes) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const ElementType type : {kFp64, kFp32}) {
    const Result result =
        run(cpu_backend(), type, 3, {1e30, 0, -1e30, -infinity, 0, 0}, {0, 1}, {1, 1}, true);
    EXPECT_EQ(result.loss[0], 0.0);
    EXPECT_NEAR(result.loss[1], std::log(2.0), 1e-6);
    EXPECT_EQ(result.logits[3], 0.0);
    EXPECT_NEAR(result.logits[4], -0.5, 1e-6);
  }
}

TEST(CrossEntropy, NamesThePositionOfATargetOutsideTheVocabulary) {
  for (const std::int32_t wrong : {-1, 3}) {
    try {
      run(cpu_backend(), kFp32, 3, Values(6, 0.0), {0, wrong}, {1, 1}, true);
      FAIL() << "a target outside the vocabulary was taken";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("position 1 is " + std::to_string(wrong)),
                std::string::npos)
          << error.what();
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
    }
  }
}

}  // namespace
}  // namespace agoq

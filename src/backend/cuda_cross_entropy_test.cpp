// Cross-entropy on CUDA against the CPU. Tolerances: 1e-5 in L2 for losses and FP32 gradients; BF16
// gradients 4e-3. (An FP32 gradient is exp(logit - L), so one unit in the last place of L, 2e-6 for an L
// of 16 to 32, is its error.) Rows of weight 0 are exact zeros; a target outside the vocabulary makes
// its row's loss NaN.
#include <limits>

#include "backend/cuda_testing.h"

namespace agoq {
namespace {

using namespace testing_cuda;

constexpr auto kFp32 = ElementType::kFp32, kBf16 = ElementType::kBf16;
constexpr double kFp32Tolerance = 1e-5, kBf16Tolerance = 4e-3;

struct Loss {
  Twin logits, targets, weights, loss;
};

/// Row 1 has weight 0 and, where the CPU may see it, no valid target.
Loss make(Pair& pair, std::int64_t rows, std::int64_t vocabulary, double deviation) {
  std::vector<std::int32_t> targets;
  Values weights;
  for (std::int64_t row = 0; row < rows; ++row) {
    targets.push_back(static_cast<std::int32_t>((row * 7919 + vocabulary - 1) % vocabulary));
    weights.push_back(row == 1 ? 0.0 : 1.0 + .5 * static_cast<double>(row % 3));
  }
  if (rows > 1) targets[1] = -1;
  return {pair.random(kFp32, Shape{rows, vocabulary}, deviation), pair.integers(targets),
          pair.of(kFp32, Shape{rows}, weights), pair.empty(kFp32, Shape{rows})};
}

void run(Pair& pair, const Loss& tensors, const Twin& gradient) {
  cpu_backend().cross_entropy(pair.cpu, tensors.logits.cpu, tensors.targets.cpu, tensors.weights.cpu,
                              tensors.loss.cpu, gradient.cpu);
  cuda_backend().cross_entropy(pair.cuda, tensors.logits.cuda, tensors.targets.cuda,
                               tensors.weights.cuda, tensors.loss.cuda, gradient.cuda);
}

TEST(CudaCrossEntropy, EqualsTheCpu) {
  AGOQ_NEEDS_GPU();
  for (const auto& [rows, vocabulary] : {std::pair<std::int64_t, std::int64_t>{1, 128256},
                                         {7, 128256},
                                         {40, 32000},
                                         {5, 16388},
                                         {9, 50257},
                                         {1025, 256},
                                         {1000, 129},
                                         {5, 1},
                                         {9, 16385}}) {
    for (const double deviation : {1.0, 4.0}) {
      SCOPED_TRACE(fmt::format("[{}, {}] deviation {}", rows, vocabulary, deviation));
      Pair pair;
      const Loss tensors = make(pair, rows, vocabulary, deviation);
      run(pair, tensors, {});
      EXPECT_LE(pair.error(tensors.loss), kFp32Tolerance);
      const Values only_loss = pair.values(tensors.loss.cuda);
      const Twin beside = pair.empty(kBf16, tensors.logits.cpu.shape);
      run(pair, tensors, beside);
      EXPECT_EQ(pair.values(tensors.loss.cuda), only_loss);
      EXPECT_LE(pair.error(beside), kBf16Tolerance);
      run(pair, tensors, tensors.logits);  // the gradient over the logits
      EXPECT_EQ(pair.values(tensors.loss.cuda), only_loss);
      EXPECT_LE(pair.error(tensors.logits), kFp32Tolerance);
      if (rows > 1) {
        EXPECT_EQ(pair.values(tensors.loss.cuda)[1], 0.0);
        EXPECT_EQ(pair.values(tensors.logits.cuda.slice_rows(1, 2)),
                  Values(static_cast<std::size_t>(vocabulary)));
      }
    }
  }
}

TEST(CudaCrossEntropy, DoesNotReadRowsOfWeightZero) {
  AGOQ_NEEDS_GPU();
  Pair pair;
  Loss tensors = make(pair, 4, 5000, 1.0);
  std::fill_n(tensors.logits.cpu.as<float>() + 5000, 5000, std::numeric_limits<float>::quiet_NaN());
  pair.upload(tensors.logits);
  run(pair, tensors, tensors.logits);
  EXPECT_LE(pair.error(tensors.loss), kFp32Tolerance);
  EXPECT_LE(pair.error(tensors.logits), kFp32Tolerance);
}

TEST(CudaCrossEntropy, SurvivesLogitsThatAreFarApart) {
  AGOQ_NEEDS_GPU();
  Pair pair;
  constexpr std::int64_t kVocabulary = 40000;
  Loss tensors = make(pair, 3, kVocabulary, 1.0);
  float* const logits = tensors.logits.cpu.as<float>();
  // Rising by hundreds, so that the running maximum changes all along; -infinity, as a mask.
  for (std::int64_t i = 0; i < kVocabulary; ++i) {
    logits[i] = .02f * static_cast<float>(i) - 800.0f;
    logits[2 * kVocabulary + i] = i % 3 == 0 ? -std::numeric_limits<float>::infinity() : 3.0f;
  }
  tensors.targets.cpu.as<std::int32_t>()[0] = kVocabulary - 5;
  tensors.targets.cpu.as<std::int32_t>()[2] = 1;
  pair.upload(tensors.logits);
  pair.upload(tensors.targets);
  run(pair, tensors, tensors.logits);
  EXPECT_LE(pair.error(tensors.loss), kFp32Tolerance);
  EXPECT_LE(pair.error(tensors.logits), kFp32Tolerance);
}

TEST(CudaCrossEntropy, MakesTheLossOfATargetOutsideTheVocabularyNaN) {
  AGOQ_NEEDS_GPU();
  for (const std::int32_t target : {-1, 1000, std::numeric_limits<std::int32_t>::max()}) {
    Pair pair;
    Loss tensors = make(pair, 3, 1000, 1.0);
    tensors.targets.cpu.as<std::int32_t>()[2] = target;
    pair.upload(tensors.targets);
    cuda_backend().cross_entropy(pair.cuda, tensors.logits.cuda, tensors.targets.cuda,
                                 tensors.weights.cuda, tensors.loss.cuda, tensors.logits.cuda);
    const Values loss = pair.values(tensors.loss.cuda);
    EXPECT_TRUE(std::isfinite(loss[0]));
    EXPECT_EQ(loss[1], 0.0);
    EXPECT_TRUE(std::isnan(loss[2]));
    EXPECT_EQ(pair.values(tensors.logits.cuda.slice_rows(2, 3)), Values(1000));
  }
}

}  // namespace
}  // namespace agoq

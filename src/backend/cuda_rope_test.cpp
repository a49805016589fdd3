// rope on the GPU: the CPU's bits.
#include <cmath>

#include "backend/cuda_testing.h"

namespace agoq {
namespace {

using namespace testing_cuda;

constexpr std::int64_t kKnown = 2048;

Twin angles(Pair& pair, int head_size) {
  Values values;
  for (std::int64_t position = 0; position < kKnown; ++position) {
    for (int i = 0; i < head_size / 2; ++i) {
      const double angle = static_cast<double>(position) * std::pow(10000.0, -2.0 * i / head_size);
      values.push_back(std::cos(angle));
      values.push_back(std::sin(angle));
    }
  }
  return pair.of(ElementType::kFp32, Shape{kKnown, head_size / 2, 2}, values);
}

TEST(CudaRope, HasTheBitsOfTheCpu) {
  AGOQ_NEEDS_GPU();
  for (const AttentionShape& shape :
       {AttentionShape{32, 8, 128}, AttentionShape{9, 3, 64}, AttentionShape{4, 1, 96},
        AttentionShape{5, 5, 80}, AttentionShape{2, 1, 256}, AttentionShape{3, 1, 10}}) {
    for (const std::int64_t tokens : {1, 7, 1000, 1025}) {
      for (const ElementType type : {ElementType::kFp32, ElementType::kBf16}) {
        for (const bool inverse : {false, true}) {
          SCOPED_TRACE("head size " + std::to_string(shape.head_size) + ", tokens " +
                       std::to_string(tokens));
          Pair pair(std::size_t{64} << 20);
          const Twin qkv = pair.random(type, Shape{tokens, shape.qkv_width()});
          std::vector<std::int32_t> positions;
          for (std::int64_t n = 0; n < tokens; ++n) {
            positions.push_back(static_cast<std::int32_t>(n * 7 % kKnown));
          }
          const Twin at = pair.integers(positions), table = angles(pair, shape.head_size);
          cpu_backend().rope(pair.cpu, shape, qkv.cpu, at.cpu, table.cpu, inverse);
          cuda_backend().rope(pair.cuda, shape, qkv.cuda, at.cuda, table.cuda, inverse);
          EXPECT_EQ(pair.error(qkv), 0.0);
        }
      }
    }
  }
}

TEST(CudaRope, TurnsTokensBeyondTheTableIntoNan) {
  AGOQ_NEEDS_GPU();
  const AttentionShape shape{4, 2, 64};
  for (const std::int32_t beyond : {-1, static_cast<std::int32_t>(kKnown)}) {
    Pair pair(std::size_t{64} << 20);
    const Twin qkv = pair.random(ElementType::kBf16, Shape{2, shape.qkv_width()});
    const Twin at = pair.integers({5, beyond}), table = angles(pair, shape.head_size);
    cuda_backend().rope(pair.cuda, shape, qkv.cuda, at.cuda, table.cuda, false);
    const Values values = pair.values(qkv.cuda);
    const auto width = static_cast<std::size_t>(shape.qkv_width());
    const auto turned = static_cast<std::size_t>(6 * 64);
    for (std::size_t i = 0; i < width; ++i) {
      EXPECT_FALSE(std::isnan(values[i]));
      EXPECT_EQ(std::isnan(values[width + i]), i < turned) << i;
    }
  }
}

}  // namespace
}  // namespace agoq

#include <gtest/gtest.h>
#include <omp.h>

#include <cstring>
#include <vector>

#include "backend/backend.h"

namespace agoq {
namespace {

double normal(std::uint32_t tensor, std::int64_t index) {
  const RandomKey key{.seed = 77};
  return random_normal(key.with(RandomPurpose::kTest, tensor), static_cast<std::uint64_t>(index));
}

class Embedding : public testing::Test {
 protected:
  Arena memory_{"test tensors", host_allocator(), std::size_t{16} << 20};
  Arena workspace_{"workspace", host_allocator(), std::size_t{8} << 20};
  Context context_{cpu_backend(), {}, workspace_, {.seed = 3, .step = 2, .micro_batch = 1}};

  Tensor tokens(const std::vector<std::int32_t>& ids) {
    const Tensor tensor =
        memory_.take(ElementType::kInt32, Shape{static_cast<std::int64_t>(ids.size())});
    std::copy(ids.begin(), ids.end(), tensor.as<std::int32_t>());
    return tensor;
  }
  Tensor random(ElementType type, std::int64_t rows, std::int64_t width, std::uint32_t stream) {
    const Tensor tensor = memory_.take(type, Shape{rows, width});
    for (std::int64_t i = 0; i < tensor.count(); ++i) {
      const double value = normal(stream, i);
      if (type == ElementType::kFp64) tensor.as<double>()[i] = value;
      if (type == ElementType::kFp32) tensor.as<float>()[i] = static_cast<float>(value);
      if (type == ElementType::kBf16) tensor.as<Bf16>()[i] = to_bf16(static_cast<float>(value));
    }
    return tensor;
  }
  QuantTensor zero_gradient(const QuantFormat& format, const BlockGrid& grid) {
    const QuantTensor tensor = take(memory_, format, grid);
    zero_planes(context_, tensor);
    return tensor;
  }
  Tensor zero_counters() {
    const Tensor counters = memory_.take(ElementType::kInt64, Shape{kQuantCounters});
    std::memset(counters.data, 0, counters.bytes());
    return counters;
  }
};

constexpr QuantFormat kE4m3{Code::kE4m3, 128, ScaleType::kFp32, Rounding::kNearest};

TEST_F(Embedding, ForwardCopiesTheRowsOfItsTokens) {
  for (const ElementType type : {ElementType::kFp64, ElementType::kFp32, ElementType::kBf16}) {
    const Tensor table = random(type, 11, 33, 1);
    const Tensor ids = tokens({10, 0, 3, 3});
    const Tensor out = memory_.take(type, Shape{4, 33});
    context_.backend.embedding_forward(context_, ids, table, out);
    for (std::int64_t n = 0; n < 4; ++n) {
      const std::int32_t token = ids.as<std::int32_t>()[n];
      EXPECT_EQ(std::memcmp(out.slice_rows(n, n + 1).data, table.slice_rows(token, token + 1).data,
                            33 * size_of(type)),
                0);
    }
  }
}

TEST_F(Embedding, BackwardSumsInTheComputeTypeAndInPositionOrder) {
  // In FP32 (2^24 + 1) + 1 is 2^24 but 2^24 + (1 + 1) is not: only position order gives 2^24 here.
  const Tensor dout = memory_.take(ElementType::kFp32, Shape{4, 1});
  const float values[] = {16777216.0f, 5.0f, 1.0f, 1.0f};
  std::copy(std::begin(values), std::end(values), dout.as<float>());
  const QuantTensor gradient = zero_gradient(exact_format(ElementType::kFp32), {3, 1, 1});
  context_.backend.embedding_backward(context_, tokens({2, 0, 2, 2}), dout, gradient, context_.random,
                                      {});
  EXPECT_EQ(gradient.exact().as<float>()[0], 5.0f);
  EXPECT_EQ(gradient.exact().as<float>()[1], 0.0f);
  EXPECT_EQ(gradient.exact().as<float>()[2], 16777216.0f);

  // BF16 rows are summed in FP32: 256 + 1 and 1 are lost in BF16.
  const Tensor half = memory_.take(ElementType::kBf16, Shape{3, 1});
  for (int n = 0; n < 3; ++n) half.as<Bf16>()[n] = to_bf16(n == 0 ? 256.0f : 1.0f);
  zero_planes(context_, gradient);
  context_.backend.embedding_backward(context_, tokens({1, 1, 1}), half, gradient, context_.random, {});
  EXPECT_EQ(gradient.exact().as<float>()[1], 258.0f);

  const Tensor fine = memory_.take(ElementType::kFp64, Shape{2, 1});
  fine.as<double>()[0] = 1.0;
  fine.as<double>()[1] = 0x1p-40;
  const QuantTensor fp64 = zero_gradient(exact_format(ElementType::kFp64), {3, 1, 1});
  context_.backend.embedding_backward(context_, tokens({1, 1}), fine, fp64, context_.random, {});
  EXPECT_EQ(fp64.exact().as<double>()[1], 1.0 + 0x1p-40);
}

TEST_F(Embedding, BackwardDoesNotDependOnTheNumberOfThreads) {
  constexpr std::int64_t kTokens = 400;
  constexpr std::int64_t kWidth = 96;
  QuantFormat format = kE4m3;
  format.rounding = Rounding::kStochastic;
  std::vector<std::int32_t> ids;
  for (std::int64_t n = 0; n < kTokens; ++n) {
    ids.push_back(
        static_cast<std::int32_t>(random_bits(context_.random, static_cast<std::uint64_t>(n)) % 50));
  }
  const Tensor token = tokens(ids);
  const Tensor dout = random(ElementType::kFp32, kTokens, kWidth, 2);
  const int threads_before = omp_get_max_threads();
  std::vector<std::vector<std::byte>> results;
  for (const int threads : {1, 2, 5}) {
    omp_set_num_threads(threads);
    const QuantTensor gradient = zero_gradient(format, {64, kWidth, 2});
    const Tensor counters = zero_counters();
    context_.backend.embedding_backward(context_, token, dout, gradient, context_.random, counters);
    results.emplace_back(gradient.codes, gradient.codes + 64 * kWidth);
    EXPECT_EQ(counters.as<std::int64_t>()[0], 0);
  }
  omp_set_num_threads(threads_before);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST_F(Embedding, BackwardCountsWhatIsNotFinite) {
  const Tensor dout = random(ElementType::kFp32, 2, 128, 3);
  dout.as<float>()[130] = std::numeric_limits<float>::quiet_NaN();
  const Tensor counters = zero_counters();
  const QuantTensor gradient = zero_gradient(kE4m3, {4, 128, 1});
  context_.backend.embedding_backward(context_, tokens({1, 3}), dout, gradient, context_.random,
                                      counters);
  EXPECT_EQ(counters.as<std::int64_t>()[static_cast<int>(QuantCounter::kNonFinite)], 1);
}

TEST_F(Embedding, RefusesTokensOutsideTheTable) {
  const Tensor table = random(ElementType::kFp32, 8, 4, 4);
  const Tensor out = random(ElementType::kFp32, 3, 4, 5);
  const QuantTensor gradient = zero_gradient(exact_format(ElementType::kFp32), {8, 4, 1});
  for (const std::int32_t outside : {8, -1}) {
    const Tensor ids = tokens({0, outside, 7});
    try {
      context_.backend.embedding_backward(context_, ids, out, gradient, context_.random, {});
      FAIL() << "token " << outside << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      EXPECT_NE(std::string(error.what()).find("position 1 holds " + std::to_string(outside)),
                std::string::npos)
          << error.what();
    }
    EXPECT_THROW(context_.backend.embedding_forward(context_, ids, table, out), Error);
  }
  for (std::int64_t i = 0; i < 32; ++i) EXPECT_EQ(gradient.exact().as<float>()[i], 0.0f);
  EXPECT_THROW(context_.backend.embedding_forward(context_, tokens({0, 1}), table, out), Error);
  EXPECT_THROW(
      context_.backend.embedding_backward(context_, tokens({0, 1}), out, gradient, context_.random, {}),
      Error);
}

TEST_F(Embedding, MeasuresItsWorkspace) {
  const Tensor dout = random(ElementType::kBf16, 5, 64, 6);
  const QuantTensor gradient = zero_gradient(kE4m3, {300, 64, 1});
  const Tensor ids = tokens({1, 2, 3, 299, 1});
  Arena plan = Arena::measuring("plan");
  context_.backend.embedding_backward({cpu_backend(), {}, plan, {}}, ids, dout, gradient,
                                      context_.random, {});
  EXPECT_EQ(workspace_.high_water(), 0u);
  context_.backend.embedding_backward(context_, ids, dout, gradient, context_.random, {});
  EXPECT_EQ(workspace_.high_water(), plan.high_water());
  EXPECT_EQ(workspace_.used(), 0u);
}

}  // namespace
}  // namespace agoq

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "backend/backend.h"
#include "core/master_weight.h"

namespace agoq {
namespace {

constexpr QuantFormat kSigned{Code::kDynamic8, 256, ScaleType::kFp32, Rounding::kNearest};
constexpr QuantFormat kUnsigned{Code::kDynamic8Unsigned, 256, ScaleType::kFp32, Rounding::kNearest};

double normal(std::uint32_t tensor, std::int64_t index) {
  const RandomKey key{.seed = 78};
  return random_normal(key.with(RandomPurpose::kTest, tensor), static_cast<std::uint64_t>(index));
}

std::vector<std::byte> bytes_of(const QuantTensor& tensor) {
  const RowBytes bytes = row_bytes(tensor.format, tensor.grid);
  std::vector<std::byte> all(tensor.codes, tensor.codes + bytes.codes * tensor.rows());
  all.insert(all.end(), tensor.scales, tensor.scales + bytes.scales * tensor.rows());
  return all;
}
std::vector<std::byte> bytes_of(const Tensor& tensor) {
  return {tensor.data, tensor.data + tensor.bytes()};
}

class AdamwUpdate : public testing::Test {
 protected:
  Arena memory_{"test tensors", host_allocator(), std::size_t{32} << 20};
  Arena workspace_{"workspace", host_allocator(), std::size_t{4} << 20};
  Context context_{cpu_backend(), {}, workspace_, {.seed = 3}};
  const RandomKey key_ = RandomKey{.seed = 9, .step = 4}.with(RandomPurpose::kWeightRounding, 6);

  QuantTensor quantised(const QuantFormat& format, const BlockGrid& grid,
                        const std::vector<float>& values) {
    const Tensor source = memory_.take(ElementType::kFp32, Shape{grid.rows, grid.row_length});
    std::copy(values.begin(), values.end(), source.as<float>());
    const QuantTensor tensor = take(memory_, format, grid);
    context_.backend.quantize(context_, source, tensor, {}, {});
    return tensor;
  }
  std::vector<float> decoded(const QuantTensor& tensor) {
    const Tensor out = memory_.take(ElementType::kFp32, Shape{tensor.rows(), tensor.width()});
    context_.backend.dequantize(context_, tensor, out);
    return {out.as<float>(), out.as<float>() + out.count()};
  }
};

struct GridCase {
  std::int64_t rows, columns, segments;
};

// The one pass is the composition of dequantize, a plain loop and quantize, byte for byte: for short
// blocks, segments, every kind of gradient and moment.
TEST_F(AdamwUpdate, IsDequantiseUpdateQuantise) {
  AdamwStep step;
  step.master = MasterKind::kRemainder;
  step.learning_rate = 1e-2;
  step.weight_decay = 0.1;
  step.gradient_scale = 0.25;
  step.step = 3;
  const std::vector<QuantFormat> gradient_formats{
      parse_format("e4m3/128/fp32"), parse_format("int8/128/fp32"), parse_format("nf4/32/two-level"),
      parse_format("bf16"), parse_format("fp32")};
  for (const GridCase& c :
       {GridCase{5, 1, 1}, GridCase{1, 300, 1}, GridCase{40, 257, 1}, GridCase{7, 320, 4}}) {
    const BlockGrid grid{c.rows, c.columns, c.segments};
    const auto count = static_cast<std::size_t>(grid.count());
    std::vector<float> gradient(count), first(count), second(count), master(count);
    for (std::size_t i = 0; i < count; ++i) {
      const auto index = static_cast<std::int64_t>(i);
      gradient[i] = static_cast<float>(normal(1, index) * std::exp(2 * normal(5, index)));
      first[i] = static_cast<float>(normal(2, index));
      second[i] = static_cast<float>(std::exp(4 * normal(3, index)));
      master[i] = static_cast<float>(normal(4, index));
    }
    for (const QuantFormat& gradient_format : gradient_formats) {
      for (const bool quantised_moments : {true, false}) {
        const QuantFormat fp32 = exact_format(ElementType::kFp32);
        AdamwTensors tensors;
        tensors.gradient = quantised(gradient_format, grid, gradient);
        tensors.first_moment = quantised(quantised_moments ? kSigned : fp32, grid, first);
        tensors.second_moment = quantised(quantised_moments ? kUnsigned : fp32, grid, second);
        tensors.weight = memory_.take(ElementType::kBf16, Shape{c.rows, c.columns});
        tensors.master = memory_.take(ElementType::kInt16, Shape{c.rows, c.columns});
        for (std::size_t i = 0; i < count; ++i) {
          const SplitMaster split = split_master(master[i]);
          tensors.weight.as<Bf16>()[i] = split.weight;
          tensors.master.as<std::int16_t>()[i] = split.remainder;
        }
        const std::vector<float> g = decoded(tensors.gradient);
        std::vector<float> m = decoded(tensors.first_moment);
        std::vector<float> v = decoded(tensors.second_moment);
        std::vector<float> p = master;
        const auto rate = static_cast<float>(1e-2 / (1 - std::pow(0.9, 3)));
        const auto correction = static_cast<float>(1 / std::sqrt(1 - std::pow(0.95, 3)));
        for (std::size_t i = 0; i < count; ++i) {
          const float scaled = 0.25f * g[i];
          m[i] = m[i] + static_cast<float>(1 - 0.9) * (scaled - m[i]);
          v[i] = 0.95f * v[i] + static_cast<float>(1 - 0.95) * scaled * scaled;
          p[i] = static_cast<float>(1 - 1e-2 * 0.1) * p[i] -
                 rate * (m[i] / (std::sqrt(v[i]) * correction + 1e-8f));
        }
        if (quantised_moments) {  // non-zero elements do not round to zero
          for (std::int64_t row = 0; row < c.rows; ++row) {
            for (std::int64_t segment = 0; segment < c.segments; ++segment) {
              const std::int64_t length = grid.segment_length();
              for (std::int64_t block = 0; block < length; block += 256) {
                float* const x = v.data() + row * c.columns + segment * length + block;
                float* const end = x + std::min<std::int64_t>(256, length - block);
                const float least = *std::max_element(x, end) * 3.25e-7f;
                for (float* y = x; y != end; ++y) *y = *y > 0 ? std::max(*y, least) : *y;
              }
            }
          }
        }
        context_.backend.adamw_update(context_, tensors, step, key_);

        const std::string name = gradient_format.to_string() +
                                 (quantised_moments ? " 8-bit " : " fp32 ") + std::to_string(c.rows) +
                                 "x" + std::to_string(c.columns);
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_EQ(join_master(tensors.weight.as<Bf16>()[i], tensors.master.as<std::int16_t>()[i]),
                    p[i])
              << name << " element " << i;
        }
        EXPECT_EQ(bytes_of(tensors.first_moment),
                  bytes_of(quantised(tensors.first_moment.format, grid, m)))
            << name;
        EXPECT_EQ(bytes_of(tensors.second_moment),
                  bytes_of(quantised(tensors.second_moment.format, grid, v)))
            << name;
        const std::vector<float> stored = decoded(tensors.second_moment);
        for (std::size_t i = 0; i < count; ++i)
          ASSERT_EQ(stored[i] > 0.0f, v[i] > 0.0f) << name << " element " << i;
      }
    }
  }
}

TEST_F(AdamwUpdate, MovesAnFp64WeightByFp64ArithmeticWhateverTheGradientsFormat) {
  const BlockGrid grid{16, 256, 1};
  std::vector<float> gradient(4096);
  for (std::size_t i = 0; i < gradient.size(); ++i)
    gradient[i] = static_cast<float>(normal(7, static_cast<std::int64_t>(i)));
  AdamwTensors tensors;
  tensors.gradient = quantised(parse_format("e4m3/128/fp32"), grid, gradient);
  tensors.first_moment = quantised(kSigned, grid, std::vector<float>(4096, 0.0f));
  tensors.second_moment = quantised(kUnsigned, grid, std::vector<float>(4096, 0.0f));
  tensors.weight = memory_.take(ElementType::kFp64, Shape{16, 256});
  std::fill_n(tensors.weight.as<double>(), 4096, 1.0);
  AdamwStep step;
  step.learning_rate = 1e-3;
  context_.backend.adamw_update(context_, tensors, step, key_);
  const std::vector<float> g = decoded(tensors.gradient);
  for (std::size_t i = 0; i < g.size(); ++i) {
    const double x = g[i];
    EXPECT_NEAR(tensors.weight.as<double>()[i], 1.0 - 1e-3 * x / (std::abs(x) + 1e-8), 1e-15);
  }
}

TEST_F(AdamwUpdate, BytesDoNotDependOnTheNumberOfThreads) {
  const BlockGrid grid{61, 300, 2};
  std::vector<float> gradient(static_cast<std::size_t>(grid.count()));
  for (std::size_t i = 0; i < gradient.size(); ++i)
    gradient[i] = static_cast<float>(normal(8, static_cast<std::int64_t>(i)));
  QuantFormat first_format = kSigned;
  QuantFormat second_format = kUnsigned;
  first_format.rounding = second_format.rounding = Rounding::kStochastic;
  const int threads_before = omp_get_max_threads();
  std::vector<std::vector<std::byte>> weights, firsts, seconds;
  for (const int threads : {1, 2, 5}) {
    omp_set_num_threads(threads);
    AdamwTensors tensors;
    tensors.gradient = quantised(parse_format("e4m3/128/fp32"), grid, gradient);
    tensors.first_moment = quantised(first_format, grid, gradient);
    std::vector<float> square(gradient);
    for (float& value : square) value *= value;
    tensors.second_moment = quantised(second_format, grid, square);
    tensors.weight = memory_.take(ElementType::kBf16, Shape{61, 300});
    for (std::int64_t i = 0; i < grid.count(); ++i) tensors.weight.as<Bf16>()[i] = to_bf16(1.0f);
    AdamwStep step;
    step.learning_rate = 1e-3;
    context_.backend.adamw_update(context_, tensors, step, key_);
    weights.push_back(bytes_of(tensors.weight));
    firsts.push_back(bytes_of(tensors.first_moment));
    seconds.push_back(bytes_of(tensors.second_moment));
  }
  omp_set_num_threads(threads_before);
  for (std::size_t other : {1u, 2u}) {
    EXPECT_EQ(weights[0], weights[other]);
    EXPECT_EQ(firsts[0], firsts[other]);
    EXPECT_EQ(seconds[0], seconds[other]);
  }
}

TEST_F(AdamwUpdate, RefusesOperandsThatDoNotFit) {
  const BlockGrid grid{4, 32, 1};
  const std::vector<float> ones(128, 1.0f);
  AdamwTensors tensors;
  tensors.gradient = quantised(exact_format(ElementType::kFp32), grid, ones);
  tensors.first_moment = quantised(exact_format(ElementType::kFp32), grid, ones);
  tensors.second_moment = quantised(exact_format(ElementType::kFp32), grid, ones);
  tensors.weight = memory_.take(ElementType::kFp32, Shape{4, 32});
  std::fill_n(tensors.weight.as<float>(), 128, 1.0f);
  AdamwStep step;
  EXPECT_NO_THROW(context_.backend.adamw_update(context_, tensors, step, key_));

  step.master = MasterKind::kFp32;  // an FP32 weight has no other master
  EXPECT_THROW(context_.backend.adamw_update(context_, tensors, step, key_), Error);
  step.master = MasterKind::kNone;

  AdamwTensors wrong = tensors;
  wrong.weight.shape = Shape{4, 31};
  EXPECT_THROW(context_.backend.adamw_update(context_, wrong, step, key_), Error);
  wrong = tensors;
  wrong.second_moment = quantised(exact_format(ElementType::kFp32), {8, 16, 1}, ones);
  EXPECT_THROW(context_.backend.adamw_update(context_, wrong, step, key_), Error);
  wrong = tensors;
  wrong.weight = memory_.take(ElementType::kFp16, Shape{4, 32});
  EXPECT_THROW(context_.backend.adamw_update(context_, wrong, step, key_), Error);
  wrong.weight = memory_.take(ElementType::kBf16, Shape{4, 32});
  wrong.master = memory_.take(ElementType::kFp32, Shape{4, 32});
  step.master = MasterKind::kRemainder;  // and the master is FP32
  EXPECT_THROW(context_.backend.adamw_update(context_, wrong, step, key_), Error);
}

}  // namespace
}  // namespace agoq

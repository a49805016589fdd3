// The quantised tensors of the CUDA backend against the CPU's: the same bytes and the same counters, in
// every format; then what works on them: sums, AdamW, the embedding's gradient.
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>

#include "backend/cuda_testing.h"
#include "quant/codec.h"

namespace agoq {
namespace {

using testing_cuda::Pair;
using testing_cuda::QuantTwin;
using testing_cuda::Twin;
using testing_cuda::Values;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

QuantFormat stochastic(QuantFormat format) {
  format.rounding = Rounding::kStochastic;
  return format;
}

std::vector<QuantFormat> exact_formats() {
  return {parse_format("fp32"), parse_format("bf16"), parse_format("fp16")};
}

std::vector<BlockGrid> awkward_grids() {
  std::vector<BlockGrid> grids;
  for (const std::int64_t width : {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 100, 129, 255, 257, 300}) {
    grids.push_back({3, width, 1});
  }
  grids.push_back({1, 1024, 1});
  grids.push_back({2, 1025, 1});
  grids.push_back({2, 2056, 1});
  grids.push_back({1, 4096, 1});
  grids.push_back({2, 1792, 1});        // 14336 / 8
  grids.push_back({2, 1376, 1});        // 11008 / 8
  grids.push_back({1, 14336 / 8, 16});  // segments of 112
  grids.push_back({2, 4 * 1100, 4});
  grids.push_back({3, 5 * 33, 5});
  return grids;
}

/// Normal numbers whose size changes a lot from block to block, so that block scales under one super
/// scale reach into E4M3's subnormals and to zero; and what is no number, or hardly one, in between.
Values awkward_values(std::int64_t count, std::uint32_t seed) {
  const RandomKey key = RandomKey{.seed = 21}.with(RandomPurpose::kTest, seed);
  Values values = testing_operations::normal(count, seed + 1000);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto place = static_cast<std::uint64_t>(i);
    double& x = values[static_cast<std::size_t>(i)];
    x *= std::exp2(24.0 * random_uniform(key, 1'000'000 + place / 16) - 20.0);
    if (random_uniform(key, 3'000'000 + place / 64) < 0.1f) x = 0.0;  // whole blocks of zeros
    switch (static_cast<int>(600 * random_uniform(key, 2'000'000 + place))) {
      case 0: x = kNan; break;
      case 1: x = kInfinity; break;
      case 2: x = -kInfinity; break;
      case 3: x = 1e30; break;
      case 4: x = -0.0; break;
      case 5: x = 1e-40; break;  // denormal
      case 6: x = 3.4e38; break;
      default: break;
    }
  }
  return values;
}

class CudaCodec : public testing::Test {
 protected:
  void SetUp() override {
    AGOQ_NEEDS_GPU();
    pair_.emplace(std::size_t{96} << 20);
  }
  /// Forgets all tensors.
  void renew() {
    pair_.reset();
    pair_.emplace(std::size_t{96} << 20);
  }

  void expect_same(const QuantTwin& twin, const std::string& what) {
    EXPECT_EQ(pair_->differing_bytes(twin), 0)
        << what << ": " << twin.cpu.format.to_string() << " [" << twin.cpu.grid.rows << ", "
        << twin.cpu.grid.row_length << "] in " << twin.cpu.grid.segments << " segments";
  }
  void expect_same(const Twin& counters, const QuantTwin& twin) {
    EXPECT_EQ(pair_->values(counters.cuda), counts_of(counters))
        << "counters of " << twin.cpu.format.to_string() << " [" << twin.cpu.grid.rows << ", "
        << twin.cpu.grid.row_length << "] in " << twin.cpu.grid.segments << " segments";
  }
  static Values counts_of(const Twin& counters) {
    const auto* values = counters.cpu.as<std::int64_t>();
    return Values(values, values + counters.cpu.count());
  }
  void expect_same_elements(const Twin& twin, const std::string& what) {
    std::vector<std::byte> bytes(twin.cuda.bytes());
    cuda_backend().read(pair_->cuda, twin.cuda.data, bytes.data(), bytes.size());
    EXPECT_EQ(std::memcmp(bytes.data(), twin.cpu.data, bytes.size()), 0) << what;
  }

  /// Quantises the same numbers on both, decodes the result on both.
  void round_trip(const QuantFormat& format, const BlockGrid& grid, ElementType type,
                  const Values& numbers) {
    const Twin source = pair_->of(type, Shape{grid.rows, grid.row_length}, numbers);
    const QuantTwin twin = pair_->quant(format, grid);
    const Twin counters = pair_->counters();
    const RandomKey key = pair_->key();
    cpu_backend().quantize(pair_->cpu, source.cpu, twin.cpu, key, counters.cpu);
    cuda_backend().quantize(pair_->cuda, source.cuda, twin.cuda, key, counters.cuda);
    expect_same(twin, "quantize");
    expect_same(counters, twin);
    for (const ElementType to : {ElementType::kFp32, ElementType::kBf16}) {
      if (format.is_exact()) continue;  // NaN may keep another payload
      const Twin decoded = pair_->empty(to, Shape{grid.rows, grid.row_length});
      cpu_backend().dequantize(pair_->cpu, twin.cpu, decoded.cpu);
      cuda_backend().dequantize(pair_->cuda, twin.cuda, decoded.cuda);
      expect_same_elements(decoded, "dequantize " + format.to_string());
    }
  }

  std::optional<Pair> pair_;
};

TEST_F(CudaCodec, QuantisesTheSameBytesInEveryFormat) {
  std::vector<QuantFormat> formats = all_quantised_formats();
  for (const QuantFormat& format : exact_formats()) formats.push_back(format);
  std::uint32_t seed = 0;
  for (const BlockGrid& grid : awkward_grids()) {
    for (const ElementType type : {ElementType::kFp32, ElementType::kBf16}) {
      const Values numbers = awkward_values(grid.count(), ++seed);
      for (const QuantFormat& format : formats) round_trip(format, grid, type, numbers);
      if (HasFailure()) return;
      renew();
    }
  }
}

// Tests of many grids are one for each, so that each ends in time under compute-sanitizer too.
class CudaCodecOn : public CudaCodec, public testing::WithParamInterface<BlockGrid> {};
std::string name_of_grid(const testing::TestParamInfo<BlockGrid>& grid) {
  return fmt::format("{}x{}in{}", grid.param.rows, grid.param.row_length, grid.param.segments);
}

// Without anything that is not finite, the paths that assume so.
class Quantisation : public CudaCodec,
                     public testing::WithParamInterface<std::tuple<BlockGrid, ElementType, int>> {};
TEST_P(Quantisation, GivesTheSameBytesOfFiniteNumbers) {
  const auto& [grid, type, block] = GetParam();
  const Values numbers =
      testing_operations::normal(grid.count(), static_cast<std::uint32_t>(grid.row_length + block));
  for (const QuantFormat& format : all_quantised_formats()) {
    if (format.block == block) round_trip(format, grid, type, numbers);
  }
}
INSTANTIATE_TEST_SUITE_P(Cuda, Quantisation,
                         testing::Combine(testing::Values(BlockGrid{5, 4096, 1}, BlockGrid{3, 1000, 1},
                                                          BlockGrid{2, 2304, 2}),
                                          testing::Values(ElementType::kFp32, ElementType::kBf16),
                                          testing::Values(16, 32, 64, 128, 256)),
                         [](const auto& test) {
                           return fmt::format("{}_from_{}_by_{}", std::get<0>(test.param).row_length,
                                              name_of(std::get<1>(test.param)), std::get<2>(test.param));
                         });

TEST_F(CudaCodec, QuantisesTheSameBytesInManyRows) {
  for (const char* text : {"nf4/32/two-level", "e4m3/128/fp32", "int8/32/two-level", "bnbfp4/128/fp32",
                           "dynamic8/256/fp32", "int5/16/two-level", "int4-full-range/16/bf16"}) {
    round_trip(parse_format(text), {1000, 136, 1}, ElementType::kBf16, awkward_values(136000, 77));
    round_trip(parse_format(text), {1000, 129, 3}, ElementType::kFp32, awkward_values(129000, 78));
  }
}

TEST_F(CudaCodec, RoundsStochasticallyToTheSameBytes) {
  std::uint32_t seed = 900;
  for (const QuantFormat& format : all_quantised_formats()) {
    if (format.block != 16 && format.block != 64) continue;
    for (const BlockGrid& grid : {BlockGrid{3, 129, 1}, BlockGrid{2, 2 * 1027, 2}}) {
      round_trip(stochastic(format), grid, ElementType::kFp32, awkward_values(grid.count(), ++seed));
    }
    if (HasFailure()) return;
  }
}

// What GPUs before sm_89, which have no conversions of 8-bit floats, do: here on any GPU.
TEST_F(CudaCodec, ConvertsEightBitFloatsInSoftwareToTheSameBytes) {
  setenv("AGOQ_CUDA_SOFTWARE_FP8", "1", 1);
  for (const char* text : {"e4m3/128/fp32", "e4m3/32/two-level", "e5m2/64/bf16"}) {
    round_trip(parse_format(text), {4, 2080, 1}, ElementType::kBf16, awkward_values(4 * 2080, 31));
  }
  unsetenv("AGOQ_CUDA_SOFTWARE_FP8");
}

// Segments of whole chunks of 256 go another way than others.
TEST_F(CudaCodec, AccumulatesTheSameBytesOverMicroBatches) {
  for (const char* text : {"e4m3/128/fp32", "e4m3/16/fp32", "e4m3/256/fp32", "e4m3/128/fp32/stochastic",
                           "e4m3/32/two-level", "int8/128/fp32", "int8/16/bf16", "dynamic8/256/fp32",
                           "nf4/32/two-level", "e5m2/128/fp32", "bf16", "fp32"}) {
    for (const ElementType type : {ElementType::kFp32, ElementType::kBf16}) {
      for (const BlockGrid& grid :
           {BlockGrid{3, 2 * 1100, 2}, BlockGrid{3, 2 * 1280, 2}, BlockGrid{200, 768, 1},
            BlockGrid{3, 4 * 896, 4}, BlockGrid{3, 2 * 688, 2}}) {
        for (const bool awkward : {false, true}) {
          const QuantTwin main = pair_->quant(parse_format(text), grid);
          const Twin counters = pair_->counters();
          for (std::uint32_t micro_batch = 0; micro_batch < 4; ++micro_batch) {
            const Shape shape{grid.rows, grid.row_length};
            const Twin addend =
                awkward ? pair_->of(type, shape, awkward_values(grid.count(), 60 + micro_batch))
                        : pair_->random(type, shape);
            RandomKey key = pair_->key();
            key.micro_batch = micro_batch;
            cpu_backend().accumulate(pair_->cpu, addend.cpu, main.cpu, key, counters.cpu);
            cuda_backend().accumulate(pair_->cuda, addend.cuda, main.cuda, key, counters.cuda);
          }
          // NaN that an exact format keeps may have another payload.
          if (!awkward || !main.cpu.format.is_exact()) expect_same(main, "accumulate");
          expect_same(counters, main);
          renew();
          if (HasFailure()) return;
        }
      }
    }
  }
}

// --- every float ---

/// Quantises blocks of 16 whose first element is `maximum`, which makes the scale 1 and y = x, with all
/// bit patterns of magnitudes up to `maximum` in the other fifteen, and holds the codes against encode.
/// by_accumulation: codes that only accumulate has a path for, with FP32 input.
template <Code code>
void expect_every_float(Pair& pair, float maximum, bool by_accumulation = false) {
  constexpr std::int64_t kRows = 1 << 13, kWidth = 1024, kPerBlock = 15;
  const BlockGrid grid{kRows, kWidth, 1};
  const QuantFormat format{code, 16, ScaleType::kFp32, Rounding::kNearest};
  const QuantTwin twin = pair.quant(format, grid);
  const Twin source = pair.empty(ElementType::kFp32, Shape{kRows, kWidth});
  const std::int64_t patterns = std::bit_cast<std::uint32_t>(maximum) + std::int64_t{1};
  const std::int64_t per_call = kRows * kWidth / 16 * kPerBlock;
  std::vector<std::byte> codes(static_cast<std::size_t>(row_bytes(format, grid).codes * kRows));
  std::int64_t wrong = 0;
  for (std::int64_t first = 0; first < 2 * patterns; first += per_call) {
    float* const x = source.cpu.as<float>();
#pragma omp parallel for
    for (std::int64_t i = 0; i < kRows * kWidth; ++i) {
      const std::int64_t pattern = first + i / 16 * kPerBlock + i % 16 - 1;
      const auto bits = static_cast<std::uint32_t>(pattern % patterns);
      const bool negative = pattern >= patterns && pattern < 2 * patterns;
      x[i] = i % 16 == 0 ? maximum : std::bit_cast<float>(bits | (negative ? 0x80000000u : 0u));
    }
    pair.upload(source);
    if (by_accumulation) {  // to zero, which takes the sign from zero only
      zero_planes(pair.cuda, twin.cuda);
      cuda_backend().accumulate(pair.cuda, source.cuda, twin.cuda, {}, {});
    } else {
      cuda_backend().quantize(pair.cuda, source.cuda, twin.cuda, {}, {});
    }
    cuda_backend().read(pair.cuda, twin.cuda.codes, codes.data(), codes.size());
#pragma omp parallel for reduction(+ : wrong)
    for (std::int64_t i = 0; i < kRows * kWidth; ++i) {
      std::uint32_t stored;
      if (code_bits(code) == 8) {
        stored = static_cast<std::uint32_t>(codes[static_cast<std::size_t>(i)]);
      } else {
        stored = static_cast<std::uint32_t>(codes[static_cast<std::size_t>(i / 2)]) >> (i % 2 * 4) & 15u;
      }
      wrong += stored == encode<code>(x[i]) ? 0 : 1;
    }
  }
  EXPECT_EQ(wrong, 0) << traits_of(code).name;
}

class CudaCodecEveryFloat : public CudaCodec {};

TEST_F(CudaCodecEveryFloat, Nf4) { expect_every_float<Code::kNf4>(*pair_, 1.0f); }
TEST_F(CudaCodecEveryFloat, E4m3) { expect_every_float<Code::kE4m3>(*pair_, 448.0f); }
TEST_F(CudaCodecEveryFloat, Int8) { expect_every_float<Code::kInt8>(*pair_, 127.0f, true); }

// --- more than 2^31 elements ---

TEST(CudaCodecHuge, QuantisesAndDecodesMoreElementsThan32BitsCount) {
  AGOQ_NEEDS_GPU();
  constexpr std::int64_t kWidth = 14336;
  constexpr std::int64_t kRows = ((std::int64_t{1} << 31) + 1000) / kWidth + 1;
  const auto source_bytes = static_cast<std::size_t>(kRows * kWidth) * sizeof(Bf16);
  std::optional<Arena> memory;
  try {
    memory.emplace("a huge tensor", cuda_backend().allocator(), source_bytes * 5 / 2);
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  Arena workspace("workspace", cuda_backend().allocator(), std::size_t{1} << 20);
  Arena host("host", host_allocator(), std::size_t{64} << 20);
  const Context cuda{cuda_backend(), {}, workspace, {}};
  const Context cpu{cpu_backend(), {}, host, {}};

  // A few rows over and over: the last one and the others must come out alike.
  constexpr std::int64_t kPeriod = 64;
  const Tensor piece = host.take(ElementType::kBf16, Shape{kPeriod, kWidth});
  testing_operations::Bench::set(piece, testing_operations::normal(piece.count(), 4242));
  const Tensor source = memory->take(ElementType::kBf16, Shape{kRows, kWidth});
  for (std::int64_t row = 0; row < kRows; row += kPeriod) {
    const std::int64_t rows = std::min(kPeriod, kRows - row);
    const Tensor to = source.slice_rows(row, row + rows);
    cuda_backend().upload(cuda, piece.data, to.data, to.bytes());
  }
  for (const char* text : {"nf4/32/two-level", "e4m3/128/fp32"}) {
    const QuantFormat format = parse_format(text);
    const Arena::Scope scope(*memory);
    const Arena::Scope host_scope(host);
    const QuantTensor saved = take(*memory, format, {kRows, kWidth, 1});
    const QuantTensor expected = take(host, format, {kPeriod, kWidth, 1});
    const Tensor expected_out = host.take(ElementType::kBf16, Shape{kPeriod, kWidth});
    cpu_backend().quantize(cpu, piece, expected, {}, {});
    cpu_backend().dequantize(cpu, expected, expected_out);
    cuda_backend().quantize(cuda, source, saved, {}, {});
    const RowBytes bytes = row_bytes(format, saved.grid);
    const auto read = [&](const std::byte* plane, std::int64_t count) {
      std::vector<std::byte> host_bytes(static_cast<std::size_t>(count));
      cuda_backend().read(cuda, plane, host_bytes.data(), host_bytes.size());
      return host_bytes;
    };
    const std::vector<std::int64_t> rows{0, 1, kRows / 2, kRows - 2, kRows - 1};
    for (const std::int64_t row : rows) {
      const QuantTensor got = saved.slice_rows(row, row + 1);
      const QuantTensor want = expected.slice_rows(row % kPeriod, row % kPeriod + 1);
      const auto codes = read(got.codes, bytes.codes);
      const auto scales = read(got.scales, bytes.scales);
      EXPECT_EQ(std::memcmp(codes.data(), want.codes, codes.size()), 0) << text << " row " << row;
      EXPECT_EQ(std::memcmp(scales.data(), want.scales, scales.size()), 0) << text << " row " << row;
    }
    // Decoded over the source: the next format quantises what this one left, row by row the same again.
    cuda_backend().dequantize(cuda, saved, source);
    for (const std::int64_t row : rows) {
      const auto out = read(source.slice_rows(row, row + 1).data, kWidth * 2);
      EXPECT_EQ(std::memcmp(out.data(), expected_out.slice_rows(row % kPeriod, row % kPeriod + 1).data,
                            out.size()),
                0)
          << text << " row " << row;
    }
    std::memcpy(piece.data, expected_out.data, piece.bytes());
  }
}

// --- sums ---

TEST_F(CudaCodec, SumsAsTheCpuDoes) {
  for (const std::int64_t count : {1, 129, 1025, 70001}) {
    for (const ElementType type : {ElementType::kFp32, ElementType::kBf16}) {
      const Twin x = pair_->random(type, Shape{count});
      const Twin total = pair_->empty(ElementType::kFp64, Shape{1});
      cpu_backend().sum(pair_->cpu, x.cpu, total.cpu);
      cuda_backend().sum(pair_->cuda, x.cuda, total.cuda);
      const double want = total.cpu.as<double>()[0];
      EXPECT_NEAR(pair_->values(total.cuda)[0], want, 1e-9 * static_cast<double>(count));
    }
  }
}

// Groups with gaps, and units without.
using SumOfSquares = CudaCodecOn;
TEST_P(SumOfSquares, IsTheCpusAndAlwaysTheSame) {
  std::uint32_t seed = 40;
  for (const char* text : {"e4m3/128/fp32", "int8/128/fp32", "dynamic8/256/fp32", "nf4/32/two-level",
                           "e4m3/16/two-level", "e4m3/16/fp32", "int6/64/bf16", "fp32", "bf16"}) {
    const QuantTwin x =
        pair_->random_quant(parse_format(text), GetParam(), ++seed % 2 == 0 ? 1.0 : 1e15);
    const Twin total = pair_->empty(ElementType::kFp64, Shape{1});
    cpu_backend().sum_of_squares(pair_->cpu, x.cpu, total.cpu);
    cuda_backend().sum_of_squares(pair_->cuda, x.cuda, total.cuda);
    const double first = pair_->values(total.cuda)[0];
    EXPECT_NEAR(first / total.cpu.as<double>()[0], 1.0, 2e-7) << text;
    cuda_backend().sum_of_squares(pair_->cuda, x.cuda, total.cuda);
    EXPECT_EQ(pair_->values(total.cuda)[0], first) << text;
  }
}
INSTANTIATE_TEST_SUITE_P(Cuda, SumOfSquares,
                         testing::Values(BlockGrid{1, 1, 1}, BlockGrid{3, 129, 1},
                                         BlockGrid{40, 4 * 1030, 4}, BlockGrid{40, 4096, 1}),
                         name_of_grid);

// More parts than the kernel that adds them reads at a time, of one row again and again.
TEST_F(CudaCodec, SumsTheSquaresOfManyParts) {
  const QuantFormat format = parse_format("e4m3/128/fp32");
  const BlockGrid row{1, 4096, 1}, grid{20000, 4096, 1};
  const QuantTwin of_row = pair_->random_quant(format, row), x = pair_->quant(format, grid);
  for (std::int64_t i = 0; i < grid.rows; ++i) {
    const QuantTensor to = x.cpu.slice_rows(i, i + 1);
    std::memcpy(to.codes, of_row.cpu.codes, static_cast<std::size_t>(row.row_length));
    std::memcpy(to.scales, of_row.cpu.scales, static_cast<std::size_t>(row.row_length) / 128 * 4);
  }
  cuda_backend().upload(pair_->cuda, x.cpu.codes, x.cuda.codes, storage_bytes(format, grid));
  const Twin total = pair_->empty(ElementType::kFp64, Shape{1});
  cpu_backend().sum_of_squares(pair_->cpu, of_row.cpu, total.cpu);
  cuda_backend().sum_of_squares(pair_->cuda, x.cuda, total.cuda);
  const double want = static_cast<double>(grid.rows) * total.cpu.as<double>()[0];
  EXPECT_NEAR(pair_->values(total.cuda)[0] / want, 1.0, 2e-7);
}

// --- AdamW ---

using Adamw = CudaCodecOn;
TEST_P(Adamw, WritesTheSameBytes) {
  struct Case {
    const char *gradient, *first, *second;
  };
  const std::vector<Case> formats{
      {"e4m3/128/fp32", "dynamic8/256/fp32", "dynamic8-unsigned/256/fp32"},
      {"int8/128/bf16", "dynamic8/256/fp32", "dynamic8-unsigned/256/fp32"},
      {"dynamic8/256/fp32", "dynamic8/256/fp32", "dynamic8-unsigned/256/fp32"},
      {"fp32", "dynamic8/256/fp32", "dynamic8-unsigned/256/fp32"},
      {"fp32", "fp32", "fp32"},
      {"e4m3/128/fp32", "fp32", "fp32"},
      {"nf4/32/two-level", "dynamic8/256/fp32", "dynamic8-unsigned/256/fp32"},
      {"bf16", "dynamic8/64/bf16", "dynamic8-unsigned/32/two-level"},
      {"e4m3/128/fp32", "dynamic8/256/fp32/stochastic", "dynamic8-unsigned/256/fp32/stochastic"},
      {"e5m2/32/two-level", "bf16", "fp32"},
  };
  struct Held {
    ElementType weight;
    MasterKind master;
  };
  const std::vector<Held> helds{{ElementType::kFp32, MasterKind::kNone},
                                {ElementType::kBf16, MasterKind::kNone},
                                {ElementType::kBf16, MasterKind::kFp32},
                                {ElementType::kBf16, MasterKind::kRemainder}};
  const BlockGrid grid = GetParam();
  for (const Case& c : formats) {
    for (const Held& held : helds) {
      AdamwStep step;
      step.master = held.master;
      step.learning_rate = 1e-2;
      step.weight_decay = 0.1;
      step.gradient_scale = 0.25;
      const QuantTwin first = pair_->quant(parse_format(c.first), grid);
      const QuantTwin second = pair_->quant(parse_format(c.second), grid);
      const Shape shape{grid.rows, grid.row_length};
      const Twin weight = pair_->random(held.weight, shape);
      Twin master;
      if (held.master == MasterKind::kFp32) master = pair_->random(ElementType::kFp32, shape);
      if (held.master == MasterKind::kRemainder) {
        master = pair_->empty(ElementType::kInt16, shape);
        std::memset(master.cpu.data, 0, master.cpu.bytes());
        pair_->upload(master);
      }
      for (step.step = 1; step.step <= 3; ++step.step) {
        // Sizes that differ by block: second moments that would underflow are lifted.
        Values numbers = testing_operations::normal(
            grid.count(), static_cast<std::uint32_t>(step.step * 31 + grid.count()));
        for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] *= std::exp2(-double(i % 23));
        const Twin source = pair_->of(ElementType::kFp32, shape, numbers);
        const QuantTwin gradient = pair_->quant(parse_format(c.gradient), grid);
        cpu_backend().quantize(pair_->cpu, source.cpu, gradient.cpu, {}, {});
        cuda_backend().upload(pair_->cuda, gradient.cpu.codes, gradient.cuda.codes,
                              storage_bytes(gradient.cpu.format, grid));
        RandomKey key = pair_->key();
        key.step = static_cast<std::uint32_t>(step.step);
        cpu_backend().adamw_update(
            pair_->cpu, {weight.cpu, master.cpu, gradient.cpu, first.cpu, second.cpu}, step, key);
        cuda_backend().adamw_update(
            pair_->cuda, {weight.cuda, master.cuda, gradient.cuda, first.cuda, second.cuda}, step, key);
      }
      const std::string what = std::string("adamw ") + c.gradient;
      expect_same(first, what + " first moment");
      expect_same(second, what + " second moment");
      expect_same_elements(weight, what + " weight");
      if (master.cpu) expect_same_elements(master, what + " master");
      renew();
      if (HasFailure()) return;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Cuda, Adamw,
                         testing::Values(BlockGrid{5, 1, 1}, BlockGrid{1, 300, 1}, BlockGrid{9, 257, 1},
                                         BlockGrid{3, 4 * 1040, 4}, BlockGrid{2, 2048, 1},
                                         BlockGrid{33, 2 * 768, 2}, BlockGrid{3, 4 * 896, 4},
                                         BlockGrid{5, 4 * 128, 4}, BlockGrid{3, 2 * 688, 2},
                                         BlockGrid{7, 3 * 40, 3}, BlockGrid{3, 5 * 8, 5},
                                         BlockGrid{3, 1088, 1}),
                         name_of_grid);

// --- embedding ---

TEST_F(CudaCodec, EmbeddingForwardCopiesRows) {
  for (const std::int64_t width : {129, 576}) {
    for (const ElementType type : {ElementType::kFp32, ElementType::kBf16}) {
      const Twin table = pair_->random(type, Shape{300, width});
      std::vector<std::int32_t> ids(1025);
      for (std::size_t n = 0; n < ids.size(); ++n) ids[n] = static_cast<std::int32_t>(n * 131 % 300);
      const Twin tokens = pair_->integers(ids);
      const Twin out = pair_->empty(type, Shape{1025, width});
      cpu_backend().embedding_forward(pair_->cpu, tokens.cpu, table.cpu, out.cpu);
      cuda_backend().embedding_forward(pair_->cuda, tokens.cuda, table.cuda, out.cuda);
      expect_same_elements(out, "embedding_forward");
    }
  }
}

struct EmbeddingCase {
  std::int64_t positions, vocabulary, width, segments;
  const char* format;
};
class EmbeddingBackward : public CudaCodec, public testing::WithParamInterface<EmbeddingCase> {};
TEST_P(EmbeddingBackward, AddsInOrderOfPositions) {
  const EmbeddingCase& c = GetParam();
  for (const ElementType type : {ElementType::kFp32, ElementType::kBf16}) {
    const RandomKey draw = RandomKey{.seed = 5}.with(RandomPurpose::kTest, 17);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(c.positions));
    for (std::size_t n = 0; n < ids.size(); ++n) {  // few are frequent, many are rare
      const double u = random_uniform(draw, n);
      ids[n] = static_cast<std::int32_t>(u * u * u * static_cast<double>(c.vocabulary));
    }
    const Twin tokens = pair_->integers(ids);
    const Twin dout = pair_->random(type, Shape{c.positions, c.width});
    const BlockGrid grid{c.vocabulary, c.width, c.segments};
    const QuantTwin dtable = pair_->quant(parse_format(c.format), grid);
    const Twin counters = pair_->counters();
    for (std::uint32_t micro_batch = 0; micro_batch < 2; ++micro_batch) {
      RandomKey key = pair_->key();
      key.micro_batch = micro_batch;
      cpu_backend().embedding_backward(pair_->cpu, tokens.cpu, dout.cpu, dtable.cpu, key, counters.cpu);
      cuda_backend().embedding_backward(pair_->cuda, tokens.cuda, dout.cuda, dtable.cuda, key,
                                        counters.cuda);
    }
    expect_same(dtable, "embedding_backward");
    expect_same(counters, dtable);
    renew();
  }
}
INSTANTIATE_TEST_SUITE_P(Cuda, EmbeddingBackward,
                         testing::Values(EmbeddingCase{1, 3, 5, 1, "e4m3/128/fp32"},
                                         EmbeddingCase{1025, 7, 129, 1, "e4m3/128/fp32"},
                                         EmbeddingCase{1000, 256, 1040, 2, "e4m3/128/fp32"},
                                         EmbeddingCase{777, 70000, 64, 1, "int8/32/bf16"},
                                         EmbeddingCase{2100, 1000, 24, 1, "fp32"},
                                         EmbeddingCase{600, 50, 40, 1, "nf4/32/two-level/stochastic"},
                                         EmbeddingCase{600, 257, 2048, 1, "e4m3/128/fp32/stochastic"},
                                         EmbeddingCase{3000, 300, 1536, 2, "e4m3/128/fp32"},
                                         EmbeddingCase{20000, 60000, 256, 1, "e4m3/16/fp32"},
                                         EmbeddingCase{2500, 400000, 48, 1, "e4m3/16/fp32"},
                                         EmbeddingCase{5000, 3, 1024, 1, "e4m3/256/fp32"},
                                         EmbeddingCase{1500, 90, 1312, 2, "e4m3/16/fp32"},
                                         EmbeddingCase{130, 90, 8192, 1, "e4m3/128/fp32"},
                                         EmbeddingCase{3500, 20000, 2560, 1, "e4m3/128/fp32"}),
                         [](const auto& test) {
                           return fmt::format("{}of{}x{}", test.param.positions, test.param.vocabulary,
                                              test.param.width);
                         });

// An id outside the table, which a kernel cannot throw for, neither writes elsewhere nor splits the sum
// of another token.
TEST_F(CudaCodec, EmbeddingLeavesOutIdsOutsideTheTable) {
  const std::vector<std::int32_t> good{3, 1, 3, 3}, bad{3, -1, 3, 259, 1, 4, 3};
  const std::vector<std::size_t> kept{0, 4, 2, 6};  // positions of `bad` that hold good ids, by id order
  const Twin dout_bad = pair_->random(ElementType::kFp32, Shape{7, 40});
  const Twin dout_good = pair_->empty(ElementType::kFp32, Shape{4, 40});
  for (std::size_t n = 0; n < kept.size(); ++n) {
    std::memcpy(dout_good.cpu.as<float>() + n * 40, dout_bad.cpu.as<float>() + kept[n] * 40,
                40 * sizeof(float));
  }
  const QuantTwin dtable = pair_->quant(parse_format("fp32"), {4, 40, 1});
  const Twin good_ids = pair_->integers(good), bad_ids = pair_->integers(bad);
  cpu_backend().embedding_backward(pair_->cpu, good_ids.cpu, dout_good.cpu, dtable.cpu, {}, {});
  cuda_backend().embedding_backward(pair_->cuda, bad_ids.cuda, dout_bad.cuda, dtable.cuda, {}, {});
  expect_same(dtable, "embedding_backward");
}

// The short path of the root and the quotient against IEEE's, bit for bit: the weights start at zero, so
// that after a step they are the quotient times the rate. Blocks of zeros, sizes from 2^-70 to 2^50 and
// single elements far from their neighbours; the CPU's sqrt and division judge.
TEST_F(CudaCodec, AdamwOfZerosAndExtremesWritesTheSameBytes) {
  const BlockGrid grid{256, 16 * 896, 16};
  const Shape shape{grid.rows, grid.row_length};
  for (const double epsilon : {1e-8, 1e-15, 1e-25}) {  // the last is IEEE's path alone
    const QuantTwin first = pair_->quant(parse_format("dynamic8/256/fp32"), grid),
                    second = pair_->quant(parse_format("dynamic8-unsigned/256/fp32"), grid),
                    gradient = pair_->quant(parse_format("e4m3/128/fp32"), grid);
    const Twin weight =
        pair_->of(ElementType::kFp32, shape, Values(static_cast<std::size_t>(grid.count())));
    AdamwStep step;
    step.master = MasterKind::kNone;
    step.learning_rate = 1.0;
    step.epsilon = epsilon;
    for (step.step = 1; step.step <= 3; ++step.step) {
      Values numbers = testing_operations::normal(grid.count(), static_cast<std::uint32_t>(step.step));
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        const std::size_t block = i / 128;
        if (block % 7 == 0) numbers[i] = 0;
        numbers[i] *= std::exp2(static_cast<double>((block * 37) % 121) - 70);
        if (i % 61 == 0) numbers[i] *= 1e-3;
      }
      const Twin source = pair_->of(ElementType::kFp32, shape, numbers);
      cpu_backend().quantize(pair_->cpu, source.cpu, gradient.cpu, {}, {});
      cuda_backend().upload(pair_->cuda, gradient.cpu.codes, gradient.cuda.codes,
                            storage_bytes(gradient.cpu.format, grid));
      cpu_backend().adamw_update(pair_->cpu, {weight.cpu, {}, gradient.cpu, first.cpu, second.cpu}, step,
                                 {});
      cuda_backend().adamw_update(pair_->cuda, {weight.cuda, {}, gradient.cuda, first.cuda, second.cuda},
                                  step, {});
    }
    const std::string what = fmt::format("adamw, epsilon {}", epsilon);
    expect_same(first, what + " first moment");
    expect_same(second, what + " second moment");
    expect_same_elements(weight, what + " weight");
    renew();
  }
}

}  // namespace
}  // namespace agoq

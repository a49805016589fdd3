// CpuBackend's quantize, dequantize, accumulate, sum and sum_of_squares.
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/row_codec.h"

namespace agoq {
namespace {

class QuantizeTest : public ::testing::Test {
 protected:
  Backend& backend_ = cpu_backend();
  Arena arena_{"test", host_allocator(), std::size_t{8} << 20};
  Arena workspace_{"test workspace", host_allocator(), std::size_t{1} << 20};
  Context context_{backend_, {}, workspace_, {}};

  Tensor normal(ElementType type, std::int64_t rows, std::int64_t width, std::uint64_t seed) {
    const Tensor tensor = arena_.take(type, Shape{rows, width});
    for (std::int64_t i = 0; i < tensor.count(); ++i) {
      const double x = random_normal({.seed = seed}, static_cast<std::uint64_t>(i));
      if (type == ElementType::kFp64) tensor.as<double>()[i] = x;
      if (type == ElementType::kFp32) tensor.as<float>()[i] = static_cast<float>(x);
      if (type == ElementType::kBf16) tensor.as<Bf16>()[i] = to_bf16(static_cast<float>(x));
    }
    return tensor;
  }
  Tensor counters() {
    const Tensor tensor = arena_.take(ElementType::kInt64, Shape{kQuantCounters});
    std::memset(tensor.data, 0, tensor.bytes());
    return tensor;
  }
  /// Memory with every byte, padding included, at a known value.
  QuantTensor take_cleared(const QuantFormat& format, const BlockGrid& grid) {
    const QuantTensor tensor = take(arena_, format, grid);
    std::memset(tensor.codes, 0, storage_bytes(format, grid));
    return tensor;
  }
  std::vector<std::byte> bytes_of(const QuantTensor& tensor) {
    return {tensor.codes, tensor.codes + storage_bytes(tensor.format, tensor.grid)};
  }
  std::vector<float> decoded(const QuantTensor& tensor) {
    std::vector<float> values(static_cast<std::size_t>(tensor.grid.count()));
    for (std::int64_t row = 0; row < tensor.rows(); ++row) {
      cpu::baseline::decode_row(tensor, row, values.data() + row * tensor.width());
    }
    return values;
  }
};

TEST_F(QuantizeTest, EqualsTheRowCodecOnEveryRowAndSourceType) {
  const BlockGrid grid{5, 210, 3};
  for (const char* text :
       {"nf4/32/two-level", "int5/64/bf16", "e4m3/128/fp32/stochastic", "bf16", "fp32"}) {
    const QuantFormat format = parse_format(text);
    for (const ElementType type : {ElementType::kFp32, ElementType::kBf16, ElementType::kFp64}) {
      const Arena::Scope scope(arena_);
      const Tensor x = normal(type, grid.rows, grid.row_length, 1);
      const QuantTensor quantised = take_cleared(format, grid);
      backend_.quantize(context_, x, quantised, {.seed = 9}, {});
      const QuantTensor expected = take_cleared(format, grid);
      for (std::int64_t row = 0; row < grid.rows; ++row) {
        std::vector<float> widened(210);
        for (std::int64_t i = 0; i < 210; ++i) {
          const std::int64_t at = row * 210 + i;
          widened[static_cast<std::size_t>(i)] = type == ElementType::kFp32 ? x.as<float>()[at]
                                                 : type == ElementType::kBf16
                                                     ? to_float(x.as<Bf16>()[at])
                                                     : static_cast<float>(x.as<double>()[at]);
        }
        QuantCounts counts;
        cpu::baseline::encode_row(expected, row, widened.data(), {.seed = 9}, counts);
      }
      EXPECT_EQ(bytes_of(quantised), bytes_of(expected)) << text << " from " << name_of(type);

      const Tensor back = arena_.take(type, Shape{grid.rows, grid.row_length});
      backend_.dequantize(context_, quantised, back);
      const std::vector<float> values = decoded(expected);
      for (std::int64_t i = 0; i < back.count(); ++i) {
        const float value = values[static_cast<std::size_t>(i)];
        if (type == ElementType::kFp32) {
          ASSERT_EQ(back.as<float>()[i], value);
        }
        if (type == ElementType::kFp64) {
          ASSERT_EQ(back.as<double>()[i], double{value});
        }
        if (type == ElementType::kBf16) {
          ASSERT_EQ(back.as<Bf16>()[i].bits, to_bf16(value).bits);
        }
      }
    }
  }
}

TEST_F(QuantizeTest, SumsOfNumberedRowsRoundAsTheWholeTensorDoes) {
  const QuantFormat format = parse_format("e4m3/128/fp32/stochastic");
  const BlockGrid grid{10, 300, 2}, some{4, 300, 2};
  const Tensor numbers = arena_.take(ElementType::kInt32, Shape{4, 1});
  const std::vector<std::int32_t> rows{0, 3, 4, 9};
  std::copy(rows.begin(), rows.end(), numbers.as<std::int32_t>());
  std::vector<QuantTensor> pieces, of_some;
  for (std::uint32_t p = 0; p < 3; ++p) {
    pieces.push_back(take_cleared(format, grid));
    of_some.push_back(take_cleared(format, some));
    backend_.quantize(context_, normal(ElementType::kFp32, 10, 300, p), pieces.back(), {.seed = p}, {});
    backend_.gather_rows(context_, pieces.back(), numbers, of_some.back());
  }
  const QuantTensor whole = take_cleared(format, grid), of_whole = take_cleared(format, some);
  backend_.add_pieces(context_, pieces, whole, {.seed = 9}, {});
  backend_.gather_rows(context_, whole, numbers, of_whole);
  const QuantTensor sum = take_cleared(format, some), by_default = take_cleared(format, some);
  backend_.add_pieces(context_, of_some, sum, {.seed = 9}, {}, numbers);
  EXPECT_EQ(bytes_of(sum), bytes_of(of_whole));
  backend_.Backend::add_pieces(context_, of_some, by_default, {.seed = 9}, {}, numbers);
  EXPECT_EQ(bytes_of(by_default), bytes_of(of_whole));
  backend_.add_pieces(context_, of_some, sum, {.seed = 9}, {});
  EXPECT_NE(bytes_of(sum), bytes_of(of_whole)) << "rounding is not stochastic";
  EXPECT_THROW(backend_.add_pieces(context_, of_some, sum, {}, {}, numbers.slice_rows(0, 1)), Error);
}

TEST_F(QuantizeTest, BytesCountsAndSumsDoNotDependOnThreads) {
  const int threads_before = omp_get_max_threads();
  const QuantFormat format = parse_format("nf4/32/two-level/stochastic");
  const BlockGrid grid{13, 1100, 1};
  const Tensor x = normal(ElementType::kFp32, grid.rows, grid.row_length, 2);
  for (std::int64_t i = 0; i < x.count(); i += 501)
    x.as<float>()[i] = std::numeric_limits<float>::infinity();
  x.as<float>()[7] = 1e25f;
  std::vector<std::byte> bytes;
  std::vector<std::int64_t> counts;
  double sum_of_squares = 0;
  for (int threads = 1; threads <= 5; ++threads) {
    omp_set_num_threads(threads);
    const Arena::Scope scope(arena_);
    const QuantTensor quantised = take_cleared(format, grid);
    const Tensor counted = counters();
    const Tensor total = arena_.take(ElementType::kFp64, Shape{1});
    backend_.quantize(context_, x, quantised, {.seed = 3}, counted);
    backend_.accumulate(context_, x, quantised, {.seed = 4}, counted);
    backend_.sum_of_squares(context_, quantised, total);
    const auto* values = counted.as<std::int64_t>();
    if (threads == 1) {
      bytes = bytes_of(quantised);
      counts.assign(values, values + kQuantCounters);
      sum_of_squares = total.as<double>()[0];
      EXPECT_EQ(counts[static_cast<int>(QuantCounter::kNonFinite)], 2 * ((x.count() + 500) / 501));
      EXPECT_GT(counts[static_cast<int>(QuantCounter::kFlushedBlocks)], 0);
    } else {
      EXPECT_EQ(bytes, bytes_of(quantised)) << threads << " threads";
      EXPECT_EQ(counts, std::vector<std::int64_t>(values, values + kQuantCounters));
      EXPECT_EQ(sum_of_squares, total.as<double>()[0]);
    }
  }
  omp_set_num_threads(threads_before);
}

TEST_F(QuantizeTest, CountersAreAddedTo) {
  const Tensor x = normal(ElementType::kFp32, 2, 64, 5);
  x.as<float>()[3] = std::numeric_limits<float>::quiet_NaN();
  const QuantTensor quantised = take(arena_, parse_format("int8/32/fp32"), {2, 64, 1});
  const Tensor counted = counters();
  for (int i = 0; i < 3; ++i) backend_.quantize(context_, x, quantised, {}, counted);
  EXPECT_EQ(counted.as<std::int64_t>()[static_cast<int>(QuantCounter::kNonFinite)], 3);
}

TEST_F(QuantizeTest, AccumulateRequantisesTheSumOfDecodedAndAddend) {
  const BlockGrid grid{3, 300, 1};
  for (const char* text :
       {"e4m3/128/fp32", "dynamic8/256/fp32", "int8/64/bf16/stochastic", "fp32", "bf16"}) {
    const QuantFormat format = parse_format(text);
    for (const ElementType type : {ElementType::kFp32, ElementType::kBf16, ElementType::kFp64}) {
      const Arena::Scope scope(arena_);
      const QuantTensor main = take_cleared(format, grid);
      const QuantTensor expected = take_cleared(format, grid);
      backend_.quantize(context_, normal(ElementType::kFp32, 3, 300, 6), main, {}, {});
      const Tensor addend = normal(type, 3, 300, 7);
      std::vector<float> sum = decoded(main);
      for (std::size_t i = 0; i < sum.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i);
        sum[i] += type == ElementType::kFp32   ? addend.as<float>()[at]
                  : type == ElementType::kBf16 ? to_float(addend.as<Bf16>()[at])
                                               : static_cast<float>(addend.as<double>()[at]);
      }
      QuantCounts counts;
      for (std::int64_t row = 0; row < 3; ++row) {
        cpu::baseline::encode_row(expected, row, sum.data() + row * 300, {.seed = 8}, counts);
      }
      backend_.accumulate(context_, addend, main, {.seed = 8}, {});
      EXPECT_EQ(bytes_of(main), bytes_of(expected)) << text << " + " << name_of(type);
    }
  }
}

TEST_F(QuantizeTest, AccumulatesInDoublePrecisionIntoFp64) {
  const Tensor main = normal(ElementType::kFp64, 2, 33, 9);
  const Tensor addend = normal(ElementType::kFp64, 2, 33, 10);
  std::vector<double> expected(66);
  for (int i = 0; i < 66; ++i)
    expected[static_cast<std::size_t>(i)] = main.as<double>()[i] + addend.as<double>()[i];
  backend_.accumulate(context_, addend, as_quant_tensor(main), {}, {});
  EXPECT_EQ(std::memcmp(main.data, expected.data(), main.bytes()), 0);
}

TEST_F(QuantizeTest, SmallAdditionsToALargeSumDoNotVanish) {
  // With a power-of-two scale the grid stands still and nearly half of 64 equal additions vanish; with
  // absmax / 448 it moves at every step and they arrive.
  const Tensor addend = normal(ElementType::kFp32, 4, 1024, 11);
  const QuantTensor main = take_cleared(parse_format("e4m3/128/fp32"), {4, 1024, 1});
  for (int i = 0; i < 64; ++i) backend_.accumulate(context_, addend, main, {}, {});
  const std::vector<float> sum = decoded(main);
  double along = 0, size = 0;
  for (std::size_t i = 0; i < sum.size(); ++i) {
    const double x = addend.as<float>()[static_cast<std::int64_t>(i)];
    along += sum[i] * x;
    size += x * x;
  }
  EXPECT_NEAR(along / (64 * size), 1.0, .1);
}

TEST_F(QuantizeTest, SumsAreInDoublePrecision) {
  for (const ElementType type : {ElementType::kFp32, ElementType::kBf16, ElementType::kFp64}) {
    const Arena::Scope scope(arena_);
    const Tensor x = normal(type, 7, 1003, 12);
    const Tensor total = arena_.take(ElementType::kFp64, Shape{1});
    double sum = 0;
    long double squares = 0;
    for (std::int64_t i = 0; i < x.count(); ++i) {
      const double value = type == ElementType::kFp32   ? x.as<float>()[i]
                           : type == ElementType::kBf16 ? to_float(x.as<Bf16>()[i])
                                                        : x.as<double>()[i];
      sum += value;
      squares += static_cast<long double>(value) * value;
    }
    backend_.sum(context_, x, total);
    EXPECT_EQ(total.as<double>()[0], sum) << "element order";
    backend_.sum_of_squares(context_, as_quant_tensor(x), total);
    EXPECT_NEAR(total.as<double>()[0], static_cast<double>(squares),
                1e-12 * static_cast<double>(squares));
  }
}

TEST_F(QuantizeTest, SumsOfManyTensorsAreThoseOfEach) {
  const std::vector<QuantTensor> xs{
      as_quant_tensor(normal(ElementType::kFp32, 7, 1003, 13)),
      as_quant_tensor(normal(ElementType::kBf16, 3, 64, 14)),
      as_quant_tensor(normal(ElementType::kFp32, 2, 8, 15)).slice_rows(1, 1)};
  const Tensor totals = arena_.take(ElementType::kFp64, Shape{3}),
               total = arena_.take(ElementType::kFp64, Shape{1});
  backend_.sums_of_squares(context_, xs, totals);
  for (std::size_t i = 0; i < xs.size(); ++i) {
    backend_.sum_of_squares(context_, xs[i], total);
    EXPECT_EQ(totals.as<double>()[i], total.as<double>()[0]) << i;
  }
  EXPECT_EQ(totals.as<double>()[2], 0.0) << "no rows";
  EXPECT_THROW(backend_.sums_of_squares(context_, xs, total), Error);
}

TEST_F(QuantizeTest, RefusesWrongShapesAndTypes) {
  const QuantTensor quantised = take(arena_, parse_format("agoq"), {2, 64, 1});
  EXPECT_THROW(backend_.quantize(context_, normal(ElementType::kFp32, 2, 65, 1), quantised, {}, {}),
               Error);
  EXPECT_THROW(backend_.dequantize(context_, quantised, normal(ElementType::kFp32, 3, 64, 1)), Error);
  EXPECT_THROW(
      backend_.quantize(context_, arena_.take(ElementType::kInt32, Shape{2, 64}), quantised, {}, {}),
      Error);
  EXPECT_THROW(backend_.accumulate(context_, normal(ElementType::kFp32, 2, 64, 1), quantised, {},
                                   arena_.take(ElementType::kInt64, Shape{2})),
               Error);
}

TEST_F(QuantizeTest, AMeasuringContextTouchesNothing) {
  Arena measuring = Arena::measuring("plan");
  const Context context{backend_, {}, measuring, {}};
  Arena tensors = Arena::measuring("tensors");
  const Tensor x = tensors.take(ElementType::kBf16, Shape{3, 100});
  const QuantTensor quantised = take(tensors, parse_format("agoq"), {3, 100, 1});
  const Tensor total = tensors.take(ElementType::kFp64, Shape{1});
  backend_.quantize(context, x, quantised, {}, {});
  backend_.dequantize(context, quantised, x);
  backend_.accumulate(context, x, quantised, {}, {});
  backend_.sum(context, x, total);
  backend_.sum_of_squares(context, quantised, total);
  EXPECT_GT(measuring.high_water(), 0u);
  EXPECT_EQ(measuring.used(), 0u);
}

}  // namespace
}  // namespace agoq

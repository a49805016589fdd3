// encode_row and decode_row of both CPU builds: layout, awkward values, counts, and the same bytes.
#include "backend/cpu/row_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "quant/codec.h"

namespace agoq {

#if defined(__x86_64__)
namespace cpu::x86_64_v3 {
void decode_row(const QuantTensor& source, std::int64_t row, float* out);
void encode_row(const QuantTensor& destination, std::int64_t row, const float* in, const RandomKey& key,
                QuantCounts& counts);
}  // namespace cpu::x86_64_v3
#endif

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargestFloat = std::numeric_limits<float>::max();

bool operator==(const QuantCounts& a, const QuantCounts& b) {
  return a.non_finite == b.non_finite && a.saturated == b.saturated &&
         a.flushed_blocks == b.flushed_blocks;
}

struct RowCodec {
  const char* name;
  void (*decode)(const QuantTensor&, std::int64_t, float*);
  void (*encode)(const QuantTensor&, std::int64_t, const float*, const RandomKey&, QuantCounts&);
};

/// The builds of the row codec that this machine can run.
std::vector<RowCodec> builds() {
  std::vector<RowCodec> list = {{"baseline", cpu::baseline::decode_row, cpu::baseline::encode_row}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2")) {
    list.push_back({"x86-64-v3", cpu::x86_64_v3::decode_row, cpu::x86_64_v3::encode_row});
  }
#endif
  return list;
}

/// A QuantTensor that owns its memory, which is filled with a pattern first.
class OwnedTensor {
 public:
  OwnedTensor(const QuantFormat& format, const BlockGrid& grid)
      : memory_(storage_bytes(format, grid) + kPlaneAlignment, std::byte{0xA5}) {
    auto* begin = memory_.data();
    while (reinterpret_cast<std::uintptr_t>(begin) % kPlaneAlignment != 0) ++begin;
    tensor_ = place(format, grid, begin);
  }
  OwnedTensor(const OwnedTensor&) = delete;
  const QuantTensor& operator*() const { return tensor_; }
  const QuantTensor* operator->() const { return &tensor_; }
  /// Codes, bits, scales and super scales of a row, one after another.
  std::vector<std::byte> row(std::int64_t index) const {
    const RowBytes size = row_bytes(tensor_.format, tensor_.grid);
    std::vector<std::byte> bytes;
    const auto append = [&](const std::byte* plane, std::int64_t count) {
      bytes.insert(bytes.end(), plane + index * count, plane + (index + 1) * count);
    };
    append(tensor_.codes, size.codes);
    append(tensor_.bits, size.bits);
    append(tensor_.scales, size.scales);
    append(tensor_.super, size.super);
    return bytes;
  }

 private:
  std::vector<std::byte> memory_;
  QuantTensor tensor_;
};

/// Normal numbers whose size changes by a factor of up to 8 from block to block.
std::vector<float> test_row(std::int64_t length, std::uint64_t seed, bool is_signed = true) {
  std::vector<float> row(static_cast<std::size_t>(length));
  for (std::size_t i = 0; i < row.size(); ++i) {
    const float size = std::exp2(3.0f * random_uniform({.seed = seed + 1000}, i / 16));
    row[i] = size * static_cast<float>(random_normal({.seed = seed}, i));
    if (!is_signed) row[i] = std::abs(row[i]);
  }
  return row;
}

std::vector<float> test_row(const QuantFormat& format, std::int64_t length, std::uint64_t seed) {
  return test_row(length, seed, traits_of(format.code).is_signed);
}

struct RoundTrip {
  std::vector<std::byte> bytes;
  std::vector<float> decoded;
  QuantCounts counts;
};

RoundTrip round_trip(const RowCodec& codec, const QuantFormat& format, const std::vector<float>& row,
                     std::int64_t segments = 1, const RandomKey& key = {}) {
  const OwnedTensor tensor(format, {1, static_cast<std::int64_t>(row.size()), segments});
  RoundTrip result;
  codec.encode(*tensor, 0, row.data(), key, result.counts);
  result.decoded.resize(row.size());
  codec.decode(*tensor, 0, result.decoded.data());
  result.bytes = tensor.row(0);
  return result;
}

template <typename Visit>
auto visit_code(Code code, const Visit& visit) {
  switch (code) {
    case Code::kNf4: return visit.template operator()<Code::kNf4>();
    case Code::kE2m1: return visit.template operator()<Code::kE2m1>();
    case Code::kBnbFp4: return visit.template operator()<Code::kBnbFp4>();
    case Code::kInt4: return visit.template operator()<Code::kInt4>();
    case Code::kInt4FullRange: return visit.template operator()<Code::kInt4FullRange>();
    case Code::kInt5: return visit.template operator()<Code::kInt5>();
    case Code::kInt6: return visit.template operator()<Code::kInt6>();
    case Code::kInt8: return visit.template operator()<Code::kInt8>();
    case Code::kE4m3: return visit.template operator()<Code::kE4m3>();
    case Code::kE5m2: return visit.template operator()<Code::kE5m2>();
    case Code::kDynamic8: return visit.template operator()<Code::kDynamic8>();
    default: return visit.template operator()<Code::kDynamic8Unsigned>();
  }
}

std::uint32_t encode_plainly(Code code, float y) {
  return visit_code(code, [y]<Code kCode>() { return encode<kCode>(y); });
}
float decode_plainly(Code code, std::uint32_t bits) {
  return visit_code(code, [bits]<Code kCode>() { return decode<kCode>(bits); });
}

/// Reads one element's code and scale from where quant_tensor.h says they are.
struct Stored {
  std::uint32_t code;
  float scale;
};
Stored stored_element(const QuantTensor& tensor, std::int64_t row, std::int64_t column) {
  const auto ceil_divide = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const std::int64_t length = tensor.grid.segment_length(), segment = column / length,
                     i = column % length;
  const std::int64_t segments = tensor.grid.segments, blocks = ceil_divide(length, tensor.format.block);
  const int bits = traits_of(tensor.format.code).bits;
  const auto* codes = reinterpret_cast<const std::uint8_t*>(tensor.codes);
  const auto* planes = reinterpret_cast<const std::uint8_t*>(tensor.bits);
  Stored stored{};
  if (bits == 8) {
    stored.code = codes[(row * segments + segment) * length + i];
  } else {
    const std::uint8_t byte = codes[(row * segments + segment) * ceil_divide(length, 2) + i / 2];
    stored.code = i % 2 == 0 ? byte & 0xFu : byte >> 4;
    for (int plane = 0; plane < bits - 4; ++plane) {
      const std::int64_t first =
          ((row * (bits - 4) + plane) * segments + segment) * ceil_divide(length, 8);
      stored.code |= ((planes[first + i / 8] >> (i % 8)) & 1u) << (4 + plane);
    }
  }
  const std::int64_t scale = (row * segments + segment) * blocks + i / tensor.format.block;
  switch (tensor.format.scale) {
    case ScaleType::kFp32: stored.scale = reinterpret_cast<const float*>(tensor.scales)[scale]; break;
    case ScaleType::kBf16:
      stored.scale = to_float(reinterpret_cast<const Bf16*>(tensor.scales)[scale]);
      break;
    default: {
      const std::int64_t super =
          (row * segments + segment) * ceil_divide(length, kSuperBlock) + i / kSuperBlock;
      stored.scale = decode<Code::kE4m3>(reinterpret_cast<const std::uint8_t*>(tensor.scales)[scale]) *
                     to_float(reinterpret_cast<const Bf16*>(tensor.super)[super]);
    }
  }
  return stored;
}

void expect_rows_follow_layout(const QuantFormat& format, const BlockGrid& grid, const RowCodec& codec) {
  const OwnedTensor tensor(format, grid);
  const std::int64_t length = grid.segment_length();
  for (std::int64_t row = 0; row < grid.rows; ++row) {
    const std::vector<float> x = test_row(format, grid.row_length, static_cast<std::uint64_t>(row) + 7);
    QuantCounts counts;
    codec.encode(*tensor, row, x.data(), {}, counts);
    std::vector<float> decoded(x.size());
    codec.decode(*tensor, row, decoded.data());
    ASSERT_EQ(counts.non_finite, 0);
    ASSERT_EQ(counts.flushed_blocks, 0);
    ASSERT_EQ(counts.saturated, 0) << format.to_string() << " " << grid.row_length;
    for (std::int64_t i = 0; i < grid.row_length; ++i) {
      const Stored stored = stored_element(*tensor, row, i);
      const auto at = static_cast<std::size_t>(i);
      ASSERT_EQ(stored.code, encode_plainly(format.code, x[at] * (1.0f / stored.scale)))
          << format.to_string() << " " << grid.row_length << " element " << i;
      ASSERT_EQ(decoded[at], decode_plainly(format.code, stored.code) * stored.scale);
      if (i % length % format.block != 0) continue;
      const std::int64_t end = std::min(i + format.block, (i / length + 1) * length);
      float absmax = 0;
      for (std::int64_t k = i; k < end; ++k)
        absmax = std::max(absmax, std::abs(x[static_cast<std::size_t>(k)]));
      const float exact = absmax / traits_of(format.code).maximum;
      const float tolerance = format.scale == ScaleType::kFp32   ? 0.0f
                              : format.scale == ScaleType::kBf16 ? 0x1p-8f
                                                                 : 1.0f / 16;
      ASSERT_NEAR(std::abs(stored.scale), exact, exact * tolerance) << format.to_string();
    }
  }
}

TEST(RowCodec, EveryLengthOfEveryFormatFollowsTheLayout) {
  for (const RowCodec& codec : builds()) {
    for (const QuantFormat& format : all_quantised_formats()) {
      for (std::int64_t length = 1; length <= 300; ++length) {
        expect_rows_follow_layout(format, {1, length, 1}, codec);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(RowCodec, RowsSegmentsAndSuperBlocksFollowTheLayout) {
  for (const RowCodec& codec : builds()) {
    for (const QuantFormat& format : all_quantised_formats()) {
      for (const BlockGrid& grid : {BlockGrid{3, 77, 7}, BlockGrid{2, 1025, 1},
                                    BlockGrid{2, 3 * 1100, 3}, BlockGrid{1, 4096, 2}}) {
        expect_rows_follow_layout(format, grid, codec);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(RowCodec, SegmentsEqualSeparatelyQuantisedRows) {
  for (const RowCodec& codec : builds()) {
    for (const QuantFormat& format : all_quantised_formats()) {
      for (const std::int64_t length : {7, 100, 1025}) {
        const std::vector<float> x = test_row(format, 4 * length, 11);
        const RoundTrip whole = round_trip(codec, format, x, 4);
        for (std::int64_t segment = 0; segment < 4; ++segment) {
          const std::vector<float> part(x.begin() + segment * length,
                                        x.begin() + (segment + 1) * length);
          const RoundTrip alone = round_trip(codec, format, part);
          ASSERT_TRUE(std::equal(alone.decoded.begin(), alone.decoded.end(),
                                 whole.decoded.begin() + segment * length))
              << format.to_string() << " segments of " << length;
        }
      }
    }
  }
}

/// Formats whose second round trip must give the same bytes: the largest element of a block decodes to
/// maximum * scale, and that product is exact. Not so where FP32 scales meet a maximum that is no power
/// of two (the scale may move by one unit in the last place), where a coarse scale puts the largest
/// element below the last level (codes above 4 bits under two-level scales, dynamic8-unsigned under BF16
/// ones), or where the largest element is not a level (dynamic8's -1).
bool is_idempotent(const QuantFormat& format) {
  if (format.code == Code::kDynamic8) return false;
  if (format.code == Code::kDynamic8Unsigned) return format.scale == ScaleType::kFp32;
  const bool fine = code_bits(format.code) > 4;
  switch (format.scale) {
    case ScaleType::kBf16: return true;
    case ScaleType::kTwoLevel: return !fine;
    default:
      return std::exp2(std::round(std::log2(code_maximum(format.code)))) == code_maximum(format.code);
  }
}

TEST(RowCodec, ASecondRoundTripChangesNothing) {
  for (const RowCodec& codec : builds()) {
    for (const QuantFormat& format : all_quantised_formats()) {
      for (std::int64_t length = 1; length <= 300; ++length) {
        const std::vector<float> x = test_row(format, length, 13);
        const RoundTrip first = round_trip(codec, format, x);
        const RoundTrip second = round_trip(codec, format, first.decoded);
        if (is_idempotent(format)) {
          ASSERT_EQ(first.bytes, second.bytes) << format.to_string() << " length " << length;
        } else if (format.scale == ScaleType::kFp32 && format.code != Code::kDynamic8) {
          const auto codes = static_cast<std::ptrdiff_t>(row_bytes(format, {1, length, 1}).codes);
          ASSERT_TRUE(std::equal(first.bytes.begin(), first.bytes.begin() + codes, second.bytes.begin()))
              << format.to_string() << " length " << length;
          for (std::size_t i = 0; i < x.size(); ++i) {
            ASSERT_NEAR(first.decoded[i], second.decoded[i], std::abs(first.decoded[i]) * 0x1p-22f);
          }
        }
      }
    }
  }
}

TEST(RowCodec, ZeroBlocksAndZeroedMemoryDecodeToPositiveZero) {
  for (const RowCodec& codec : builds()) {
    for (const QuantFormat& format : all_quantised_formats()) {
      for (const float zero : {0.0f, -0.0f}) {
        const RoundTrip result = round_trip(codec, format, std::vector<float>(1100, zero));
        EXPECT_TRUE(result.counts == QuantCounts{});
        for (const float x : result.decoded)
          ASSERT_EQ(std::bit_cast<std::uint32_t>(x), 0u) << format.to_string();
      }
      const OwnedTensor tensor(format, {1, 1100, 1});
      std::memset(tensor->codes, 0, storage_bytes(format, tensor->grid));
      std::vector<float> decoded(1100, 1.0f);
      codec.decode(*tensor, 0, decoded.data());
      for (const float x : decoded) ASSERT_EQ(std::bit_cast<std::uint32_t>(x), 0u) << format.to_string();
    }
  }
}

TEST(RowCodec, AZeroBlockBetweenOthersIsExact) {
  for (const RowCodec& codec : builds()) {
    for (const QuantFormat& format : all_quantised_formats()) {
      std::vector<float> x(static_cast<std::size_t>(3 * format.block), 2.0f);
      std::fill(x.begin() + format.block, x.begin() + 2 * format.block, 0.0f);
      const RoundTrip result = round_trip(codec, format, x);
      for (int i = format.block; i < 2 * format.block; ++i) {
        ASSERT_EQ(result.decoded[static_cast<std::size_t>(i)], 0.0f);
      }
      EXPECT_EQ(result.counts.flushed_blocks, 0);
    }
  }
}

TEST(RowCodec, RowsOfEqualElementsKeepTheirValue) {
  for (const RowCodec& codec : builds()) {
    for (const QuantFormat& format : all_quantised_formats()) {
      for (const float value : {1.0f, 0.3f, -0.3f, 1e-30f, -7e20f}) {
        if (value < 0 && !traits_of(format.code).is_signed) continue;
        const RoundTrip result = round_trip(codec, format, std::vector<float>(130, value));
        // FP32 scales: rounding only; BF16: half a unit of 8 bits; two-level: the super scale rounded
        // up.
        double tolerance = format.scale == ScaleType::kFp32   ? 0x1p-22
                           : format.scale == ScaleType::kBf16 ? 0x1p-8
                                                              : 0x1p-7;
        if (format.code == Code::kDynamic8) tolerance = .0075;  // -1 is not a level, -.993 is the last
        for (const float x : result.decoded) {
          ASSERT_NEAR(x, value, std::abs(value) * tolerance) << format.to_string() << " of " << value;
        }
        EXPECT_TRUE(result.counts == QuantCounts{});
      }
    }
  }
}

TEST(RowCodec, OneHugeOutlierTouchesOnlyItsBlock) {
  for (const RowCodec& codec : builds()) {
    for (const QuantFormat& format : all_quantised_formats()) {
      std::vector<float> x(1024, 1.0f);
      x[5] = 1e30f;
      const RoundTrip result = round_trip(codec, format, x);
      ASSERT_NEAR(result.decoded[5], 1e30f, 1e30f * 0x1p-7f) << format.to_string();
      const float elsewhere = result.decoded[static_cast<std::size_t>(format.block)];
      if (format.scale == ScaleType::kTwoLevel) {
        // The other blocks are below the least E4M3 scale under this super-block: zero, and counted.
        EXPECT_EQ(elsewhere, 0.0f);
        EXPECT_EQ(result.counts.flushed_blocks, 1024 / format.block - 1) << format.to_string();
      } else {
        EXPECT_NEAR(elsewhere, 1.0f, 0x1p-8f) << format.to_string();
        EXPECT_EQ(result.counts.flushed_blocks, 0);
      }
      EXPECT_EQ(result.counts.saturated, 0);
    }
  }
}

TEST(RowCodec, DenormalBlocksAreFlushedAndCounted) {
  for (const RowCodec& codec : builds()) {
    for (const QuantFormat& format : all_quantised_formats()) {
      std::vector<float> x(static_cast<std::size_t>(2 * format.block), 1e-40f);
      x[3] = 0x1p-149f;
      const RoundTrip result = round_trip(codec, format, x);
      for (const float value : result.decoded) ASSERT_EQ(value, 0.0f);
      EXPECT_EQ(result.counts.flushed_blocks, 2) << format.to_string();
      EXPECT_EQ(result.counts.saturated, 0);
    }
  }
}

TEST(RowCodec, TheLargestFloatDecodesToAFiniteNumber) {
  for (const RowCodec& codec : builds()) {
    for (const QuantFormat& format : all_quantised_formats()) {
      std::vector<float> x(300, kLargestFloat);
      if (traits_of(format.code).is_signed) x[1] = -kLargestFloat;
      const RoundTrip result = round_trip(codec, format, x);
      for (std::size_t i = 0; i < x.size(); ++i) {
        ASSERT_LE(std::abs(result.decoded[i]), kLargestFloat) << format.to_string();
        // The scale of int4-full-range leaves 7 of 8 steps to the other sign.
        const float least = format.code == Code::kInt4FullRange ? .85f * 7 / 8 : .85f;
        ASSERT_GE(result.decoded[i] / x[i], least) << format.to_string();
      }
      EXPECT_EQ(result.counts.non_finite, 0);
    }
  }
}

TEST(RowCodec, NonFiniteElementsAreCountedAndDoNotSpoilTheirBlock) {
  for (const RowCodec& codec : builds()) {
    for (const QuantFormat& format : all_quantised_formats()) {
      const bool is_signed = traits_of(format.code).is_signed;
      std::vector<float> x(130, 0.0f);
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = i % 2 == 0 || !is_signed ? 1.0f : -1.0f;
      const RoundTrip clean = round_trip(codec, format, x);
      x[2] = kNan;
      x[4] = kInfinity;
      x[7] = is_signed ? -kInfinity : kInfinity;
      x[101] = -kNan;
      const RoundTrip result = round_trip(codec, format, x);
      EXPECT_EQ(result.counts.non_finite, 4) << format.to_string();
      EXPECT_EQ(result.counts.saturated, 0) << format.to_string();
      for (std::size_t i = 0; i < x.size(); ++i) {
        if (i == 2 || i == 101) {
          ASSERT_EQ(result.decoded[i], 0.0f) << format.to_string();
        } else if (i == 4 || i == 7) {
          // The last level of its sign; the absmax of a block may come out one level lower.
          ASSERT_GE(result.decoded[i] / clean.decoded[i], 1.0f)
              << format.to_string() << " element " << i;
          ASSERT_LE(result.decoded[i] / clean.decoded[i], 1.07f)
              << format.to_string() << " element " << i;
        } else {
          ASSERT_EQ(result.decoded[i], clean.decoded[i]) << format.to_string() << " element " << i;
        }
      }
      const RoundTrip none = round_trip(codec, format, std::vector<float>(33, kNan));
      EXPECT_EQ(none.counts.non_finite, 33);
      EXPECT_EQ(none.counts.flushed_blocks, 0);
      for (const float value : none.decoded) ASSERT_EQ(value, 0.0f);
    }
  }
}

TEST(RowCodec, SaturationIsCounted) {
  for (const RowCodec& codec : builds()) {
    // The first block makes the super scale 1; the second would need an E4M3 scale of 1.4 * 2^-9, and
    // gets the least there is, 2^-9: what is above 1.07 * 2^-9 is out of its reach.
    std::vector<float> x(64, 0.0f);
    x[0] = 448;
    x[32] = 1.4f * 0x1p-9f;
    x[33] = -1.1f * 0x1p-9f;
    x[34] = 1.06f * 0x1p-9f;
    const RoundTrip result = round_trip(codec, parse_format("nf4/32/two-level"), x);
    EXPECT_EQ(result.counts.saturated, 2);
    EXPECT_EQ(result.counts.flushed_blocks, 0);
    EXPECT_EQ(result.decoded[32], 0x1p-9f);
    EXPECT_EQ(result.decoded[33], -0x1p-9f);

    std::vector<float> negative = {-1.0f, 2.0f, -3.0f, 4.0f};
    const RoundTrip clamped = round_trip(codec, parse_format("dynamic8-unsigned/256/fp32"), negative);
    EXPECT_EQ(clamped.counts.saturated, 2);
    EXPECT_EQ(clamped.decoded[0], 0.0f);
    EXPECT_EQ(clamped.decoded[2], 0.0f);
    EXPECT_EQ(clamped.decoded[3], 4.0f);
  }
}

TEST(RowCodec, FullRangeInt4GivesItsSixteenthLevelToTheLargestElement) {
  for (const RowCodec& codec : builds()) {
    for (const char* text :
         {"int4-full-range/16/fp32", "int4-full-range/16/bf16", "int4-full-range/16/two-level"}) {
      for (const float sign : {1.0f, -1.0f}) {
        std::vector<float> x(16, 0.0f);
        x[3] = sign * 8;
        x[4] = -sign * 7;
        x[5] = sign * 5;
        const RoundTrip result = round_trip(codec, parse_format(text), x);
        const float scale = result.decoded[3] / (sign * 8);
        EXPECT_NEAR(scale, 1.0f, 0x1p-7f) << text;
        EXPECT_EQ(result.decoded[4], -sign * 7 * scale) << text;
        EXPECT_EQ(result.decoded[5], sign * 5 * scale) << text;
      }
    }
  }
}

std::vector<QuantFormat> with_stochastic(std::vector<QuantFormat> formats) {
  const std::size_t count = formats.size();
  for (std::size_t i = 0; i < count; ++i) {
    formats.push_back(formats[i]);
    formats.back().rounding = Rounding::kStochastic;
  }
  return formats;
}

TEST(RowCodec, BothBuildsGiveTheSameBytesAndCounts) {
  const std::vector<RowCodec> list = builds();
  if (list.size() < 2) GTEST_SKIP() << "this machine runs one build only";
  for (const QuantFormat& format : with_stochastic(all_quantised_formats())) {
    for (const BlockGrid& grid : {BlockGrid{1, 2500, 1}, BlockGrid{1, 999, 3}}) {
      std::vector<float> x = test_row(grid.row_length, 17);
      for (std::size_t i = 0; i < x.size(); i += 97) {
        const float awkward[] = {0.0f, -0.0f, kNan, kInfinity, -kInfinity, 1e-41f, 1e20f, -1e-30f};
        x[i] = awkward[i / 97 % 8];
      }
      const RoundTrip a = round_trip(list[0], format, x, grid.segments, {.seed = 5});
      const RoundTrip b = round_trip(list[1], format, x, grid.segments, {.seed = 5});
      ASSERT_EQ(a.bytes, b.bytes) << format.to_string();
      ASSERT_EQ(std::memcmp(a.decoded.data(), b.decoded.data(), a.decoded.size() * sizeof(float)), 0);
      ASSERT_TRUE(a.counts == b.counts) << format.to_string();
    }
  }
}

/// The widest gap between neighbouring levels, as a share of the scale.
double largest_gap(Code code) {
  double widest = 0, before = 0;
  std::vector<double> levels;
  for (std::uint32_t bits = 0; bits < 1u << code_bits(code); ++bits) {
    const double level = decode_plainly(code, bits) / code_maximum(code);
    if (level >= 0 && level <= 1) levels.push_back(level);
  }
  std::sort(levels.begin(), levels.end());
  for (const double level : levels) {
    widest = std::max(widest, level - before);
    before = level;
  }
  return widest;
}

TEST(RowCodec, StochasticRoundingIsReproducibleUnbiasedAndKeyed) {
  constexpr int kSteps = 1500;
  for (const RowCodec& codec : builds()) {
    for (QuantFormat format : all_quantised_formats()) {
      if (format.block != 32 || format.scale != ScaleType::kFp32) continue;
      const std::vector<float> x = test_row(format, 70, 19);
      const RoundTrip nearest = round_trip(codec, format, x);
      format.rounding = Rounding::kStochastic;
      const RandomKey key{.seed = 3, .step = 1, .micro_batch = 2};
      const RoundTrip once = round_trip(codec, format, x, 1, key);
      EXPECT_EQ(once.bytes, round_trip(codec, format, x, 1, key).bytes);
      RandomKey other = key;
      other.micro_batch = 3;
      EXPECT_NE(once.bytes, round_trip(codec, format, x, 1, other).bytes) << format.to_string();

      std::vector<double> mean(x.size());
      for (std::uint32_t step = 0; step < kSteps; ++step) {
        other.step = step;
        const RoundTrip result = round_trip(codec, format, x, 1, other);
        for (std::size_t i = 0; i < x.size(); ++i) mean[i] += result.decoded[i] / double{kSteps};
      }
      for (std::size_t i = 0; i < x.size(); ++i) {
        const auto block = x.begin() + static_cast<std::ptrdiff_t>(i / 32 * 32);
        float absmax = 0;
        for (auto at = block; at != x.end() && at != block + 32; ++at)
          absmax = std::max(absmax, std::abs(*at));
        // dynamic8 has no -1, int4-full-range no 8 of the other sign: what lies beyond is clamped.
        if (format.code == Code::kDynamic8 && std::abs(x[i]) > .99f * absmax) continue;
        if (format.code == Code::kInt4FullRange && std::abs(x[i]) > .87f * absmax) continue;
        // The draw is nearest with probability 1 - d / gap: the variance is d (gap - d). Five
        // deviations, and ten draws for where the distribution is too skew for that.
        const double gap = largest_gap(format.code) * absmax;
        const double distance = std::abs(nearest.decoded[i] - x[i]);
        EXPECT_NEAR(mean[i], x[i],
                    5 * std::sqrt(distance * gap / kSteps) + 10 * gap / kSteps + 2e-6 * std::abs(x[i]))
            << format.to_string() << " element " << i;
      }
    }
  }
}

TEST(RowCodec, StochasticDrawsBelongToElementsOfTheTensor) {
  // Row r of a tensor draws for elements r * row_length + column: rows of equal input differ.
  QuantFormat format = parse_format("int4/32/fp32/stochastic");
  for (const RowCodec& codec : builds()) {
    const OwnedTensor tensor(format, {2, 101, 1});
    const std::vector<float> x = test_row(101, 23);
    QuantCounts counts;
    codec.encode(*tensor, 0, x.data(), {}, counts);
    codec.encode(*tensor, 1, x.data(), {}, counts);
    EXPECT_NE(tensor.row(0), tensor.row(1));
    for (std::int64_t row = 0; row < 2; ++row) {
      for (std::int64_t i = 0; i < 101; ++i) {
        const Stored stored = stored_element(*tensor, row, i);
        const float uniform = random_uniform({}, static_cast<std::uint64_t>(row * 101 + i));
        const float y = x[static_cast<std::size_t>(i)] * (1.0f / stored.scale);
        ASSERT_EQ(stored.code, encode_stochastic<Code::kInt4>(y, uniform)) << i;
      }
    }
  }
}

TEST(RowCodec, ExactFormatsStoreElementsAsTheyAre) {
  const std::vector<float> x = {1.5f, -0.0f, 1e-40f, kInfinity, kNan, 65520.0f, 3.0f};
  for (const RowCodec& codec : builds()) {
    const RoundTrip fp32 = round_trip(codec, parse_format("fp32"), x);
    EXPECT_EQ(std::memcmp(fp32.decoded.data(), x.data(), sizeof(float) * x.size()), 0);
    EXPECT_EQ(fp32.counts.non_finite, 2);
    EXPECT_EQ(fp32.counts.saturated, 0);
    const RoundTrip fp16 = round_trip(codec, parse_format("fp16"), x);
    EXPECT_EQ(fp16.decoded[0], 1.5f);
    EXPECT_EQ(fp16.decoded[5], kInfinity);
    EXPECT_EQ(fp16.counts.non_finite, 2);
    EXPECT_EQ(fp16.counts.saturated, 1) << "65,520 overflows FP16";
    const RoundTrip bf16 = round_trip(codec, parse_format("bf16"), test_row(77, 29));
    EXPECT_TRUE(bf16.counts == QuantCounts{});
    EXPECT_EQ(bf16.bytes.size(), 2u * 77u);
  }
}

TEST(RowCodec, DoublesStayExactInFp64AndAreRoundedOnceElsewhere) {
  std::vector<double> x(77);
  std::vector<float> rounded(77);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = random_normal({.seed = 31}, i);
    rounded[i] = static_cast<float>(x[i]);
  }
  QuantCounts counts;
  const OwnedTensor exact(parse_format("fp64"), {1, 77, 1});
  cpu::baseline::encode_row(*exact, 0, x.data(), {}, counts);
  std::vector<double> decoded(77);
  cpu::baseline::decode_row(*exact, 0, decoded.data());
  EXPECT_EQ(decoded, x);
  for (const char* text : {"fp32", "nf4/32/two-level", "int8/32/bf16"}) {
    const OwnedTensor a(parse_format(text), {1, 77, 1}), b(parse_format(text), {1, 77, 1});
    cpu::baseline::encode_row(*a, 0, x.data(), {}, counts);
    cpu::baseline::encode_row(*b, 0, rounded.data(), {}, counts);
    EXPECT_EQ(a.row(0), b.row(0)) << text;
    std::vector<float> narrow(77);
    cpu::baseline::decode_row(*a, 0, narrow.data());
    cpu::baseline::decode_row(*a, 0, decoded.data());
    for (std::size_t i = 0; i < narrow.size(); ++i) EXPECT_EQ(decoded[i], double{narrow[i]});
  }
}

}  // namespace
}  // namespace agoq

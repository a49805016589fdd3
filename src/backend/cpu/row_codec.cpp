#include "backend/cpu/row_codec.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "backend/cpu/storage.h"
#include "core/error.h"
#include "quant/codec.h"

namespace agoq::cpu::AGOQ_CPU_ISA {
namespace {

// Rows are worked through in groups of one super-block: everything about a group stays in the L1 cache,
// and the loops over it are long enough to vectorise well.
constexpr std::int64_t kGroup = kSuperBlock;
constexpr std::int64_t kSmallestBlock = 16;
constexpr std::int64_t kGroupBlocks = kGroup / kSmallestBlock;

constexpr std::int32_t kMagnitudeMask = 0x7FFFFFFF;
constexpr std::int32_t kInfinityBits = 0x7F800000;

constexpr std::int64_t ceil_divide(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int32_t magnitude_bits(float x) { return std::bit_cast<std::int32_t>(x) & kMagnitudeMask; }

/// The planes of one segment of one row.
struct SegmentPlanes {
  std::uint8_t* codes;
  std::uint8_t* bits;        // first extra bit plane
  std::int64_t bits_stride;  // bytes from one extra bit plane to the next
  std::byte* scales;
  std::byte* super;
};

/// Where segment after segment of a row lies.
class RowLayout {
 public:
  RowLayout(const QuantTensor& tensor, std::int64_t row) {
    const RowBytes bytes = row_bytes(tensor.format, tensor.grid);
    const int extra_bits = std::max(0, traits_of(tensor.format.code).bits % 8 - 4);
    row_ = {reinterpret_cast<std::uint8_t*>(tensor.codes + row * bytes.codes),
            reinterpret_cast<std::uint8_t*>(tensor.bits + row * bytes.bits),
            extra_bits == 0 ? 0 : bytes.bits / extra_bits, tensor.scales + row * bytes.scales,
            tensor.super + row * bytes.super};
    code_bytes_ = bytes.codes / tensor.grid.segments;
    bit_bytes_ = row_.bits_stride / tensor.grid.segments;
    scale_bytes_ = bytes.scales / tensor.grid.segments;
    super_bytes_ = bytes.super / tensor.grid.segments;
  }

  SegmentPlanes segment(std::int64_t index) const {
    return {row_.codes + index * code_bytes_, row_.bits + index * bit_bytes_, row_.bits_stride,
            row_.scales + index * scale_bytes_, row_.super + index * super_bytes_};
  }

 private:
  SegmentPlanes row_;
  std::int64_t code_bytes_, bit_bytes_, scale_bytes_, super_bytes_;
};

// --- packing: byte-wide codes to planes and back ---

void pack_nibbles(const std::uint8_t* codes, std::int64_t count, std::uint8_t* out) {
  const std::int64_t pairs = count / 2;
  for (std::int64_t i = 0; i < pairs; ++i) {
    out[i] = static_cast<std::uint8_t>((codes[2 * i] & 0xF) | (codes[2 * i + 1] << 4));
  }
  if (count % 2 != 0) out[pairs] = codes[count - 1] & 0xF;
}

void unpack_nibbles(const std::uint8_t* in, std::int64_t count, std::uint8_t* codes) {
  const std::int64_t pairs = count / 2;
  for (std::int64_t i = 0; i < pairs; ++i) {
    codes[2 * i] = in[i] & 0xF;
    codes[2 * i + 1] = static_cast<std::uint8_t>(in[i] >> 4);
  }
  if (count % 2 != 0) codes[count - 1] = in[pairs] & 0xF;
}

/// Bit `bit` of every code; element 8i + k in bit k of byte i.
void pack_bit(const std::uint8_t* codes, std::int64_t count, int bit, std::uint8_t* out) {
  for (std::int64_t i = 0; i < count / 8; ++i) {
    unsigned byte = 0;
    for (int k = 0; k < 8; ++k) byte |= ((codes[8 * i + k] >> bit) & 1u) << k;
    out[i] = static_cast<std::uint8_t>(byte);
  }
  if (count % 8 != 0) {
    unsigned byte = 0;
    for (std::int64_t k = count / 8 * 8; k < count; ++k) byte |= ((codes[k] >> bit) & 1u) << (k % 8);
    out[count / 8] = static_cast<std::uint8_t>(byte);
  }
}

void unpack_bit(const std::uint8_t* in, std::int64_t count, int bit, std::uint8_t* codes) {
  for (std::int64_t i = 0; i < count / 8; ++i) {
    const unsigned byte = in[i];
    for (int k = 0; k < 8; ++k) {
      codes[8 * i + k] = static_cast<std::uint8_t>(codes[8 * i + k] | (((byte >> k) & 1u) << bit));
    }
  }
  for (std::int64_t k = count / 8 * 8; k < count; ++k) {
    codes[k] = static_cast<std::uint8_t>(codes[k] | (((in[k / 8] >> (k % 8)) & 1u) << bit));
  }
}

// --- what a block's scale is made from ---

/// Largest finite magnitude, and the number of NaN and Inf. Magnitudes compare as integers.
float finite_absmax(const float* x, std::int64_t count, std::int64_t& non_finite) {
  std::int32_t largest = 0;
  std::int32_t others = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t magnitude = magnitude_bits(x[i]);
    const std::int32_t finite = magnitude < kInfinityBits ? magnitude : 0;
    largest = finite > largest ? finite : largest;
    others += magnitude < kInfinityBits ? 0 : 1;
  }
  non_finite += others;
  return std::bit_cast<float>(largest);
}

/// The same over positive elements only, for codes without negative values.
float finite_maximum(const float* x, std::int64_t count, std::int64_t& non_finite) {
  std::int32_t largest = 0;
  std::int32_t others = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t bits = std::bit_cast<std::int32_t>(x[i]);
    const std::int32_t finite = bits < kInfinityBits ? bits : 0;
    largest = finite > largest ? finite : largest;
    others += (bits & kMagnitudeMask) < kInfinityBits ? 0 : 1;
  }
  non_finite += others;
  return std::bit_cast<float>(largest);
}

/// The largest element of each block, of magnitudes if `mask` is kMagnitudeMask, of positive elements if
/// it is ~0. False if a bit pattern was that of NaN or Inf: then the maxima are not of finite elements.
bool block_maxima(const float* x, std::int64_t count, std::int64_t block, std::int32_t mask,
                  float* maxima) {
  std::int32_t largest_of_all = 0;
  for (std::int64_t begin = 0; begin < count; begin += block) {
    const std::int64_t end = std::min(begin + block, count);
    std::int32_t lanes[8] = {};
    std::int64_t i = begin;
    for (; i + 8 <= end; i += 8) {
      for (int lane = 0; lane < 8; ++lane) {
        lanes[lane] = std::max(lanes[lane], std::bit_cast<std::int32_t>(x[i + lane]) & mask);
      }
    }
    std::int32_t largest =
        std::max(std::max(std::max(lanes[0], lanes[1]), std::max(lanes[2], lanes[3])),
                 std::max(std::max(lanes[4], lanes[5]), std::max(lanes[6], lanes[7])));
    for (; i < end; ++i) largest = std::max(largest, std::bit_cast<std::int32_t>(x[i]) & mask);
    *maxima++ = std::bit_cast<float>(largest);
    largest_of_all = std::max(largest_of_all, largest);
  }
  return largest_of_all < kInfinityBits;
}

bool contains(const float* x, std::int64_t count, float value) {
  std::int32_t equal = 0;
  for (std::int64_t i = 0; i < count; ++i) equal |= x[i] == value ? 1 : 0;
  return equal != 0;
}

float unrounded_scale(Code code, float maximum, const float* x, std::int64_t count, float absmax) {
  const float scale = absmax / maximum;
  // The largest element gets code -8, whatever its sign; between +absmax and -absmax the latter.
  if (code == Code::kInt4FullRange) return contains(x, count, -absmax) ? scale : -scale;
  return scale;
}

std::int64_t count_saturated(const float* x, std::int64_t count, float limit) {
  std::int32_t saturated = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t magnitude = magnitude_bits(x[i]);
    saturated += std::bit_cast<float>(magnitude) > limit && magnitude < kInfinityBits ? 1 : 0;
  }
  return saturated;
}

std::int64_t count_negative(const float* x, std::int64_t count) {
  std::int32_t negative = 0;
  for (std::int64_t i = 0; i < count; ++i)
    negative += x[i] < 0.0f && x[i] >= -std::numeric_limits<float>::max() ? 1 : 0;
  return negative;
}

/// Rounds the scales of a group's blocks to `type`, stores them, and replaces them by what was stored.
void store_scales(ScaleType type, float maximum, std::int64_t blocks, std::int64_t first_block,
                  std::int64_t group, const SegmentPlanes& planes, float* scales) {
  if (type == ScaleType::kFp32) {
    float* out = reinterpret_cast<float*>(planes.scales) + first_block;
    for (std::int64_t b = 0; b < blocks; ++b) out[b] = scales[b] = stored_scale_fp32(scales[b], maximum);
  } else if (type == ScaleType::kBf16) {
    Bf16* out = reinterpret_cast<Bf16*>(planes.scales) + first_block;
    for (std::int64_t b = 0; b < blocks; ++b) {
      out[b] = stored_scale_bf16(scales[b], maximum);
      scales[b] = to_float(out[b]);
    }
  } else {
    float largest = 0;
    for (std::int64_t b = 0; b < blocks; ++b) largest = std::max(largest, std::abs(scales[b]));
    const Bf16 super = stored_super_scale(largest);
    reinterpret_cast<Bf16*>(planes.super)[group] = super;
    auto* out = reinterpret_cast<std::uint8_t*>(planes.scales) + first_block;
    for (std::int64_t b = 0; b < blocks; ++b) {
      out[b] = stored_block_scale(scales[b], super, maximum);
      scales[b] = two_level_scale(out[b], super);
    }
  }
}

void load_scales(ScaleType type, std::int64_t blocks, std::int64_t first_block, std::int64_t group,
                 const SegmentPlanes& planes, float* scales) {
  if (type == ScaleType::kFp32) {
    const float* in = reinterpret_cast<const float*>(planes.scales) + first_block;
    for (std::int64_t b = 0; b < blocks; ++b) scales[b] = in[b];
  } else if (type == ScaleType::kBf16) {
    const Bf16* in = reinterpret_cast<const Bf16*>(planes.scales) + first_block;
    for (std::int64_t b = 0; b < blocks; ++b) scales[b] = to_float(in[b]);
  } else {
    const Bf16 super = reinterpret_cast<const Bf16*>(planes.super)[group];
    const auto* in = reinterpret_cast<const std::uint8_t*>(planes.scales) + first_block;
    for (std::int64_t b = 0; b < blocks; ++b) scales[b] = two_level_scale(in[b], super);
  }
}

// --- the elements of one group, each beside the scale of its block ---

/// out[i] = values[i / block]: loops over elements then need not stop at every block.
void spread(const float* __restrict values, std::int64_t blocks, std::int64_t block,
            float* __restrict out) {
  std::int64_t b = 0;
  do {  // at least one block, or the compiler takes `out` for uninitialised
    for (std::int64_t piece = 0; piece < block; piece += kSmallestBlock) {
      std::fill_n(out + b * block + piece, kSmallestBlock, values[b]);
    }
  } while (++b < blocks);
}

template <Code code>
void encode_elements(const float* __restrict x, const float* __restrict reciprocals, std::int64_t count,
                     std::uint8_t* __restrict out) {
  // Two loops: in one, the compiler narrows every comparison inside encode to a byte by itself.
  std::uint32_t words[kGroup];
  for (std::int64_t i = 0; i < count; ++i) words[i] = encode<code>(x[i] * reciprocals[i]);
  for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<std::uint8_t>(words[i]);
}

template <Code code>
void encode_elements_stochastic(const float* __restrict x, const float* __restrict reciprocals,
                                std::int64_t count, const std::uint32_t* __restrict random,
                                std::uint8_t* __restrict out) {
  // A loop of its own: it vectorises even where decode does not.
  encode_elements<code>(x, reciprocals, count, out);
  for (std::int64_t i = 0; i < count; ++i) {
    const float uniform = static_cast<float>(static_cast<std::int32_t>(random[i] >> 8)) * 0x1p-24f;
    out[i] =
        static_cast<std::uint8_t>(choose_stochastically<code>(x[i] * reciprocals[i], out[i], uniform));
  }
}

template <Code code>
void decode_elements(const std::uint8_t* __restrict codes, const float* __restrict scales,
                     std::int64_t count, float* __restrict out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = decode<code>(codes[i]) * scales[i];
}

/// What depends on the code alone. All else about a row is the same code for every format.
struct BlockCodec {
  Code code;
  int bits;
  float maximum;
  std::uint8_t zero;  // the code of 0
  void (*encode)(const float* x, const float* reciprocals, std::int64_t count, std::uint8_t* out);
  void (*encode_stochastic)(const float* x, const float* reciprocals, std::int64_t count,
                            const std::uint32_t* random, std::uint8_t* out);
  void (*decode)(const std::uint8_t* codes, const float* scales, std::int64_t count, float* out);
};

template <Code code>
BlockCodec make_block_codec() {
  return {code,
          code_bits(code),
          kMaximum<code>,
          static_cast<std::uint8_t>(encode<code>(0.0f)),
          encode_elements<code>,
          encode_elements_stochastic<code>,
          decode_elements<code>};
}

/// The visible list of instantiations. Quantised codes only.
const BlockCodec& block_codec(Code code) {
  static const BlockCodec codecs[] = {
      make_block_codec<Code::kNf4>(),           make_block_codec<Code::kE2m1>(),
      make_block_codec<Code::kBnbFp4>(),        make_block_codec<Code::kInt4>(),
      make_block_codec<Code::kInt4FullRange>(), make_block_codec<Code::kInt5>(),
      make_block_codec<Code::kInt6>(),          make_block_codec<Code::kInt8>(),
      make_block_codec<Code::kE4m3>(),          make_block_codec<Code::kE5m2>(),
      make_block_codec<Code::kDynamic8>(),      make_block_codec<Code::kDynamic8Unsigned>(),
  };
  const BlockCodec& codec = codecs[static_cast<int>(code) - static_cast<int>(Code::kNf4)];
  check(codec.code == code, "the table of block codecs is not in the order of Code");
  return codec;
}

// --- one group of a row ---

/// words[i] = random_bits(key, first + i); returns where element `first` stands in `words`.
const std::uint32_t* draw(const RandomKey& key, std::uint64_t first, std::int64_t count,
                          std::uint32_t* words) {
  const std::uint64_t first_draw = first / 4;
  const std::uint64_t end_draw = (first + static_cast<std::uint64_t>(count) + 3) / 4;
  const RandomWords mixed = mixed_key(key);
  for (std::uint64_t i = 0; i < end_draw - first_draw; ++i) {
    const RandomWords four = random_words(mixed, first_draw + i);
    for (int k = 0; k < 4; ++k) words[4 * i + k] = four.word[k];
  }
  return words + first % 4;
}

void encode_group(const QuantTensor& tensor, const BlockCodec& codec, const SegmentPlanes& planes,
                  std::int64_t group, const float* x, std::int64_t count, const RandomKey& key,
                  std::uint64_t first_element, QuantCounts& counts) {
  const std::int64_t block = tensor.format.block;
  const std::int64_t blocks = ceil_divide(count, block);
  const std::int64_t first_block = group * (kGroup / block);
  const bool has_sign = codec.code != Code::kDynamic8Unsigned;
  float finite[kGroup];
  float scales[kGroupBlocks];
  float absmax[kGroupBlocks];
  std::uint8_t codes[kGroup];

  std::int64_t non_finite = 0;
  const bool all_finite = block_maxima(x, count, block, kMagnitudeMask, absmax);
  if (!all_finite) {
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t length = std::min(block, count - b * block);
      absmax[b] = has_sign ? finite_absmax(x + b * block, length, non_finite)
                           : finite_maximum(x + b * block, length, non_finite);
    }
  } else if (!has_sign) {
    block_maxima(x, count, block, ~0, absmax);
  }
  for (std::int64_t b = 0; b < blocks; ++b) {
    scales[b] = unrounded_scale(codec.code, codec.maximum, x + b * block,
                                std::min(block, count - b * block), absmax[b]);
  }
  store_scales(tensor.format.scale, codec.maximum, blocks, first_block, group, planes, scales);

  for (std::int64_t b = 0; b < blocks; ++b) {
    if (scales[b] == 0.0f) {
      counts.flushed_blocks += absmax[b] > 0.0f ? 1 : 0;
      continue;
    }
    const float limit = kSaturationMargin * (codec.maximum * std::abs(scales[b]));
    if (absmax[b] > limit) {
      counts.saturated += count_saturated(x + b * block, std::min(block, count - b * block), limit);
    }
  }
  if (!has_sign) counts.saturated += count_negative(x, count);
  if (non_finite > 0) {
    counts.non_finite += non_finite;
    // NaN is stored as zero; Inf is outside every code's range and so becomes the last level.
    for (std::int64_t i = 0; i < count; ++i) finite[i] = x[i] == x[i] ? x[i] : 0.0f;
    x = finite;
  }

  const bool packed = codec.bits < 8;
  std::uint8_t* out = packed ? codes : planes.codes + group * kGroup;
  std::uint32_t words[kGroup + 8];
  const bool stochastic = tensor.format.rounding == Rounding::kStochastic;
  const std::uint32_t* random = stochastic ? draw(key, first_element, count, words) : nullptr;
  float reciprocals[kGroupBlocks];
  float element_reciprocals[kGroup];
  for (std::int64_t b = 0; b < blocks; ++b) reciprocals[b] = scales[b] == 0.0f ? 0.0f : 1.0f / scales[b];
  spread(reciprocals, blocks, block, element_reciprocals);
  if (stochastic) {
    codec.encode_stochastic(x, element_reciprocals, count, random, out);
  } else {
    codec.encode(x, element_reciprocals, count, out);
  }
  for (std::int64_t b = 0; b < blocks; ++b) {  // -0 and Inf times 0 have other codes than 0
    if (scales[b] != 0.0f) continue;
    std::memset(out + b * block, codec.zero,
                static_cast<std::size_t>(std::min(block, count - b * block)));
  }
  if (packed) {
    pack_nibbles(codes, count, planes.codes + group * (kGroup / 2));
    for (int bit = 4; bit < codec.bits; ++bit) {
      pack_bit(codes, count, bit, planes.bits + (bit - 4) * planes.bits_stride + group * (kGroup / 8));
    }
  }
}

void decode_group(const QuantTensor& tensor, const BlockCodec& codec, const SegmentPlanes& planes,
                  std::int64_t group, std::int64_t count, float* out) {
  const std::int64_t block = tensor.format.block;
  const std::int64_t blocks = ceil_divide(count, block);
  float scales[kGroupBlocks];
  load_scales(tensor.format.scale, blocks, group * (kGroup / block), group, planes, scales);

  std::uint8_t unpacked[kGroup];
  const std::uint8_t* codes = planes.codes + group * kGroup;
  if (codec.bits < 8) {
    unpack_nibbles(planes.codes + group * (kGroup / 2), count, unpacked);
    for (int bit = 4; bit < codec.bits; ++bit) {
      unpack_bit(planes.bits + (bit - 4) * planes.bits_stride + group * (kGroup / 8), count, bit,
                 unpacked);
    }
    codes = unpacked;
  }
  float element_scales[kGroup];
  spread(scales, blocks, block, element_scales);
  codec.decode(codes, element_scales, count, out);
  for (std::int64_t b = 0; b < blocks; ++b) {  // +0, whatever the codes
    if (scales[b] == 0.0f) std::fill_n(out + b * block, std::min(block, count - b * block), 0.0f);
  }
}

/// Calls visit(planes, group, column, count) for each group of a row.
template <typename Visit>
void for_each_group(const QuantTensor& tensor, std::int64_t row, Visit visit) {
  const RowLayout layout(tensor, row);
  const std::int64_t length = tensor.grid.segment_length();
  for (std::int64_t segment = 0; segment < tensor.grid.segments; ++segment) {
    const SegmentPlanes planes = layout.segment(segment);
    for (std::int64_t begin = 0; begin < length; begin += kGroup) {
      visit(planes, begin / kGroup, segment * length + begin, std::min(kGroup, length - begin));
    }
  }
}

template <typename Source>
void encode_blocks(const QuantTensor& tensor, std::int64_t row, const Source* in, const RandomKey& key,
                   QuantCounts& counts) {
  const BlockCodec& codec = block_codec(tensor.format.code);
  const auto first_element =
      static_cast<std::uint64_t>((tensor.first_row + row) * tensor.grid.row_length);
  for_each_group(
      tensor, row,
      [&](const SegmentPlanes& planes, std::int64_t group, std::int64_t column, std::int64_t count) {
        const float* x = nullptr;
        float staged[kGroup];
        if constexpr (std::is_same_v<Source, float>) {
          x = in + column;
        } else {
          for (std::int64_t i = 0; i < count; ++i) staged[i] = static_cast<float>(load(in[column + i]));
          x = staged;
        }
        encode_group(tensor, codec, planes, group, x, count, key,
                     first_element + static_cast<std::uint64_t>(column), counts);
      });
}

template <typename Target>
void decode_blocks(const QuantTensor& tensor, std::int64_t row, Target* out) {
  const BlockCodec& codec = block_codec(tensor.format.code);
  for_each_group(
      tensor, row,
      [&](const SegmentPlanes& planes, std::int64_t group, std::int64_t column, std::int64_t count) {
        if constexpr (std::is_same_v<Target, float>) {
          decode_group(tensor, codec, planes, group, count, out + column);
        } else {
          float staged[kGroup];
          decode_group(tensor, codec, planes, group, count, staged);
          std::copy(staged, staged + count, out + column);
        }
      });
}

// --- elements stored as they are ---

template <typename To>
To narrow(float x) {
  if constexpr (std::is_same_v<To, Bf16>) {
    return to_bf16(x);
  } else if constexpr (std::is_same_v<To, Fp16>) {
    return to_fp16(x);
  } else {
    return x;
  }
}

template <typename Element, typename Source>
void encode_exact(const QuantTensor& tensor, std::int64_t row, const Source* in, QuantCounts& counts) {
  Element* out = reinterpret_cast<Element*>(tensor.codes) + row * tensor.grid.row_length;
  std::int64_t non_finite = 0;
  std::int64_t overflowed = 0;
  for (std::int64_t i = 0; i < tensor.grid.row_length; ++i) {
    bool finite_in = false, finite_out = false;
    if constexpr (std::is_same_v<Source, double>) {
      finite_in = std::abs(in[i]) <= std::numeric_limits<double>::max();
    } else {
      finite_in = magnitude_bits(load(in[i])) < kInfinityBits;
    }
    if constexpr (std::is_same_v<Element, double>) {
      if constexpr (std::is_same_v<Source, double>) {
        out[i] = in[i];
      } else {
        out[i] = load(in[i]);
      }
      finite_out = finite_in;
    } else {
      out[i] = narrow<Element>(static_cast<float>(load(in[i])));
      finite_out = magnitude_bits(to_float(out[i])) < kInfinityBits;
    }
    non_finite += finite_in ? 0 : 1;
    overflowed += finite_in && !finite_out ? 1 : 0;
  }
  counts.non_finite += non_finite;
  counts.saturated += overflowed;
}

template <typename Element, typename Target>
void decode_exact(const QuantTensor& tensor, std::int64_t row, Target* out) {
  const Element* in = reinterpret_cast<const Element*>(tensor.codes) + row * tensor.grid.row_length;
  for (std::int64_t i = 0; i < tensor.grid.row_length; ++i) {
    if constexpr (std::is_same_v<Element, double>) {
      out[i] = static_cast<Target>(in[i]);
    } else {
      out[i] = to_float(in[i]);
    }
  }
}

template <typename Source>
void encode_any(const QuantTensor& tensor, std::int64_t row, const Source* in, const RandomKey& key,
                QuantCounts& counts) {
  switch (tensor.format.code) {
    case Code::kFp64: return encode_exact<double>(tensor, row, in, counts);
    case Code::kFp32: return encode_exact<float>(tensor, row, in, counts);
    case Code::kBf16: return encode_exact<Bf16>(tensor, row, in, counts);
    case Code::kFp16: return encode_exact<Fp16>(tensor, row, in, counts);
    default: return encode_blocks(tensor, row, in, key, counts);
  }
}

template <typename Target>
void decode_any(const QuantTensor& tensor, std::int64_t row, Target* out) {
  switch (tensor.format.code) {
    case Code::kFp64: return decode_exact<double>(tensor, row, out);
    case Code::kFp32: return decode_exact<float>(tensor, row, out);
    case Code::kBf16: return decode_exact<Bf16>(tensor, row, out);
    case Code::kFp16: return decode_exact<Fp16>(tensor, row, out);
    default: return decode_blocks(tensor, row, out);
  }
}

}  // namespace

namespace {

template <typename T>
void sum_pieces(std::span<const QuantTensor> pieces, std::int64_t row, T* __restrict sum,
                T* __restrict addend) {
  decode_any(pieces.front(), row, sum);
  const std::int64_t width = pieces.front().width();
  for (const QuantTensor& piece : pieces.subspan(1)) {
    decode_any(piece, row, addend);
    for (std::int64_t i = 0; i < width; ++i) sum[i] += addend[i];
  }
}

}  // namespace

void sum_row(std::span<const QuantTensor> pieces, std::int64_t row, float* sum, float* addend) {
  sum_pieces(pieces, row, sum, addend);
}
void sum_row(std::span<const QuantTensor> pieces, std::int64_t row, double* sum, double* addend) {
  sum_pieces(pieces, row, sum, addend);
}

void encode_row(const QuantTensor& destination, std::int64_t row, const float* in, const RandomKey& key,
                QuantCounts& counts) {
  encode_any(destination, row, in, key, counts);
}

void encode_row(const QuantTensor& destination, std::int64_t row, const double* in, const RandomKey& key,
                QuantCounts& counts) {
  encode_any(destination, row, in, key, counts);
}

void encode_row(const QuantTensor& destination, std::int64_t row, const Bf16* in, const RandomKey& key,
                QuantCounts& counts) {
  encode_any(destination, row, in, key, counts);
}

void decode_row(const QuantTensor& source, std::int64_t row, float* out) {
  decode_any(source, row, out);
}
void decode_row(const QuantTensor& source, std::int64_t row, double* out) {
  decode_any(source, row, out);
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA

// Encodes and decodes groups of a QuantTensor: the device's counterpart of cpu/row_codec.h, with the
// same bytes.
//
// Ownership. A *group* is the elements under one super-block scale: up to kSuperBlock = 1,024
// neighbouring elements of one segment of one row. One warp owns one group. Lane l holds the four
// vectors of eight elements that start at 8 l, 8 (l + 32), 8 (l + 64) and 8 (l + 96) of the group, in
// registers: values[chunk][i] is element 8 (l + 32 chunk) + i. So a block of B = 16..256 elements lies
// in B / 8 neighbouring lanes of one chunk, accesses are coalesced, and a whole group is quantised
// without shared memory. Kernels that fuse arithmetic with quantisation give each warp the same part
// of a row and call the same two functions.
//
// Format, block size, scale type and rounding are run-time values that are uniform over a launch.
#pragma once

#include <cfloat>
#include <cstdint>

#include "backend/cuda/launch.cuh"
#include "core/random.h"
#include "quant/codec.h"
#include "quant/quant_counters.h"
#include "quant/quant_tensor.h"

namespace agoq::cuda {

inline constexpr int kChunks = static_cast<int>(kSuperBlock) / (kWarp * kVector);
using GroupValues = float[kChunks][kVector];

/// What kernels need to know of a QuantTensor.
struct QuantView {
  std::byte* codes = nullptr;
  std::byte* bits = nullptr;
  std::byte* scales = nullptr;
  std::byte* super = nullptr;
  RowBytes row;                 // bytes per row of each plane
  std::int64_t row_length = 0;  // elements
  std::int64_t segment_length = 0;
  std::uint32_t segments = 1;
  std::uint32_t groups_per_segment = 1;
  std::uint32_t groups = 0;  // of the whole tensor
  int block = 0;
  Code code = Code::kFp32;
  ScaleType scale = ScaleType::kNone;
  Rounding rounding = Rounding::kNearest;
  bool aligned = false;  // code planes allow one access per vector

  std::uint32_t groups_per_row() const { return segments * groups_per_segment; }
};

inline QuantView view_of(const QuantTensor& tensor) {
  QuantView view;
  view.codes = tensor.codes;
  view.bits = tensor.bits;
  view.scales = tensor.scales;
  view.super = tensor.super;
  view.row = row_bytes(tensor.format, tensor.grid);
  view.row_length = tensor.grid.row_length;
  view.segment_length = tensor.grid.segment_length();
  view.segments = static_cast<std::uint32_t>(tensor.grid.segments);
  view.groups_per_segment =
      static_cast<std::uint32_t>((view.segment_length + kSuperBlock - 1) / kSuperBlock);
  const std::int64_t groups = tensor.rows() * view.segments * view.groups_per_segment;
  check(groups < (std::int64_t{1} << 32),
        "a tensor of {} groups of {} elements is larger than kernels count", groups, kSuperBlock);
  view.groups = static_cast<std::uint32_t>(groups);
  view.block = tensor.format.block;
  view.code = tensor.format.code;
  view.scale = tensor.format.scale;
  view.rounding = tensor.format.rounding;
  const CodeTraits& traits = traits_of(view.code);
  const std::int64_t vector_bytes = traits.exact ? 16 : traits.bits == 8 ? 8 : 4;
  view.aligned = view.segment_length % kVector == 0 &&
                 view.row.codes / view.segments % vector_bytes == 0 &&
                 reinterpret_cast<std::uintptr_t>(view.codes) % 16 == 0;
  return view;
}

/// One group: where its planes start, how many elements it has, and where it stands in the tensor.
struct Group {
  std::uint8_t* codes;
  std::uint8_t* bits;
  std::int64_t bits_stride;  // bytes from one extra bit plane to the next
  std::byte* scales;         // of the group's first block
  Bf16* super;
  std::int64_t row;
  std::int64_t column;  // of the first element, in its row
  int count;
};

__device__ __forceinline__ int extra_bits(Code code) {
  return code == Code::kInt5 ? 1 : code == Code::kInt6 ? 2 : 0;
}
__device__ __forceinline__ int bytes_of(ScaleType scale) {
  return scale == ScaleType::kFp32 ? 4 : scale == ScaleType::kBf16 ? 2 : 1;
}
__device__ __forceinline__ bool is_exact(Code code) { return code <= Code::kFp16; }
__device__ __forceinline__ int exact_bytes(Code code) {
  return code == Code::kFp64 ? 8 : code == Code::kFp32 ? 4 : 2;
}

/// Group `in_row` of row `row`.
__device__ __forceinline__ Group group_of(const QuantView& view, std::int64_t row,
                                          std::uint32_t in_row) {
  const std::uint32_t segment = view.groups_per_segment == 1 ? in_row : in_row / view.groups_per_segment;
  const std::uint32_t in_segment = in_row - segment * view.groups_per_segment;
  Group group;
  group.row = row;
  const std::int64_t begin = std::int64_t{in_segment} * kSuperBlock;
  group.column = segment * view.segment_length + begin;
  const std::int64_t left = view.segment_length - begin;
  group.count = static_cast<int>(left < kSuperBlock ? left : kSuperBlock);
  std::uint8_t* const codes = reinterpret_cast<std::uint8_t*>(view.codes) + row * view.row.codes;
  if (is_exact(view.code)) {
    group.codes = codes + group.column * exact_bytes(view.code);
    group.bits = nullptr, group.bits_stride = 0, group.scales = nullptr, group.super = nullptr;
    return group;
  }
  const bool bytes = view.code >= Code::kInt8;
  group.codes = codes + segment * (view.row.codes / view.segments) + (bytes ? begin : begin / 2);
  const int extra = extra_bits(view.code);
  group.bits_stride = extra == 0 ? 0 : view.row.bits / extra;
  group.bits = reinterpret_cast<std::uint8_t*>(view.bits) + row * view.row.bits +
               segment * (group.bits_stride / view.segments) + begin / 8;
  group.scales = view.scales + row * view.row.scales + segment * (view.row.scales / view.segments) +
                 begin / view.block * bytes_of(view.scale);
  group.super = reinterpret_cast<Bf16*>(view.super + row * view.row.super) +
                segment * view.groups_per_segment + in_segment;
  return group;
}

/// Group `index` of the tensor, counted row by row.
__device__ __forceinline__ Group group_at(const QuantView& view, std::uint32_t index) {
  const std::uint32_t per_row = view.segments * view.groups_per_segment;
  const std::uint32_t row = index / per_row;
  return group_of(view, row, index - row * per_row);
}

/// Elements of the group before the lane's vector `chunk`.
__device__ __forceinline__ int vector_begin(int chunk) {
  return (chunk * kWarp + static_cast<int>(threadIdx.x % kWarp)) * kVector;
}
/// Elements of the group in the lane's vector `chunk`: 8, fewer at the end, 0 behind it.
__device__ __forceinline__ int vector_count(const Group& group, int chunk) {
  const int left = group.count - vector_begin(chunk);
  return left < 0 ? 0 : left < kVector ? left : kVector;
}

/// The lane's elements of row `row` of a tensor whose rows are cut like the group's; zero behind its
/// end.
template <typename Storage>
__device__ __forceinline__ void load_group(const Group& group, const Storage* row, bool aligned,
                                           GroupValues& values) {
  const Storage* const begin = row + group.column;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int count = vector_count(group, chunk);
    const Storage* const from = begin + vector_begin(chunk);
    if (aligned && count == kVector) {
      load_vector(from, values[chunk]);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[chunk][i] = i < count ? load(from[i]) : 0.0f;
    }
  }
}

template <typename Storage>
__device__ __forceinline__ void store_group(const Group& group, Storage* row, bool aligned,
                                            const GroupValues& values) {
  Storage* const begin = row + group.column;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int count = vector_count(group, chunk);
    Storage* const to = begin + vector_begin(chunk);
    if (aligned && count == kVector) {
      store_vector(values[chunk], to);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (i < count) store(values[chunk][i], to[i]);
      }
    }
  }
}

/// What a launch counts, in registers of each lane; added up once per warp at its end.
struct LaneCounts {
  std::uint32_t non_finite = 0, saturated = 0, flushed_blocks = 0;

  /// Adds all lanes' counts to int64 [kQuantCounters]; counters may be null.
  __device__ __forceinline__ void add_to(std::int64_t* counters) const {
    if (counters == nullptr) return;
    const std::uint32_t counts[kQuantCounters] = {non_finite, saturated, flushed_blocks};
#pragma unroll
    for (int i = 0; i < kQuantCounters; ++i) {
      const std::uint32_t total = __reduce_add_sync(kWholeWarp, counts[i]);
      if (total != 0 && threadIdx.x % kWarp == 0) {
        atomicAdd(reinterpret_cast<unsigned long long*>(counters + i), total);
      }
    }
  }
};

namespace group_detail {

/// The largest value over the lanes of a block: `lanes` is a power of two up to 32.
__device__ __forceinline__ float block_max(float value, int lanes) {
  for (int step = 1; step < lanes; step *= 2) {
    value = fmaxf(value, __shfl_xor_sync(kWholeWarp, value, step));
  }
  return value;
}

template <Code code>
__device__ __forceinline__ void decode_vector(const std::uint32_t (&codes)[kVector], float scale,
                                              float (&x)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] = decode<code>(codes[i]) * scale;
}

/// Calls run.operator()<code>() for the quantised code `code`: the list of codes.
template <typename Run>
__device__ __forceinline__ void for_code(Code code, Run run) {
  switch (code) {
    case Code::kNf4: return run.template operator()<Code::kNf4>();
    case Code::kE2m1: return run.template operator()<Code::kE2m1>();
    case Code::kBnbFp4: return run.template operator()<Code::kBnbFp4>();
    case Code::kInt4: return run.template operator()<Code::kInt4>();
    case Code::kInt4FullRange: return run.template operator()<Code::kInt4FullRange>();
    case Code::kInt5: return run.template operator()<Code::kInt5>();
    case Code::kInt6: return run.template operator()<Code::kInt6>();
    case Code::kInt8: return run.template operator()<Code::kInt8>();
    case Code::kE4m3: return run.template operator()<Code::kE4m3>();
    case Code::kE5m2: return run.template operator()<Code::kE5m2>();
    case Code::kDynamic8: return run.template operator()<Code::kDynamic8>();
    default: return run.template operator()<Code::kDynamic8Unsigned>();
  }
}

/// Codes of one vector of y = x / scale, nearest rounding, element i in byte i.
template <Code code>
__device__ __forceinline__ std::uint64_t encode_nearest(const float (&y)[kVector]) {
  std::uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < kVector; ++i) words[i / 4] |= encode<code>(y[i]) << (8 * (i % 4));
  return std::uint64_t{words[1]} << 32 | words[0];
}

/// The same for every code and rounding, kept out of line so that what is rarely used takes no registers
/// of the kernels: elements by value, since registers cannot be passed by address. element: of the first
/// of the eight, for stochastic rounding.
__device__ __noinline__ std::uint64_t encode_any(Code code, bool stochastic, float y0, float y1,
                                                 float y2, float y3, float y4, float y5, float y6,
                                                 float y7, RandomWords key_words,
                                                 std::uint64_t element) {
  const float y[kVector] = {y0, y1, y2, y3, y4, y5, y6, y7};
  std::uint64_t packed = 0;
  for_code(code, [&]<Code kCode>() {
    packed = encode_nearest<kCode>(y);
    if (!stochastic) return;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const std::uint64_t drawn = element + static_cast<std::uint64_t>(i);
      const std::uint32_t bits = random_words(key_words, drawn / 4).word[drawn % 4];
      const float uniform = static_cast<float>(static_cast<std::int32_t>(bits >> 8)) * 0x1p-24f;
      const auto nearest = static_cast<std::uint32_t>(packed >> (8 * i)) & 0xFFu;
      const std::uint64_t chosen = choose_stochastically<kCode>(y[i], nearest, uniform);
      packed = (packed & ~(std::uint64_t{0xFF} << (8 * i))) | chosen << (8 * i);
    }
  });
  return packed;
}

/// Stores the lane's codes of one vector, element i in byte i of `codes`; nibbles and bits behind
/// `count` are zero.
__device__ __forceinline__ void store_codes(const QuantView& view, const Group& group, int begin,
                                            int count, std::uint64_t codes) {
  if (count < kVector) codes &= (std::uint64_t{1} << (8 * count)) - 1;
  if (view.code >= Code::kInt8) {
    std::uint8_t* const to = group.codes + begin;
    if (view.aligned && count == kVector) {
      *reinterpret_cast<std::uint64_t*>(to) = codes;
    } else {
      for (int i = 0; i < count; ++i) to[i] = static_cast<std::uint8_t>(codes >> (8 * i));
    }
    return;
  }
  // Nibbles of each half move together: 0x0d0c0b0a -> 0xdcba.
  std::uint32_t halves[2] = {static_cast<std::uint32_t>(codes), static_cast<std::uint32_t>(codes >> 32)};
#pragma unroll
  for (std::uint32_t& half : halves) {
    half &= 0x0F0F0F0Fu;
    half = (half | half >> 4) & 0x00FF00FFu;
    half = (half | half >> 8) & 0x0000FFFFu;
  }
  const std::uint32_t packed = halves[1] << 16 | halves[0];
  std::uint8_t* const to = group.codes + begin / 2;
  if (view.aligned && count == kVector) {
    *reinterpret_cast<std::uint32_t*>(to) = packed;
  } else {
    for (int i = 0; 2 * i < count; ++i) to[i] = static_cast<std::uint8_t>(packed >> (8 * i));
  }
  for (int bit = 4; bit < 4 + extra_bits(view.code); ++bit) {
    std::uint32_t plane = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      plane |= (static_cast<std::uint32_t>(codes >> (8 * i + bit)) & 1u) << i;
    group.bits[(bit - 4) * group.bits_stride + begin / 8] = static_cast<std::uint8_t>(plane);
  }
}

__device__ __forceinline__ void load_codes(const QuantView& view, const Group& group, int begin,
                                           int count, std::uint32_t (&codes)[kVector]) {
  if (view.code >= Code::kInt8) {
    const std::uint8_t* const from = group.codes + begin;
    if (view.aligned && count == kVector) {
      const uint2 packed = *reinterpret_cast<const uint2*>(from);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        codes[i] = packed.x >> (8 * i) & 0xFFu;
        codes[4 + i] = packed.y >> (8 * i) & 0xFFu;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) codes[i] = i < count ? from[i] : 0u;
    }
    return;
  }
  const std::uint8_t* const from = group.codes + begin / 2;
  std::uint32_t packed = 0;
  if (view.aligned && count == kVector) {
    packed = *reinterpret_cast<const std::uint32_t*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i)
      packed |= (2 * i < count ? std::uint32_t{from[i]} : 0u) << (8 * i);
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) codes[i] = packed >> (4 * i) & 0xFu;
  for (int bit = 4; bit < 4 + extra_bits(view.code); ++bit) {
    const std::uint32_t plane =
        count == 0 ? 0u : std::uint32_t{group.bits[(bit - 4) * group.bits_stride + begin / 8]};
#pragma unroll
    for (int i = 0; i < kVector; ++i) codes[i] |= (plane >> i & 1u) << bit;
  }
}

/// The scale of the block that the lane's vector `begin` belongs to.
__device__ __forceinline__ float load_scale(const QuantView& view, const Group& group, int begin,
                                            float super_scale) {
  const int block = begin / view.block;
  switch (view.scale) {
    case ScaleType::kFp32: return reinterpret_cast<const float*>(group.scales)[block];
    case ScaleType::kBf16: return to_float(reinterpret_cast<const Bf16*>(group.scales)[block]);
    default:
      return decode<Code::kE4m3>(reinterpret_cast<const std::uint8_t*>(group.scales)[block]) *
             super_scale;
  }
}

}  // namespace group_detail

/// values = the lane's elements of the group, of a quantised or an exact tensor; zero behind its end.
__device__ __forceinline__ void decode_group(const QuantView& view, const Group& group,
                                             GroupValues& values) {
  using namespace group_detail;
  if (is_exact(view.code)) {
    // group.codes points at the group's first element: a row that starts `column` before it.
    if (view.code == Code::kBf16) {
      load_group(group, reinterpret_cast<const Bf16*>(group.codes) - group.column, view.aligned, values);
    } else if (view.code == Code::kFp32) {
      load_group(group, reinterpret_cast<const float*>(group.codes) - group.column, view.aligned,
                 values);
    } else {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const auto* const from = reinterpret_cast<const Fp16*>(group.codes) + vector_begin(chunk);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          values[chunk][i] = i < vector_count(group, chunk) ? to_float(from[i]) : 0.0f;
        }
      }
    }
    return;
  }
  const float super_scale = view.scale == ScaleType::kTwoLevel ? to_float(*group.super) : 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int begin = vector_begin(chunk), count = vector_count(group, chunk);
    std::uint32_t codes[kVector];
    load_codes(view, group, begin, count, codes);
    const float scale = count == 0 ? 0.0f : load_scale(view, group, begin, super_scale);
    for_code(view.code, [&]<Code code>() { decode_vector<code>(codes, scale, values[chunk]); });
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (scale == 0.0f || i >= count) values[chunk][i] = 0.0f;
    }
  }
}

/// Quantises the lane's elements into the group; NaN becomes zero, Inf the block's largest value.
/// key_words: mixed_key of the rounding key, read under stochastic rounding only. All lanes of the warp
/// take part.
__device__ __forceinline__ void encode_group(const QuantView& view, const Group& group,
                                             const GroupValues& values, const RandomWords& key_words,
                                             LaneCounts& counts) {
  using namespace group_detail;
  if (is_exact(view.code)) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int count = vector_count(group, chunk);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float x = values[chunk][i];
        const bool finite = fabsf(x) <= FLT_MAX;
        float stored = x;
        if (view.code == Code::kBf16) stored = to_float(to_bf16(x));
        if (view.code == Code::kFp16) stored = to_float(to_fp16(x));
        if (i < count) {
          counts.non_finite += finite ? 0 : 1;
          counts.saturated += finite && !(fabsf(stored) <= FLT_MAX) ? 1 : 0;
        }
      }
    }
    if (view.code == Code::kFp32) {
      store_group(group, reinterpret_cast<float*>(group.codes) - group.column, view.aligned, values);
    } else if (view.code == Code::kBf16) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        auto* const to = reinterpret_cast<Bf16*>(group.codes) + vector_begin(chunk);
        if (view.aligned && vector_count(group, chunk) == kVector) {
          std::uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {  // to_bf16 keeps the payload of NaN, as the CPU does
            words[i] = std::uint32_t{to_bf16(values[chunk][2 * i]).bits} |
                       std::uint32_t{to_bf16(values[chunk][2 * i + 1]).bits} << 16;
          }
          *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            if (i < vector_count(group, chunk)) to[i] = to_bf16(values[chunk][i]);
          }
        }
      }
    } else {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        auto* const to = reinterpret_cast<Fp16*>(group.codes) + vector_begin(chunk);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (i < vector_count(group, chunk)) to[i] = to_fp16(values[chunk][i]);
        }
      }
    }
    return;
  }

  const bool is_unsigned = view.code == Code::kDynamic8Unsigned;
  const int lanes = view.block / kVector;  // of a block
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const float maximum = code_maximum(view.code);
  float absmax[kChunks], scale[kChunks];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float x = values[chunk][i];
      const float magnitude = is_unsigned ? x : fabsf(x);
      const bool finite = fabsf(x) <= FLT_MAX;
      counts.non_finite += finite ? 0 : 1;
      largest = finite && magnitude > largest ? magnitude : largest;
    }
    absmax[chunk] = block_max(largest, lanes);
    scale[chunk] = absmax[chunk] / maximum;
    if (view.code == Code::kInt4FullRange) {
      // The largest element gets code -8, whatever its sign; between +absmax and -absmax the latter.
      float is_lowest = 0.0f;
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        is_lowest = values[chunk][i] == -absmax[chunk] ? 1.0f : is_lowest;
      // Where the block is cut short, zeros behind its end count as elements only if absmax is zero:
      // then the sign of a zero scale is that of the CPU, which compares 0 == -0 as well.
      if (block_max(is_lowest, lanes) == 0.0f) scale[chunk] = -scale[chunk];
    }
  }

  float super_scale = 0.0f;
  Bf16 super{0};
  if (view.scale == ScaleType::kTwoLevel) {
    float largest = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) largest = fmaxf(largest, fabsf(scale[chunk]));
    super = stored_super_scale(warp_max(largest));
    super_scale = to_float(super);
    if (lane == 0) *group.super = super;
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int begin = vector_begin(chunk), count = vector_count(group, chunk);
    const int block = begin / view.block;
    const bool leads = lane % lanes == 0 && count > 0;
    if (view.scale == ScaleType::kTwoLevel) {
      const std::uint8_t stored = stored_block_scale(scale[chunk], super, maximum);
      scale[chunk] = decode<Code::kE4m3>(stored) * super_scale;
      if (leads) reinterpret_cast<std::uint8_t*>(group.scales)[block] = stored;
    } else if (view.scale == ScaleType::kBf16) {
      const Bf16 stored = stored_scale_bf16(scale[chunk], maximum);
      scale[chunk] = to_float(stored);
      if (leads) reinterpret_cast<Bf16*>(group.scales)[block] = stored;
    } else {
      scale[chunk] = stored_scale_fp32(scale[chunk], maximum);
      if (leads) reinterpret_cast<float*>(group.scales)[block] = scale[chunk];
    }
    const bool zero = scale[chunk] == 0.0f;
    if (zero) {
      counts.flushed_blocks += leads && absmax[chunk] > 0.0f ? 1 : 0;
    } else {
      const float limit = kSaturationMargin * (maximum * fabsf(scale[chunk]));
      if (absmax[chunk] > limit) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          counts.saturated +=
              fabsf(values[chunk][i]) > limit && fabsf(values[chunk][i]) <= FLT_MAX ? 1 : 0;
        }
      }
    }
    if (is_unsigned) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        counts.saturated += values[chunk][i] < 0.0f && values[chunk][i] >= -FLT_MAX ? 1 : 0;
      }
    }

    // NaN and what stands in a block whose scale is zero get the code of zero.
    const float r = 1.0f / scale[chunk];
    float y[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float x = values[chunk][i];
      y[i] = zero || x != x ? 0.0f : x * r;
    }
    std::uint64_t codes;
    const bool stochastic = view.rounding == Rounding::kStochastic && !zero;
    if (view.code == Code::kNf4 && !stochastic) {
      codes = encode_nearest<Code::kNf4>(y);
    } else if (view.code == Code::kE4m3 && !stochastic) {
      codes = encode_nearest<Code::kE4m3>(y);
    } else {
      codes =
          encode_any(view.code, stochastic, y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7], key_words,
                     static_cast<std::uint64_t>(group.row * view.row_length + group.column + begin));
    }
    if (count > 0) store_codes(view, group, begin, count, codes);
  }
}

}  // namespace agoq::cuda

// Encodes and decodes groups of a QuantTensor: the device's counterpart of cpu/row_codec.h, with the
// same bytes.
//
// Ownership. A *group* is the elements under one super-block scale: up to kSuperBlock = 1,024
// neighbouring elements of one segment of one row. One warp owns one group. Lane l holds the four
// vectors of eight elements that start at 8 l, 8 (l + 32), 8 (l + 64) and 8 (l + 96) of the group, in
// registers: values[chunk][i] is element 8 (l + 32 chunk) + i. So a block of B = 16..256 elements lies
// in B / 8 neighbouring lanes of one chunk, accesses are coalesced, and a whole group is quantised
// without shared memory. Kernels that fuse arithmetic with quantisation give each warp the same part
// of a row and call the same two functions:
//
//   decode_group(view, group, values)                        any format
//   encode_group(view, group, values, key_words, counts)     any format and rounding
//   decode_group<code>, encode_group<code>                   view.path is `code`: no branches on the
//   code
//
// All lanes of the warp call them together, with the same arguments but for `values`.
//
// Scales. The arithmetic of a block's scale (two to four divisions and a rounding) would cost as much as
// its elements if every lane did it, so each block has one lane that does and hands the result to the
// others by shuffle. The maxima are reduced so that they arrive there: in two steps the four values
// of a lane and its three neighbours become one value per lane, not four in each.
//
// Speed. nf4, e4m3, int8, e2m1, bnbfp4 and the dynamic maps with nearest rounding, and bf16 and fp32,
// have paths of their own; the other formats and stochastic rounding run out of line, through local
// memory.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

#include "backend/cuda/launch.cuh"
#include "core/random.h"
#include "quant/codec.h"
#include "quant/quant_counters.h"
#include "quant/quant_tensor.h"

namespace agoq::cuda {

inline constexpr int kChunks = static_cast<int>(kSuperBlock) / (kWarp * kVector);
using GroupValues = float[kChunks][kVector];

/// In place of a code, where it is known at run time only (fp64 itself exists on the CPU only).
inline constexpr Code kAnyCode = Code::kFp64;
/// The path of fp16 and of all codes and roundings that have none of their own.
inline constexpr Code kSharedPath = Code::kFp16;

/// Whether 8-bit floats are to be converted by quant/codec.h although the GPU has instructions for them:
/// what GPUs before sm_89 do. For tests.
inline bool software_floats_forced() {
  const char* const value = std::getenv("AGOQ_CUDA_SOFTWARE_FP8");
  return value != nullptr && value[0] == '1';
}

/// What kernels need to know of a QuantTensor.
struct QuantView {
  std::byte* codes = nullptr;
  std::byte* bits = nullptr;
  std::byte* scales = nullptr;
  std::byte* super = nullptr;
  RowBytes row;                  // bytes per row of each plane
  RowBytes segment;              // bytes per segment; `bits` of one extra bit plane
  std::int64_t bits_stride = 0;  // bytes from one extra bit plane to the next
  std::int64_t row_length = 0;   // elements
  std::int64_t first_row = 0;    // see QuantTensor: for stochastic rounding
  std::int64_t segment_length = 0;
  std::uint32_t segments = 1;
  std::uint32_t groups_per_segment = 1;
  std::uint32_t groups = 0;  // of the whole tensor
  int block = 0;
  int block_shift = 4;  // log2(block)
  Code code = Code::kFp32;
  Code path = kSharedPath;  // the path that encodes and decodes it
  ScaleType scale = ScaleType::kNone;
  Rounding rounding = Rounding::kNearest;
  bool aligned = false;  // code planes allow one access per vector

  __host__ __device__ std::uint32_t groups_per_row() const { return segments * groups_per_segment; }
};

inline Code path_of(const QuantFormat& format) {
  if (format.rounding == Rounding::kStochastic) return kSharedPath;
  switch (format.code) {
    case Code::kE4m3: return software_floats_forced() ? kSharedPath : Code::kE4m3;
    case Code::kFp32:
    case Code::kBf16:
    case Code::kNf4:
    case Code::kE2m1:
    case Code::kBnbFp4:
    case Code::kInt8:
    case Code::kDynamic8: return format.code;
    default: return kSharedPath;
  }
}

inline QuantView view_of(const QuantTensor& tensor) {
  QuantView view;
  view.codes = tensor.codes;
  view.bits = tensor.bits;
  view.scales = tensor.scales;
  view.super = tensor.super;
  view.row = row_bytes(tensor.format, tensor.grid);
  view.row_length = tensor.grid.row_length;
  view.first_row = tensor.first_row;
  view.segment_length = tensor.grid.segment_length();
  view.segments = static_cast<std::uint32_t>(tensor.grid.segments);
  view.groups_per_segment =
      static_cast<std::uint32_t>((view.segment_length + kSuperBlock - 1) / kSuperBlock);
  const std::int64_t groups = tensor.rows() * view.segments * view.groups_per_segment;
  check(groups < (std::int64_t{1} << 32),
        "a tensor of {} groups of {} elements is larger than kernels count", groups, kSuperBlock);
  view.groups = static_cast<std::uint32_t>(groups);
  view.block = tensor.format.block;
  while ((1 << view.block_shift) < view.block) ++view.block_shift;
  view.code = tensor.format.code;
  view.path = path_of(tensor.format);
  view.scale = tensor.format.scale;
  view.rounding = tensor.format.rounding;
  const CodeTraits& traits = traits_of(view.code);
  const int extra_bits = traits.exact ? 0 : traits.bits % 8 > 4 ? traits.bits - 4 : 0;
  view.bits_stride = extra_bits == 0 ? 0 : view.row.bits / extra_bits;
  view.segment = {view.row.codes / view.segments, view.bits_stride / view.segments,
                  view.row.scales / view.segments, view.row.super / view.segments};
  const std::int64_t vector_bytes = traits.exact ? 16 : traits.bits == 8 ? 8 : 4;
  view.aligned = view.segment_length % kVector == 0 && view.segment.codes % vector_bytes == 0 &&
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
__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x % kWarp); }

/// Group `in_row` of row `row`.
__device__ __forceinline__ Group group_of(const QuantView& view, std::int64_t row,
                                          std::uint32_t in_row) {
  const std::uint32_t segment = view.segments == 1 ? 0 : in_row / view.groups_per_segment;
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
  group.codes = codes + segment * view.segment.codes + (bytes ? begin : begin / 2);
  group.bits_stride = view.bits_stride;
  group.bits = reinterpret_cast<std::uint8_t*>(view.bits) + row * view.row.bits +
               segment * view.segment.bits + begin / 8;
  group.scales = view.scales + row * view.row.scales + segment * view.segment.scales +
                 (begin >> view.block_shift) * bytes_of(view.scale);
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
///
/// The clamp to [0, 8] is kept from the optimiser: of both bounds ptxas 13.0 makes one VIMNMX.RELU and
/// takes `count == 8` from its predicate, which holds for what lies below 0 too, so that lanes behind
/// the end would load and store whole vectors.
__device__ __forceinline__ int vector_count(const Group& group, int chunk) {
  const int begin = vector_begin(chunk);
  const int left = group.count - begin;
  int count = left < kVector ? left : kVector;
  asm("" : "+r"(count));
  return group.count > begin ? count : 0;
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

  __device__ __forceinline__ void operator+=(const LaneCounts& other) {
    non_finite += other.non_finite;
    saturated += other.saturated;
    flushed_blocks += other.flushed_blocks;
  }
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

// --- conversions of 8-bit floats ---

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
inline constexpr bool kHardwareE4m3 = true;
/// The E4M3 codes of two numbers, that of `low` in bits 0..7: nearest even, saturating, as encode does.
__device__ __forceinline__ std::uint32_t encode_e4m3_pair(float low, float high) {
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
__device__ __forceinline__ void decode_e4m3_pair(std::uint32_t codes, float& low, float& high) {
  std::uint32_t halves;  // every E4M3 number is an FP16 number
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<std::uint16_t>(codes)));
  asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(low), "=f"(high)
      : "r"(halves));
}
#else
inline constexpr bool kHardwareE4m3 = false;
__device__ __forceinline__ std::uint32_t encode_e4m3_pair(float low, float high) {
  return encode<Code::kE4m3>(low) | encode<Code::kE4m3>(high) << 8;
}
__device__ __forceinline__ void decode_e4m3_pair(std::uint32_t codes, float& low, float& high) {
  low = decode<Code::kE4m3>(codes & 0xFFu);
  high = decode<Code::kE4m3>(codes >> 8 & 0xFFu);
}
#endif

/// The larger number; NaN where either is one.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

/// Whether `code` has a path for its blocks.
template <Code code>
constexpr bool has_blocks() {
  return code >= Code::kNf4;
}
template <Code code>
inline constexpr bool kIsNibble = code >= Code::kNf4 && code <= Code::kInt4FullRange;

// Tables of 16 entries are kept one entry per lane (lane % 16) and read by shuffle, which takes the lane
// index modulo 32: bits above the fourth of an index do no harm.

template <Code code>
__device__ __forceinline__ float level_of_lane() {
  if constexpr (kIsNibble<code>) {
    return decode<code>(static_cast<std::uint32_t>(lane_index() % 16));
  } else {
    return 0.0f;
  }
}

struct Nf4Midpoints {
  float value[16];
};
template <int... index>
constexpr Nf4Midpoints nf4_midpoints(std::integer_sequence<int, index...>) {
  return {{codec_detail::kNf4Midpoint<index>..., 0x1.fffffep127f}};
}

template <Code code>
__device__ __forceinline__ float midpoint_of_lane() {
  if constexpr (code == Code::kNf4) {
    static constexpr Nf4Midpoints kMidpoints = nf4_midpoints(std::make_integer_sequence<int, 15>());
    return kMidpoints.value[lane_index() % 16];
  } else {
    return 0.0f;
  }
}

/// The codes of one vector: element i in bits 4i.. of `low` for 4-bit codes, else in byte i of low,
/// high.
struct VectorCodes {
  std::uint32_t low = 0, high = 0;
};

/// Low bytes of four words, the first lowest.
__device__ __forceinline__ std::uint32_t pack_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                                    std::uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

/// Two FP16 numbers in a word, that of `low` in the lower half.
__device__ __forceinline__ std::uint32_t half_pair(float low, float high) {
  std::uint32_t halves;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
  return halves;
}
/// a b + c of each half.
__device__ __forceinline__ std::uint32_t half_fma(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t sums;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(b), "r"(c));
  return sums;
}
/// The same, clamped to [0, 1].
__device__ __forceinline__ std::uint32_t saturated_half_fma(std::uint32_t a, std::uint32_t b,
                                                            std::uint32_t c) {
  std::uint32_t sums;
  asm("fma.rn.sat.f16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(b), "r"(c));
  return sums;
}
/// sum += addend where a > b: a comparison and one addition under its predicate.
__device__ __forceinline__ void add_if_greater(float a, float b, std::uint32_t addend,
                                               std::uint32_t& sum) {
  asm("{ .reg .pred greater; setp.gt.f32 greater, %1, %2; @greater add.u32 %0, %0, %3; }"
      : "+r"(sum)
      : "f"(a), "f"(b), "r"(addend));
}

/// Nearest codes of y, which holds no NaN.
///
/// nf4. The levels are quantiles of a normal, so a cubic of y follows the number of the level: rounded
/// to an integer it is the code or one less. One comparison with the midpoint above that level, which
/// lane `number` holds, settles which. The cubic is of s = (y + 1) / 2 clamped to [0, 1] and has no
/// constant term:
///   number = round(s (-4.33 + s (51.75 - 33.1 s)))
/// It is within .15 of the number of each midpoint, and FP16 does: for every FP16 number, the codes of
/// what rounds to it are `number` or one more, and would be if the cubic were off by another .3. Two
/// elements are computed at once.
template <Code code>
__device__ __forceinline__ VectorCodes encode_vector(const float (&y)[kVector], float midpoint) {
  VectorCodes codes;
  if constexpr (code == Code::kNf4) {
    // FP16, twice. Adding kUnit, 1,024, rounds to integers, whose code is then in the lower bits.
    constexpr std::uint32_t kHalf = 0x38003800u, kCubic = 0xD023D023u, kSquare = 0x52785278u,
                            kLinear = 0xC454C454u, kUnit = 0x64006400u;
    std::uint32_t number[kVector / 2];
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      const std::uint32_t s = saturated_half_fma(half_pair(y[2 * i], y[2 * i + 1]), kHalf, kHalf);
      number[i] = half_fma(half_fma(half_fma(kCubic, s, kSquare), s, kLinear), s, kUnit);
    }
    // Byte i of `even` and `odd`: elements 2 i and 2 i + 1.
    const std::uint32_t first = __byte_perm(number[0], number[1], 0x6240),
                        last = __byte_perm(number[2], number[3], 0x6240);
    std::uint32_t even = __byte_perm(first, last, 0x5410), odd = __byte_perm(first, last, 0x7632);
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
      const float above_even = __shfl_sync(kWholeWarp, midpoint, static_cast<int>(number[i]));
      const float above_odd = __shfl_sync(kWholeWarp, midpoint, static_cast<int>(number[i] >> 16));
      add_if_greater(y[2 * i], above_even, 1u << (8 * i), even);
      add_if_greater(y[2 * i + 1], above_odd, 1u << (8 * i), odd);
    }
    codes.low = odd * 16 + even;
  } else if constexpr (kIsNibble<code>) {
#pragma unroll
    for (int i = kVector - 1; i >= 0; --i) codes.low = codes.low * 16 + encode<code>(y[i]);
  } else if constexpr (code == Code::kE4m3) {
    codes.low = encode_e4m3_pair(y[0], y[1]) | encode_e4m3_pair(y[2], y[3]) << 16;
    codes.high = encode_e4m3_pair(y[4], y[5]) | encode_e4m3_pair(y[6], y[7]) << 16;
  } else {
    std::uint32_t code_of[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if constexpr (code == Code::kInt8) {  // the last byte of encode's sum is the code
        code_of[i] = __float_as_uint(fminf(fmaxf(y[i], -127.0f), 127.0f) + 0x1.8p23f);
      } else {
        code_of[i] = encode<code>(y[i]);
      }
    }
    codes.low = pack_bytes(code_of[0], code_of[1], code_of[2], code_of[3]);
    codes.high = pack_bytes(code_of[4], code_of[5], code_of[6], code_of[7]);
  }
  return codes;
}

/// The levels of one vector's codes.
template <Code code>
__device__ __forceinline__ void decode_vector(const VectorCodes& codes, float level,
                                              float (&x)[kVector]) {
  if constexpr (kIsNibble<code>) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      x[i] = __shfl_sync(kWholeWarp, level, static_cast<int>(codes.low >> (4 * i)));
    }
  } else if constexpr (code == Code::kE4m3) {
    decode_e4m3_pair(codes.low, x[0], x[1]);
    decode_e4m3_pair(codes.low >> 16, x[2], x[3]);
    decode_e4m3_pair(codes.high, x[4], x[5]);
    decode_e4m3_pair(codes.high >> 16, x[6], x[7]);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      x[i] = decode<code>((i < 4 ? codes.low : codes.high) >> (8 * (i % 4)) & 0xFFu);
    }
  }
}

// --- codes that are known at run time only ---

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

__device__ __forceinline__ std::uint32_t encode_any(Code code, float y) {
  std::uint32_t bits = 0;
  for_code(code, [&]<Code kCode>() { bits = encode<kCode>(y); });
  return bits;
}
__device__ __forceinline__ float decode_any(Code code, std::uint32_t bits) {
  float level = 0;
  for_code(code, [&]<Code kCode>() { level = decode<kCode>(bits); });
  return level;
}
/// The code that stochastic rounding chooses for y, whose nearest is known. element: its number in the
/// tensor.
__device__ __forceinline__ std::uint32_t choose_any(Code code, float y, std::uint32_t nearest,
                                                    const RandomWords& key_words,
                                                    std::uint64_t element) {
  const RandomWords words = random_words(key_words, element / 4);
  const std::uint32_t position = element % 4;
  const std::uint32_t bits = position < 2    ? position == 0 ? words.word[0] : words.word[1]
                                : position == 2 ? words.word[2]
                                             : words.word[3];
  const float uniform = static_cast<float>(static_cast<std::int32_t>(bits >> 8)) * 0x1p-24f;
  std::uint32_t chosen = 0;
  for_code(code, [&]<Code kCode>() { chosen = choose_stochastically<kCode>(y, nearest, uniform); });
  return chosen;
}

// --- planes ---

__device__ __forceinline__ void store_bytes(std::uint8_t* to, bool aligned, int count,
                                            const VectorCodes& codes) {
  if (aligned && count == kVector) {
    *reinterpret_cast<uint2*>(to) = make_uint2(codes.low, codes.high);
  } else {
    for (int i = 0; i < count; ++i) {
      to[i] = static_cast<std::uint8_t>((i < 4 ? codes.low : codes.high) >> (8 * (i % 4)));
    }
  }
}
/// Nibbles behind `count` become zero.
__device__ __forceinline__ void store_nibbles(std::uint8_t* to, bool aligned, int count,
                                              std::uint32_t nibbles) {
  if (aligned && count == kVector) {
    *reinterpret_cast<std::uint32_t*>(to) = nibbles;
  } else {
    if (count < kVector) nibbles &= (1u << (4 * count)) - 1;
    for (int i = 0; 2 * i < count; ++i) to[i] = static_cast<std::uint8_t>(nibbles >> (8 * i));
  }
}
__device__ __forceinline__ VectorCodes load_bytes(const std::uint8_t* from, bool aligned, int count) {
  VectorCodes codes;
  if (aligned && count == kVector) {
    const uint2 packed = *reinterpret_cast<const uint2*>(from);
    codes = {packed.x, packed.y};
  } else {
    for (int i = 0; i < count; ++i) {
      (i < 4 ? codes.low : codes.high) |= std::uint32_t{from[i]} << (8 * (i % 4));
    }
  }
  return codes;
}
__device__ __forceinline__ std::uint32_t load_nibbles(const std::uint8_t* from, bool aligned,
                                                      int count) {
  if (aligned && count == kVector) return *reinterpret_cast<const std::uint32_t*>(from);
  std::uint32_t nibbles = 0;
  for (int i = 0; 2 * i < count; ++i) nibbles |= std::uint32_t{from[i]} << (8 * i);
  return nibbles;
}

template <Code code>
__device__ __forceinline__ void store_codes(const QuantView& view, const Group& group, int begin,
                                            int count, const VectorCodes& codes) {
  if (count == 0) return;
  if constexpr (kIsNibble<code>) {
    store_nibbles(group.codes + begin / 2, view.aligned, count, codes.low);
  } else {
    store_bytes(group.codes + begin, view.aligned, count, codes);
  }
}
template <Code code>
__device__ __forceinline__ VectorCodes load_codes(const QuantView& view, const Group& group, int begin,
                                                  int count) {
  if constexpr (kIsNibble<code>) {
    return {load_nibbles(group.codes + begin / 2, view.aligned, count), 0};
  } else {
    return load_bytes(group.codes + begin, view.aligned, count);
  }
}

// --- block scales: which lane answers for which block ---
//
// Blocks of 32 elements and more lie in at least four lanes, lanes 4k..4k+3 among them; of these, lane
// 4k + j answers for the block that they are part of in chunk 2 (j & 1) + (j >> 1). (Blocks of more
// than 32 have several such lanes, which compute the same.) A block of 16 lies in lanes 2k, 2k + 1;
// lane 2k + j answers for those of chunks 2j and 2j + 1. So a lane answers for one block or for two.

__device__ __forceinline__ bool answers_for_two(const QuantView& view) { return view.block_shift == 4; }
__device__ __forceinline__ int owned_chunk(const QuantView& view, int which) {
  const int lane = lane_index();
  return 2 * (lane & 1) + (answers_for_two(view) ? which : lane >> 1 & 1);
}
/// The number, in its group, of a block that the lane answers for.
__device__ __forceinline__ int owned_block(const QuantView& view, int which) {
  return (owned_chunk(view, which) * kWarp + lane_index()) * kVector >> view.block_shift;
}
/// Whether this lane, and no other, stores and counts the blocks that it answers for.
__device__ __forceinline__ bool leads(const QuantView& view) {
  return answers_for_two(view) || (lane_index() & ((view.block / kVector) - 1)) < 4;
}

/// What lanes have computed for the blocks that they answer for.
struct OwnedBlocks {
  float value[2];
};
/// The value of the block that the lane's vector `chunk` is part of.
__device__ __forceinline__ float value_of(const QuantView& view, const OwnedBlocks& blocks, int chunk) {
  const int lane = lane_index();
  const int source =
      answers_for_two(view) ? (lane & ~1) | chunk >> 1 : (lane & ~3) | chunk >> 1 | (chunk & 1) << 1;
  const float mine = answers_for_two(view) && (chunk & 1) != 0 ? blocks.value[1] : blocks.value[0];
  return __shfl_sync(kWholeWarp, mine, source);
}

/// The largest of `largest` over the lanes of each block. Numbers, no NaN.
__device__ __forceinline__ OwnedBlocks reduce_max(const QuantView& view,
                                                  const float (&largest)[kChunks]) {
  static_assert(kChunks == 4);
  const int lane = lane_index();
  const bool upper = (lane & 1) != 0;
  OwnedBlocks blocks;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sent = upper ? largest[i] : largest[2 + i];
    const float kept = upper ? largest[2 + i] : largest[i];
    blocks.value[i] = fmaxf(kept, __shfl_xor_sync(kWholeWarp, sent, 1));
  }
  if (answers_for_two(view)) return blocks;
  const bool second = (lane & 2) != 0;
  const float sent = second ? blocks.value[0] : blocks.value[1];
  float value = fmaxf(second ? blocks.value[1] : blocks.value[0], __shfl_xor_sync(kWholeWarp, sent, 2));
  for (int step = 4; step < view.block / kVector; step *= 2) {
    value = fmaxf(value, __shfl_xor_sync(kWholeWarp, value, step));
  }
  return {{value, 0.0f}};
}

/// The stored scale of block `block` of the group.
__device__ __forceinline__ float load_scale(const QuantView& view, const Group& group, int block) {
  switch (view.scale) {
    case ScaleType::kFp32: return reinterpret_cast<const float*>(group.scales)[block];
    case ScaleType::kBf16: return to_float(reinterpret_cast<const Bf16*>(group.scales)[block]);
    default:
      return two_level_scale(reinterpret_cast<const std::uint8_t*>(group.scales)[block], *group.super);
  }
}

__device__ __forceinline__ OwnedBlocks load_scales(const QuantView& view, const Group& group) {
  OwnedBlocks scales{{0.0f, 0.0f}};
  const int first = owned_block(view, 0);
  if (first << view.block_shift < group.count) scales.value[0] = load_scale(view, group, first);
  if (answers_for_two(view)) {
    const int second = owned_block(view, 1);
    if (second << view.block_shift < group.count) scales.value[1] = load_scale(view, group, second);
  }
  return scales;
}

/// The code of zero in every element of a vector, where the block's scale is zero: it decodes to +0.
template <Code code>
__device__ __forceinline__ VectorCodes zero_codes() {
  constexpr std::uint32_t kZero = code == Code::kNf4 ? 7u : code == Code::kDynamic8 ? 127u : 0u;
  constexpr std::uint32_t kWord = kZero * (kIsNibble<code> ? 0x11111111u : 0x01010101u);
  return {kWord, kWord};
}

// --- elements stored as they are ---

/// From this magnitude on, and for NaN, storing as `Element` has something to count.
template <typename Element>
inline constexpr float kFirstOverflow = 0x1.0p127f;
template <>
inline constexpr float kFirstOverflow<Fp16> = 32768.0f;

template <typename Element>
__device__ __forceinline__ Element narrow_exactly(float x) {
  if constexpr (std::is_same_v<Element, Bf16>) return to_bf16(x);
  if constexpr (std::is_same_v<Element, Fp16>) return to_fp16(x);
  if constexpr (std::is_same_v<Element, float>) return x;
}

template <typename Element>
__device__ __forceinline__ void encode_exact(const QuantView& view, const Group& group,
                                             const GroupValues& values, LaneCounts& counts) {
  auto* const row = reinterpret_cast<Element*>(group.codes) - group.column;
  float largest = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest = max_or_nan(largest, fabsf(values[chunk][i]));
  }
  if constexpr (!std::is_same_v<Element, Fp16>) {
    if (largest < kFirstOverflow<Element>) {
      store_group(group, row, view.aligned, values);
      return;
    }
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i >= vector_count(group, chunk)) continue;
      const float x = values[chunk][i];
      const Element stored = narrow_exactly<Element>(x);  // keeps the payload of NaN, as the CPU does
      const bool finite = fabsf(x) <= FLT_MAX;
      counts.non_finite += finite ? 0 : 1;
      counts.saturated += finite && !(fabsf(to_float(stored)) <= FLT_MAX) ? 1 : 0;
      row[group.column + vector_begin(chunk) + i] = stored;
    }
  }
}

template <typename Element>
__device__ __forceinline__ void decode_exact(const QuantView& view, const Group& group,
                                             GroupValues& values) {
  load_group(group, reinterpret_cast<const Element*>(group.codes) - group.column, view.aligned, values);
}

// --- groups ---

/// Counts NaN and Inf and takes the maxima over the other elements.
__device__ __forceinline__ void count_non_finite(const GroupValues& values, bool is_unsigned,
                                                 float (&largest)[kChunks], LaneCounts& counts) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float x = values[chunk][i];
      const bool finite = fabsf(x) <= FLT_MAX;
      counts.non_finite += finite ? 0 : 1;
      most = finite ? fmaxf(most, is_unsigned ? x : fabsf(x)) : most;
    }
    largest[chunk] = most;
  }
}

/// What encoding a group needs to know of its blocks.
struct BlockScales {
  OwnedBlocks scale;       // as stored
  OwnedBlocks reciprocal;  // 1 / scale; 0 where the scale is zero
};

/// Rounds and stores the scales that stand for `scale` (signed) and counts flushed blocks.
__device__ __forceinline__ BlockScales store_scales(const QuantView& view, const Group& group,
                                                    float maximum, OwnedBlocks scale,
                                                    LaneCounts& counts) {
  Bf16 super{0};
  if (view.scale == ScaleType::kTwoLevel) {
    const float largest = fmaxf(fabsf(scale.value[0]), fabsf(scale.value[1]));
    // Numbers that are not negative are ordered like their bits.
    super = stored_super_scale(__uint_as_float(__reduce_max_sync(kWholeWarp, __float_as_uint(largest))));
    if (lane_index() == 0) *group.super = super;
  }
  BlockScales stored{scale, {{0.0f, 0.0f}}};
  const int owned = answers_for_two(view) ? 2 : 1;
#pragma unroll 1
  for (int which = 0; which < owned; ++which) {
    const float exact = which == 0 ? scale.value[0] : scale.value[1];
    const int block = owned_block(view, which);
    const bool stores = leads(view) && block << view.block_shift < group.count;
    float rounded;
    if (view.scale == ScaleType::kTwoLevel) {
      const std::uint8_t code = stored_block_scale(exact, super, maximum);
      rounded = two_level_scale(code, super);
      if (stores) reinterpret_cast<std::uint8_t*>(group.scales)[block] = code;
    } else if (view.scale == ScaleType::kBf16) {
      const Bf16 code = stored_scale_bf16(exact, maximum);
      rounded = to_float(code);
      if (stores) reinterpret_cast<Bf16*>(group.scales)[block] = code;
    } else {
      rounded = stored_scale_fp32(exact, maximum);
      if (stores) reinterpret_cast<float*>(group.scales)[block] = rounded;
    }
    const float reciprocal = rounded == 0.0f ? 0.0f : 1.0f / rounded;
    (which == 0 ? stored.scale.value[0] : stored.scale.value[1]) = rounded;
    (which == 0 ? stored.reciprocal.value[0] : stored.reciprocal.value[1]) = reciprocal;
  }
  return stored;
}

/// Blocks that hold something and whose scale came out as zero; elements above what a block can hold.
__device__ __forceinline__ void count_losses(const QuantView& view, const GroupValues& values,
                                             float maximum, const OwnedBlocks& absmax,
                                             const BlockScales& scales, LaneCounts& counts) {
  OwnedBlocks limit;
  bool exceeds = false;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const float scale = scales.scale.value[which];
    const bool zero = scale == 0.0f;
    const bool counted = leads(view) && (which == 0 || answers_for_two(view));
    counts.flushed_blocks += counted && zero && absmax.value[which] > 0.0f ? 1 : 0;
    // Only in blocks that exceed theirs: a negative element is not part of an unsigned block's absmax.
    const float most = zero ? FLT_MAX : kSaturationMargin * (maximum * fabsf(scale));
    const bool above = absmax.value[which] > most;
    limit.value[which] = above ? most : FLT_MAX;
    exceeds = exceeds || above;
  }
  if (!__any_sync(kWholeWarp, exceeds)) return;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const float most = value_of(view, limit, chunk);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float magnitude = fabsf(values[chunk][i]);
      counts.saturated += magnitude > most && magnitude <= FLT_MAX ? 1 : 0;
    }
  }
}

template <Code code>
__device__ __forceinline__ void encode_blocks(const QuantView& view, const Group& group,
                                              const GroupValues& values, LaneCounts& counts) {
  float largest[kChunks];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    largest[chunk] = fabsf(values[chunk][0]);
#pragma unroll
    for (int i = 1; i < kVector; ++i) {
      largest[chunk] = max_or_nan(largest[chunk], fabsf(values[chunk][i]));
    }
  }
  const float most = max_or_nan(max_or_nan(largest[0], largest[1]), max_or_nan(largest[2], largest[3]));
  const bool finite = __all_sync(kWholeWarp, most <= FLT_MAX);
  if (!finite) count_non_finite(values, false, largest, counts);

  constexpr float maximum = code_maximum(code);
  const OwnedBlocks absmax = reduce_max(view, largest);
  const OwnedBlocks exact{{absmax.value[0] / maximum, absmax.value[1] / maximum}};
  const BlockScales scales = store_scales(view, group, maximum, exact, counts);
  count_losses(view, values, maximum, absmax, scales, counts);

  const float midpoint = midpoint_of_lane<code>();
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const float reciprocal = value_of(view, scales.reciprocal, chunk);
    float y[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) y[i] = values[chunk][i] * reciprocal;
    if (!finite) {  // NaN gets the code of zero
#pragma unroll
      for (int i = 0; i < kVector; ++i) y[i] = values[chunk][i] == values[chunk][i] ? y[i] : 0.0f;
    }
    VectorCodes codes = encode_vector<code>(y, midpoint);
    if (reciprocal == 0.0f) codes = zero_codes<code>();
    store_codes<code>(view, group, vector_begin(chunk), vector_count(group, chunk), codes);
  }
}

/// values = the decoded elements, or values += them.
template <Code code, bool adds = false>
__device__ __forceinline__ void decode_blocks(const QuantView& view, const Group& group,
                                              GroupValues& values) {
  VectorCodes codes[kChunks];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    codes[chunk] = load_codes<code>(view, group, vector_begin(chunk), vector_count(group, chunk));
  }
  const OwnedBlocks scales = load_scales(view, group);
  const float level = level_of_lane<code>();
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const float scale = value_of(view, scales, chunk);
    if (scale == 0.0f) codes[chunk] = zero_codes<code>();  // also behind the end
    float x[kVector];
    decode_vector<code>(codes[chunk], level, x);
    const int count = vector_count(group, chunk);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      x[i] *= scale;
      if (count < kVector) x[i] = i < count ? x[i] : 0.0f;
      values[chunk][i] = adds ? x[i] + values[chunk][i] : x[i];
    }
  }
}

/// Every code and rounding. Out of line, so that what is rarely used takes no registers of the kernels,
/// and element by element, so that it is small.
inline __device__ __noinline__ void encode_rarely_used(const QuantView& view, const Group& group,
                                                       const float* values, const RandomWords& key_words,
                                                       LaneCounts& counts) {
  const GroupValues& x = *reinterpret_cast<const GroupValues*>(values);
  if (view.code == Code::kFp32) return encode_exact<float>(view, group, x, counts);
  if (view.code == Code::kBf16) return encode_exact<Bf16>(view, group, x, counts);
  if (view.code == Code::kFp16) return encode_exact<Fp16>(view, group, x, counts);

  const bool is_unsigned = view.code == Code::kDynamic8Unsigned;
  const float maximum = code_maximum(view.code);
  float largest[kChunks];
  count_non_finite(x, is_unsigned, largest, counts);
  const OwnedBlocks absmax = reduce_max(view, largest);
  OwnedBlocks exact{{absmax.value[0] / maximum, absmax.value[1] / maximum}};
  if (view.code == Code::kInt4FullRange) {
    // The largest element gets code -8, whatever its sign; between +absmax and -absmax the latter. The
    // sign of a zero scale is not stored.
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const float lowest = -value_of(view, absmax, chunk);
      bool found = false;
#pragma unroll
      for (int i = 0; i < kVector; ++i) found = found || x[chunk][i] == lowest;
      const std::uint32_t lanes = __ballot_sync(kWholeWarp, found);
      const int width = view.block / kVector, first = lane_index() & ~(width - 1);
      const bool in_block = (lanes >> first & ((2u << (width - 1)) - 1)) != 0;
      for (int which = 0; which < 2; ++which) {
        if (owned_chunk(view, which) != chunk || in_block) continue;
        if (which == 0) exact.value[0] = -exact.value[0];
        if (which == 1 && answers_for_two(view)) exact.value[1] = -exact.value[1];
      }
    }
  }
  const BlockScales scales = store_scales(view, group, maximum, exact, counts);
  count_losses(view, x, maximum, absmax, scales, counts);

  const bool stochastic = view.rounding == Rounding::kStochastic;
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const float reciprocal = value_of(view, scales.reciprocal, chunk);
    const int begin = vector_begin(chunk), count = vector_count(group, chunk);
    const auto element = static_cast<std::uint64_t>((view.first_row + group.row) * view.row_length +
                                                    group.column + begin);
    VectorCodes bytes;
    std::uint32_t nibbles = 0, fifth = 0, sixth = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const float value = values[chunk * kVector + i];
      if (is_unsigned) counts.saturated += value < 0.0f && value >= -FLT_MAX ? 1 : 0;
      // NaN and what stands in a block whose scale is zero get the code of zero.
      const float y = value == value && reciprocal != 0.0f ? value * reciprocal : 0.0f;
      std::uint32_t code = encode_any(view.code, y);
      if (stochastic && reciprocal != 0.0f) {
        code = choose_any(view.code, y, code, key_words, element + static_cast<std::uint64_t>(i));
      }
      (i < 4 ? bytes.low : bytes.high) |= code << (8 * (i % 4));
      nibbles |= (code & 0xFu) << (4 * i);
      fifth |= (code >> 4 & 1u) << i;
      sixth |= (code >> 5 & 1u) << i;
    }
    if (count == 0) continue;
    if (view.code >= Code::kInt8) {
      store_bytes(group.codes + begin, view.aligned, count, bytes);
      continue;
    }
    store_nibbles(group.codes + begin / 2, view.aligned, count, nibbles);
    if (extra_bits(view.code) > 0) group.bits[begin / 8] = static_cast<std::uint8_t>(fifth);
    if (extra_bits(view.code) > 1) {
      group.bits[group.bits_stride + begin / 8] = static_cast<std::uint8_t>(sixth);
    }
  }
}

inline __device__ __noinline__ void decode_rarely_used(const QuantView& view, const Group& group,
                                                       float* values) {
  GroupValues& x = *reinterpret_cast<GroupValues*>(values);
  if (view.code == Code::kFp32) return decode_exact<float>(view, group, x);
  if (view.code == Code::kBf16) return decode_exact<Bf16>(view, group, x);
  if (view.code == Code::kFp16) {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const auto* const from = reinterpret_cast<const Fp16*>(group.codes) + vector_begin(chunk);
      for (int i = 0; i < kVector; ++i) {
        x[chunk][i] = i < vector_count(group, chunk) ? to_float(from[i]) : 0.0f;
      }
    }
    return;
  }
  const OwnedBlocks scales = load_scales(view, group);
#pragma unroll 1
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const float scale = value_of(view, scales, chunk);
    const int begin = vector_begin(chunk), count = vector_count(group, chunk);
    VectorCodes bytes;
    std::uint32_t nibbles = 0, fifth = 0, sixth = 0;
    if (count > 0) {
      if (view.code >= Code::kInt8) {
        bytes = load_bytes(group.codes + begin, view.aligned, count);
      } else {
        nibbles = load_nibbles(group.codes + begin / 2, view.aligned, count);
        if (extra_bits(view.code) > 0) fifth = group.bits[begin / 8];
        if (extra_bits(view.code) > 1) sixth = group.bits[group.bits_stride + begin / 8];
      }
    }
#pragma unroll 1
    for (int i = 0; i < kVector; ++i) {
      const std::uint32_t code =
          view.code >= Code::kInt8
              ? (i < 4 ? bytes.low : bytes.high) >> (8 * (i % 4)) & 0xFFu
              : (nibbles >> (4 * i) & 0xFu) | (fifth >> i & 1u) << 4 | (sixth >> i & 1u) << 5;
      x[chunk][i] = scale == 0.0f || i >= count ? 0.0f : decode_any(view.code, code) * scale;
    }
  }
}

}  // namespace group_detail

/// values = the lane's elements of the group, of a quantised or an exact tensor; zero behind its end.
/// code: kAnyCode, which branches at run time, or view.path; kSharedPath serves every format.
template <Code code = kAnyCode>
__device__ __forceinline__ void decode_group(const QuantView& view, const Group& group,
                                             GroupValues& values) {
  using namespace group_detail;
  if constexpr (code == Code::kFp32) {
    decode_exact<float>(view, group, values);
  } else if constexpr (code == Code::kBf16) {
    decode_exact<Bf16>(view, group, values);
  } else if constexpr (group_detail::has_blocks<code>()) {
    decode_blocks<code>(view, group, values);
  } else if (code == kAnyCode && view.path == Code::kNf4) {
    decode_blocks<Code::kNf4>(view, group, values);
  } else if (code == kAnyCode && view.path == Code::kE4m3) {
    decode_blocks<Code::kE4m3>(view, group, values);
  } else if (code == kAnyCode && view.path == Code::kBf16) {
    decode_exact<Bf16>(view, group, values);
  } else if (code == kAnyCode && view.path == Code::kFp32) {
    decode_exact<float>(view, group, values);
  } else {
    float decoded[kChunks * kVector];
    decode_rarely_used(view, group, decoded);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[chunk][i] = decoded[chunk * kVector + i];
    }
  }
}

/// values += the lane's elements of the group: fewer registers than decoding first.
template <Code code = kAnyCode>
__device__ __forceinline__ void add_decoded_group(const QuantView& view, const Group& group,
                                                  GroupValues& values) {
  if constexpr (group_detail::has_blocks<code>()) {
    group_detail::decode_blocks<code, true>(view, group, values);
  } else {
    GroupValues decoded;
    decode_group<code>(view, group, decoded);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[chunk][i] = decoded[chunk][i] + values[chunk][i];
    }
  }
}

/// Quantises the lane's elements into the group; NaN becomes zero, Inf the block's largest value. What
/// stands behind the group's end must be +0. key_words: mixed_key of the rounding key, read under
/// stochastic rounding only.
template <Code code = kAnyCode>
__device__ __forceinline__ void encode_group(const QuantView& view, const Group& group,
                                             const GroupValues& values, const RandomWords& key_words,
                                             LaneCounts& counts) {
  using namespace group_detail;
  if constexpr (code == Code::kFp32) {
    encode_exact<float>(view, group, values, counts);
  } else if constexpr (code == Code::kBf16) {
    encode_exact<Bf16>(view, group, values, counts);
  } else if constexpr (group_detail::has_blocks<code>()) {
    encode_blocks<code>(view, group, values, counts);
  } else if (code == kAnyCode && view.path == Code::kNf4) {
    encode_blocks<Code::kNf4>(view, group, values, counts);
  } else if (code == kAnyCode && view.path == Code::kE4m3) {
    encode_blocks<Code::kE4m3>(view, group, values, counts);
  } else if (code == kAnyCode && view.path == Code::kBf16) {
    encode_exact<Bf16>(view, group, values, counts);
  } else if (code == kAnyCode && view.path == Code::kFp32) {
    encode_exact<float>(view, group, values, counts);
  } else {
    float copied[kChunks * kVector];  // registers cannot be passed by address
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) copied[chunk * kVector + i] = values[chunk][i];
    }
    LaneCounts counted;
    encode_rarely_used(view, group, copied, key_words, counted);
    counts += counted;
  }
}

// --- single chunks ---
//
// Kernels over several quantised tensors hold one chunk of each, 256 elements per warp, in place of a
// group: formats whose scales stand for themselves (no two-level ones) are decoded by chunk, those with
// blocks of 256 also encoded.

/// x = the levels of the lane's vector `chunk`, zero behind the group's end; returns the block's scale.
/// Where that is zero the levels are.
template <Code code>
__device__ __forceinline__ float decode_levels(const QuantView& view, const Group& group, int chunk,
                                               float (&x)[kVector]) {
  using namespace group_detail;
  const int begin = vector_begin(chunk), count = vector_count(group, chunk);
  VectorCodes codes = load_codes<code>(view, group, begin, count);
  const float scale = count == 0 ? 0.0f : load_scale(view, group, begin >> view.block_shift);
  if (scale == 0.0f) codes = zero_codes<code>();
  decode_vector<code>(codes, level_of_lane<code>(), x);
  if (count < kVector) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = i < count ? x[i] : 0.0f;
  }
  return scale;
}

/// How kernels that walk planes without groups cut a tensor: each segment into chunks of 256 elements
/// and a shorter last one, whole vectors all. Element i of the tensor is element i of a plane of 8 bits;
/// a block of at most 256 elements lies in one chunk.
struct ChunkCut {
  static constexpr std::uint32_t kElements = kWarp * kVector;

  std::uint32_t segment_length;  // elements
  std::uint32_t chunks, blocks;  // of a segment
  std::uint32_t total_chunks;    // of the tensor
  std::uint32_t per_chunks;      // 2^32 / chunks, rounded down

  /// Where a lane's vector lies; that of lane 0 where it would lie behind the segment's end.
  struct Place {
    std::int64_t element;      // of the vector's first, in the tensor
    std::int64_t block;        // number, in the tensor, of the block that it is part of
    std::uint32_t in_segment;  // of the vector's first element
    bool exists;
  };
  __device__ __forceinline__ Place place(std::uint32_t chunk, int block_shift) const {
    std::uint32_t segment = __umulhi(chunk, per_chunks);  // the quotient, or one less
    std::uint32_t left = chunk - segment * chunks;
    if (left >= chunks) ++segment, left -= chunks;
    std::uint32_t in_segment = left * kElements + threadIdx.x % kWarp * kVector;
    const bool exists = in_segment < segment_length;
    if (!exists) in_segment = left * kElements;
    return {std::int64_t{segment} * segment_length + in_segment,
            std::int64_t{segment} * blocks + (in_segment >> block_shift), in_segment, exists};
  }
};

/// Of a tensor of `count` elements and 8-bit codes; host side. Where segments are whole blocks and the
/// tensor whole chunks, the segments do not matter.
inline ChunkCut chunk_cut(const QuantView& view, std::int64_t count) {
  std::int64_t segment_length = view.segment_length;
  if (segment_length % view.block == 0 && count % ChunkCut::kElements == 0) {
    segment_length = ChunkCut::kElements;
  }
  const std::int64_t chunks = (segment_length + ChunkCut::kElements - 1) / ChunkCut::kElements;
  const std::int64_t total = count / segment_length * chunks;
  check(total < (std::int64_t{1} << 32), "a tensor of {} elements is larger than kernels count", count);
  return {
      static_cast<std::uint32_t>(segment_length), static_cast<std::uint32_t>(chunks),
      static_cast<std::uint32_t>((segment_length + view.block - 1) / view.block),
      static_cast<std::uint32_t>(total),
      static_cast<std::uint32_t>(std::min((std::int64_t{1} << 32) / chunks, std::int64_t{0xFFFFFFFF}))};
}

/// x += the elements of a vector in E4M3 under an FP32 scale.
__device__ __forceinline__ void add_e4m3_vector(uint2 codes, float scale, float (&x)[kVector]) {
  if (scale == 0.0f) codes = make_uint2(0, 0);
  float level[kVector];
  group_detail::decode_vector<Code::kE4m3>({codes.x, codes.y}, 0.0f, level);
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] = level[i] * scale + x[i];
}

/// The largest finite magnitude of a block whose elements are the x of `lanes` neighbouring lanes, a
/// power of two. NaN in x becomes zero; it and Inf are counted. All lanes of the warp take part.
template <int count>
__device__ __forceinline__ float largest_of_block(float (&x)[count], int lanes, LaneCounts& counts) {
  float largest = fabsf(x[0]);
#pragma unroll
  for (int i = 1; i < count; ++i) largest = group_detail::max_or_nan(largest, fabsf(x[i]));
  if (!__all_sync(kWholeWarp, largest <= FLT_MAX)) {
    largest = 0.0f;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const bool finite = fabsf(x[i]) <= FLT_MAX;
      counts.non_finite += finite ? 0 : 1;
      largest = finite ? fmaxf(largest, fabsf(x[i])) : largest;
      x[i] = x[i] == x[i] ? x[i] : 0.0f;
    }
  }
#pragma unroll
  for (int lane = 1; lane < kWarp; lane *= 2) {
    if (lane >= lanes) break;
    largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, lane));
  }
  return largest;
}

/// 1 / x, correctly rounded, for x in [2^-126, 2^126).
__device__ __forceinline__ float plain_reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return fmaf(fmaf(-x, reciprocal, 1.0f), reciprocal, reciprocal);
}

/// x / 448 for x >= 0, correctly rounded; where that is subnormal, which no stored scale is, nearly so.
__device__ __forceinline__ float divided_by_e4m3_maximum(float x) {
  constexpr float kMaximum = code_maximum(Code::kE4m3), kReciprocal = 1.0f / kMaximum;
  const float quotient = x * kReciprocal;
  return fmaf(fmaf(-kMaximum, quotient, x), kReciprocal, quotient);
}

/// As they are stored: uint2 for a vector, uint4 for a unit.
template <int count>
using E4m3Codes = std::conditional_t<count == kVector, uint2, uint4>;

/// The E4M3 codes of x and the FP32 scale of its block, which lies in `lanes` neighbouring lanes, a
/// power of two; nearest rounding. NaN becomes zero, Inf the block's largest value. All lanes of the
/// warp take part.
template <int count>
__device__ __forceinline__ E4m3Codes<count> encode_e4m3(float (&x)[count], int lanes, float& scale,
                                                        LaneCounts& counts) {
  const float largest = largest_of_block(x, lanes, counts);
  scale = stored_scale_fp32(divided_by_e4m3_maximum(largest), code_maximum(Code::kE4m3));
  const float reciprocal = plain_reciprocal(scale);
  // Nothing to count as saturated: an FP32 scale is too near to absmax / maximum for that.
  E4m3Codes<count> codes;
  std::uint32_t* const words = &codes.x;
#pragma unroll
  for (int i = 0; i < count; i += 4) {
    words[i / 4] = group_detail::encode_e4m3_pair(x[i] * reciprocal, x[i + 1] * reciprocal) |
                   group_detail::encode_e4m3_pair(x[i + 2] * reciprocal, x[i + 3] * reciprocal) << 16;
  }
  if (scale == 0.0f) {
    codes = {};
    counts.flushed_blocks += largest > 0.0f && (lane_index() & (lanes - 1)) == 0 ? 1 : 0;
  }
  return codes;
}

// Units: sixteen neighbouring elements in E4M3 under FP32 scales, in a lane. Where segments are whole
// blocks, planes have no gaps: unit u is elements [16 u, 16 u + 16) of the code plane and lies in block
// 16 u / block.

inline constexpr int kUnit = 2 * kVector;

inline bool has_flat_units(const QuantView& view) {
  return view.path == Code::kE4m3 && view.scale == ScaleType::kFp32 && view.aligned &&
         view.segment_length % view.block == 0;
}

/// x = or += a unit's elements.
template <bool adds>
__device__ __forceinline__ void decode_e4m3_unit(uint4 codes, float scale, float (&x)[kUnit]) {
  if (scale == 0.0f) codes = make_uint4(0, 0, 0, 0);  // a block whose scale is zero is zeros
  float low[kVector], high[kVector];
  group_detail::decode_vector<Code::kE4m3>({codes.x, codes.y}, 0.0f, low);
  group_detail::decode_vector<Code::kE4m3>({codes.z, codes.w}, 0.0f, high);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float of_low = low[i] * scale, of_high = high[i] * scale;
    x[i] = adds ? x[i] + of_low : of_low;
    x[kVector + i] = adds ? x[kVector + i] + of_high : of_high;
  }
}

}  // namespace agoq::cuda

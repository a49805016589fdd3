// Pieces of a group (group_codec.cuh) for kernels that compute on it: one lane's vector of eight at a
// time, and vectors kept as they lie in memory, so that what is loaded early and used late takes half
// the registers in BF16.
#pragma once

#include <type_traits>

#include "backend/cuda/group_codec.cuh"

namespace agoq::cuda {

/// Kernels that fuse arithmetic with the codec exist for the formats of activations and, in FP32, for
/// the default one; every other combination takes the plain composition. Calls run.operator()<code>()
/// for the path of `view` (group_codec.cuh) and says whether there is one.
template <typename Storage, typename Run>
bool for_fused_path(const QuantView& view, Run run) {
  if constexpr (std::is_same_v<Storage, Bf16>) {
    switch (view.path) {
      case Code::kBf16: return run.template operator()<Code::kBf16>(), true;
      case Code::kNf4: return run.template operator()<Code::kNf4>(), true;
      case Code::kE2m1: return run.template operator()<Code::kE2m1>(), true;
      case Code::kBnbFp4: return run.template operator()<Code::kBnbFp4>(), true;
      case Code::kInt8: return run.template operator()<Code::kInt8>(), true;
      default: return false;
    }
  } else {
    switch (view.path) {
      case Code::kFp32: return run.template operator()<Code::kFp32>(), true;
      case Code::kNf4: return run.template operator()<Code::kNf4>(), true;
      default: return false;
    }
  }
}
struct DoNothing {
  template <Code code>
  void operator()() const {}
};
inline bool has_fused_path(std::string_view operation, ElementType type, const QuantView& view) {
  bool has = false;
  for_storage(operation, type,
              [&]<typename Storage>() { has = for_fused_path<Storage>(view, DoNothing()); });
  return has;
}

// --- whole blocks of the default format ---
//
// Kernels have an instance of their own for aligned nf4/32/two-level tensors whose blocks are all whole,
// which those of models are: a lane's vector is part of the group or is not, and nothing about the
// format is asked.

/// Whether all blocks of the packed operand are whole: of a group, the first count / 8 vectors exist.
inline bool has_whole_nf4_blocks(const QuantView& view) {
  return view.path == Code::kNf4 && view.block == 32 && view.scale == ScaleType::kTwoLevel &&
         view.aligned && view.segment_length % 32 == 0;
}
/// Whether all its groups are: kernels that know this take kSuperBlock for a group's count.
inline bool has_whole_nf4_groups(const QuantView& view) {
  return has_whole_nf4_blocks(view) && view.segment_length % kSuperBlock == 0;
}
/// The view with what such an instance knows as constants, so that branches on it vanish.
__device__ __forceinline__ QuantView with_known_layout(QuantView view) {
  view.code = view.path = Code::kNf4;
  view.block = 32, view.block_shift = 5;
  view.scale = ScaleType::kTwoLevel;
  view.rounding = Rounding::kNearest;
  view.aligned = true;
  return view;
}

/// Whether the lane's vector `chunk` is part of a group of whole blocks.
__device__ __forceinline__ bool holds(const Group& group, int chunk) {
  return vector_begin(chunk) < group.count;
}
/// Whether any lane's is. Every lane of the warp gets the same answer.
__device__ __forceinline__ bool any_holds(const Group& group, int chunk) {
  return chunk * kWarp * kVector < group.count;
}

/// A lane's share of such a group as it is stored; lane l holds the scale of block l. All lanes of the
/// warp call the members together.
struct WholeNf4Group {
  std::uint32_t codes[kChunks];
  float scale;

  __device__ __forceinline__ void load(const Group& group) {
    const auto* const words = reinterpret_cast<const std::uint32_t*>(group.codes);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      codes[chunk] = holds(group, chunk) ? words[chunk * kWarp + lane_index()] : 0;
    }
    const bool has_block = lane_index() * 32 < group.count;
    scale = two_level_scale(
        has_block ? reinterpret_cast<const std::uint8_t*>(group.scales)[lane_index()] : std::uint8_t{0},
        *group.super);
  }
  /// level: group_detail::level_of_lane<Code::kNf4>().
  __device__ __forceinline__ void decode(int chunk, float level, float (&x)[kVector]) const {
    constexpr int kBlocksPerChunk = kWarp * kVector / 32, kLanesPerBlock = 32 / kVector;
    const float of_block =
        __shfl_sync(kWholeWarp, scale, chunk * kBlocksPerChunk + lane_index() / kLanesPerBlock);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      x[i] = __shfl_sync(kWholeWarp, level, static_cast<int>(codes[chunk] >> (4 * i))) * of_block;
    }
  }
};

/// Whether all of the lane's vector `chunk` is part of the group. Asking vector_count(...) == kVector
/// is not the same to ptxas 13.0 for sm_90: it takes the comparison from the predicate of the clamping
/// instruction (VIMNMX.RELU), which also holds for a vector that begins where the group ends.
__device__ __forceinline__ bool is_whole(const Group& group, int chunk) {
  return group.count - kVector >= vector_begin(chunk);
}

/// Eight elements as they lie in memory.
template <typename Storage>
struct PackedVector;
template <>
struct PackedVector<Bf16> {
  std::uint32_t words[kVector / 2];  // element 2i in the low half of word i
};
template <>
struct PackedVector<float> {
  float elements[kVector];
};
/// One lane's share of a group.
template <typename Storage>
using PackedGroup = PackedVector<Storage>[kChunks];

__device__ __forceinline__ void load_packed(const Bf16* from, PackedVector<Bf16>& to) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  to.words[0] = bits.x, to.words[1] = bits.y, to.words[2] = bits.z, to.words[3] = bits.w;
}
__device__ __forceinline__ void load_packed(const float* from, PackedVector<float>& to) {
  load_vector(from, to.elements);
}
/// The first `count` elements, zeros behind them.
__device__ __forceinline__ void load_packed(const Bf16* from, int count, PackedVector<Bf16>& to) {
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const std::uint32_t low = 2 * i < count ? from[2 * i].bits : 0u;
    const std::uint32_t high = 2 * i + 1 < count ? from[2 * i + 1].bits : 0u;
    to.words[i] = low | high << 16;
  }
}
__device__ __forceinline__ void load_packed(const float* from, int count, PackedVector<float>& to) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) to.elements[i] = i < count ? from[i] : 0.0f;
}
__device__ __forceinline__ void widen(const PackedVector<Bf16>& from, float (&to)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    to[2 * i] = __uint_as_float(from.words[i] << 16);
    to[2 * i + 1] = __uint_as_float(from.words[i] & 0xFFFF0000u);
  }
}
__device__ __forceinline__ void widen(const PackedVector<float>& from, float (&to)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) to[i] = from.elements[i];
}

__device__ __forceinline__ void pack(const float (&from)[kVector], PackedVector<Bf16>& to) {
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(to.words[i]) : "f"(from[2 * i + 1]), "f"(from[2 * i]));
  }
}
__device__ __forceinline__ void pack(const float (&from)[kVector], PackedVector<float>& to) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) to.elements[i] = from[i];
}
__device__ __forceinline__ void store_packed(const PackedVector<Bf16>& from, Bf16* to) {
  *reinterpret_cast<uint4*>(to) = make_uint4(from.words[0], from.words[1], from.words[2], from.words[3]);
}
__device__ __forceinline__ void store_packed(const PackedVector<float>& from, float* to) {
  store_vector(from.elements, to);
}
__device__ __forceinline__ void store_packed(const PackedVector<Bf16>& from, int count, Bf16* to) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < count) to[i].bits = static_cast<std::uint16_t>(from.words[i / 2] >> (16 * (i % 2)));
  }
}
__device__ __forceinline__ void store_packed(const PackedVector<float>& from, int count, float* to) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i < count) to[i] = from.elements[i];
  }
}

/// The lane's elements of row `row`, as load_group reads them. All loads are issued before any is used.
template <typename Storage>
__device__ __forceinline__ void load_packed_group(const Group& group, const Storage* row, bool aligned,
                                                  PackedGroup<Storage>& to) {
  const Storage* const begin = row + group.column;
  if (aligned && group.count == kSuperBlock) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) load_packed(begin + vector_begin(chunk), to[chunk]);
    return;
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int count = vector_count(group, chunk);
    const Storage* const from = begin + vector_begin(chunk);
    if (aligned && is_whole(group, chunk)) {
      load_packed(from, to[chunk]);
    } else {
      load_packed(from, count, to[chunk]);
    }
  }
}

/// The largest magnitude of eight BF16 elements; NaN where one is.
__device__ __forceinline__ float largest_of(const PackedVector<Bf16>& packed) {
  std::uint32_t most = packed.words[0];
#pragma unroll
  for (int i = 1; i < kVector / 2; ++i) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
    asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(most) : "r"(packed.words[i]));
#else
    asm("max.NaN.bf16x2 %0, %1, %2;"
        : "=r"(most)
        : "r"(most & 0x7FFF7FFFu), "r"(packed.words[i] & 0x7FFF7FFFu));
#endif
  }
  return group_detail::max_or_nan(fabsf(__uint_as_float(most << 16)),
                                  fabsf(__uint_as_float(most & 0xFFFF0000u)));
}

/// Quantises what is not plain: NaN, Inf, and blocks far below the group's largest. Out of line, since
/// it is rare.
inline __device__ __noinline__ LaneCounts encode_nf4_group_with_care(QuantView view, Group group,
                                                                     const Bf16* row) {
  LaneCounts counts;
  GroupValues values;
  load_group(group, row, true, values);
  group_detail::encode_blocks<Code::kNf4>(with_known_layout(view), group, values, counts);
  return counts;
}

/// Quantises the group's part of row `row` where has_whole_nf4_blocks; the same bytes and counts as
/// encode_group. view: with_known_layout. midpoint: group_detail::midpoint_of_lane<Code::kNf4>().
///
/// A group is plain if all is finite and each block is zero or has a scale that is neither flushed nor
/// so coarse that something saturates: then nothing is counted.
__device__ __forceinline__ void encode_whole_nf4_group(const QuantView& view, const Group& group,
                                                       const Bf16* row, float midpoint,
                                                       LaneCounts& counts) {
  using namespace group_detail;
  PackedGroup<Bf16> x;
  float largest[kChunks];
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    x[chunk] = {};
    if (holds(group, chunk)) load_packed(row + group.column + vector_begin(chunk), x[chunk]);
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) largest[chunk] = largest_of(x[chunk]);
  const bool finite =
      max_or_nan(max_or_nan(largest[0], largest[1]), max_or_nan(largest[2], largest[3])) <= FLT_MAX;
  const float absmax = reduce_max(view, largest).value[0];  // of the block that the lane answers for
  // Numbers that are not negative are ordered like their bits.
  const Bf16 super =
      stored_super_scale(__uint_as_float(__reduce_max_sync(kWholeWarp, __float_as_uint(absmax))));
  const float super_scale = to_float(super);
  const std::uint32_t code = encode_e4m3_pair(absmax * (1.0f / super_scale), 0.0f) & 0xFFu;
  float scale, unused;
  decode_e4m3_pair(code, scale, unused);
  scale *= super_scale;
  const bool plain = finite && (absmax == 0.0f || (scale >= kSmallestScale && scale <= FLT_MAX &&
                                                   absmax <= kSaturationMargin * scale));
  if (!__all_sync(kWholeWarp, plain && super.bits != 0)) {
    const LaneCounts counted = encode_nf4_group_with_care(view, group, row);
    counts.non_finite += counted.non_finite;
    counts.saturated += counted.saturated;
    counts.flushed_blocks += counted.flushed_blocks;
    return;
  }
  const int block = owned_block(view, 0);
  if (block * 32 < group.count) {
    reinterpret_cast<std::uint8_t*>(group.scales)[block] = static_cast<std::uint8_t>(code);
  }
  if (lane_index() == 0) *group.super = super;
  // A block of zeros has scale 0: 0 times 0 gets the code of zero.
  const OwnedBlocks reciprocals{{scale == 0.0f ? 0.0f : 1.0f / scale, 0.0f}};
  auto* const words = reinterpret_cast<std::uint32_t*>(group.codes);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (!any_holds(group, chunk)) break;
    const float reciprocal = value_of(view, reciprocals, chunk);
    float y[kVector];
    widen(x[chunk], y);
#pragma unroll
    for (int i = 0; i < kVector; ++i) y[i] *= reciprocal;
    const VectorCodes codes = encode_vector<Code::kNf4>(y, midpoint);
    if (holds(group, chunk)) words[chunk * kWarp + lane_index()] = codes.low;
  }
}

/// Vector `chunk` of the lane's elements of row `row`; zeros behind the group's end.
template <typename Storage>
__device__ __forceinline__ void load_part(const Group& group, const Storage* row, bool aligned,
                                          int chunk, float (&to)[kVector]) {
  const int count = vector_count(group, chunk);
  const Storage* const from = row + group.column + vector_begin(chunk);
  if (aligned && is_whole(group, chunk)) {
    load_vector(from, to);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = i < count ? load(from[i]) : 0.0f;
  }
}
template <typename Storage>
__device__ __forceinline__ void store_packed_part(const Group& group, Storage* row, bool aligned,
                                                  int chunk, const PackedVector<Storage>& from) {
  const int count = vector_count(group, chunk);
  Storage* const to = row + group.column + vector_begin(chunk);
  if (aligned && is_whole(group, chunk)) {
    store_packed(from, to);
  } else {
    store_packed(from, count, to);
  }
}
template <typename Storage>
__device__ __forceinline__ void store_part(const Group& group, Storage* row, bool aligned, int chunk,
                                           const float (&from)[kVector]) {
  const int count = vector_count(group, chunk);
  Storage* const to = row + group.column + vector_begin(chunk);
  if (aligned && is_whole(group, chunk)) {
    store_vector(from, to);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i < count) store(from[i], to[i]);
    }
  }
}

}  // namespace agoq::cuda

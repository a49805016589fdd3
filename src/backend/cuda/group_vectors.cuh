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

/// How a tensor of whole nf4 blocks (has_whole_nf4_blocks) is cut into groups. Its planes have no gaps:
/// with the number of a group and of its first element, in the tensor, goes where its codes and scales
/// lie.
struct WholeGroups {
  std::int64_t segment_length;
  std::uint32_t per_segment;  // groups
  std::uint32_t reciprocal;   // 2^32 / per_segment, rounded down
  std::uint32_t count;        // groups of the tensor

  struct Place {
    std::uint32_t group;
    std::int64_t element;
    int count;
  };
  __device__ __forceinline__ Place place(std::uint32_t group) const {
    std::uint32_t segment = __umulhi(group, reciprocal);  // the quotient, or one less
    std::uint32_t left = group - segment * per_segment;
    if (left >= per_segment) ++segment, left -= per_segment;
    const std::int64_t begin = std::int64_t{left} * kSuperBlock;
    const std::int64_t behind = segment_length - begin;
    return {group, segment * segment_length + begin,
            static_cast<int>(behind < kSuperBlock ? behind : kSuperBlock)};
  }
};
/// 2^32 / divisor, rounded down, as far as it fits: what a division by a multiplication needs.
inline std::uint32_t reciprocal_of(std::uint32_t divisor) {
  return static_cast<std::uint32_t>(
      std::min((std::uint64_t{1} << 32) / divisor, std::uint64_t{0xFFFFFFFF}));
}
/// Where all groups are whole, segments do not matter.
inline WholeGroups whole_groups(const QuantView& view) {
  const bool all = view.segment_length % kSuperBlock == 0;
  const std::uint32_t per_segment = all ? 1 : view.groups_per_segment;
  return {all ? kSuperBlock : view.segment_length, per_segment, reciprocal_of(per_segment), view.groups};
}

/// A lane's share of such a group as it is stored; lane l holds the scale of block l. All lanes of the
/// warp call the members together.
struct WholeNf4Group {
  std::uint32_t codes[kChunks];
  std::uint8_t block_scale;
  Bf16 super;
  float scale;  // of both, once resolve is called: then all that is loaded must have come

  __device__ __forceinline__ void load(const Group& group) {
    const auto* const words = reinterpret_cast<const std::uint32_t*>(group.codes);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      codes[chunk] = holds(group, chunk) ? words[chunk * kWarp + lane_index()] : 0;
    }
    const bool has_block = lane_index() * 32 < group.count;
    block_scale =
        has_block ? reinterpret_cast<const std::uint8_t*>(group.scales)[lane_index()] : std::uint8_t{0};
    super = *group.super;
    resolve();
  }
  /// By the group's place in a tensor of whole blocks. Without resolve.
  __device__ __forceinline__ void load(const QuantView& view, const WholeGroups::Place& place) {
    const auto* const words = reinterpret_cast<const std::uint32_t*>(view.codes) + (place.element >> 3);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const bool held = (chunk * kWarp + lane_index()) * kVector < place.count;
      codes[chunk] = held ? words[chunk * kWarp + lane_index()] : 0;
    }
    const auto* const scales = reinterpret_cast<const std::uint8_t*>(view.scales) + (place.element >> 5);
    block_scale = lane_index() * 32 < place.count ? scales[lane_index()] : std::uint8_t{0};
    super = reinterpret_cast<const Bf16*>(view.super)[place.group];
  }
  /// Of a whole group, where all are: `element` is its first. Without resolve.
  __device__ __forceinline__ void load(const QuantView& view, std::int64_t element) {
    const auto* const words = reinterpret_cast<const std::uint32_t*>(view.codes) + (element >> 3);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) codes[chunk] = words[chunk * kWarp + lane_index()];
    block_scale = reinterpret_cast<const std::uint8_t*>(view.scales)[(element >> 5) + lane_index()];
    super = reinterpret_cast<const Bf16*>(view.super)[element / kSuperBlock];
  }
  __device__ __forceinline__ void resolve() { scale = two_level_scale(block_scale, super); }
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
__device__ __forceinline__ PackedVector<Bf16> packed_of(uint4 bits) {
  return {{bits.x, bits.y, bits.z, bits.w}};
}
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

/// The larger magnitudes of two pairs of BF16 numbers, with signs of no account; NaN where one is.
__device__ __forceinline__ std::uint32_t larger_magnitudes(std::uint32_t a, std::uint32_t b) {
  std::uint32_t larger;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
#else
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a & 0x7FFF7FFFu), "r"(b & 0x7FFF7FFFu));
#endif
  return larger;
}

/// Quantises what is not plain: NaN, Inf, zeros, and blocks far below the group's largest. Out of line,
/// since it is rare.
inline __device__ __noinline__ LaneCounts encode_nf4_group_with_care(Group group, const Bf16* source) {
  LaneCounts counts;
  GroupValues values;
  load_group(group, source, true, values);
  group_detail::encode_blocks<Code::kNf4>(with_known_layout({}), group, values, counts);
  return counts;
}

/// Encodes groups of a tensor of whole nf4 blocks from BF16 elements: the same bytes and counts as
/// encode_group, in about half the instructions.
///
/// A group is plain if all is finite and not all zero, and each block is zero or has a scale that is
/// neither flushed nor so coarse that something saturates: then nothing is counted. Any other group goes
/// through encode_group's path.
class WholeNf4Encoder {
 public:
  __device__ __forceinline__ explicit WholeNf4Encoder(const QuantView& view)
      : codes_(reinterpret_cast<std::uint32_t*>(view.codes) + lane_index()),
        scales_(reinterpret_cast<std::uint8_t*>(view.scales)),
        super_(reinterpret_cast<Bf16*>(view.super)),
        midpoint_(group_detail::midpoint_of_lane<Code::kNf4>()),
        block_(group_detail::owned_block(with_known_layout({}), 0)) {}

  /// x: the lane's elements of the group, zeros behind its end; `source`: where it lies in memory.
  __device__ __forceinline__ void encode(const PackedGroup<Bf16>& x, const WholeGroups::Place& place,
                                         const Bf16* source, LaneCounts& counts) const {
    const float absmax = absmax_of_block(x);
    // Numbers that are not negative are ordered like their bits, and NaN is above them.
    const float largest = __uint_as_float(__reduce_max_sync(kWholeWarp, __float_as_uint(absmax)));
    // stored_super_scale of a BF16 number: largest / 448, rounded up to BF16. The factor is 1 / 448 less
    // 2^-21 of it, which matters only where the quotient is a BF16 number, and then is rounded up again.
    const std::uint32_t super_bits = (__float_as_uint(largest * 0x1.24924p-9f) + 0xFFFFu) & 0xFFFF0000u;
    const float super = __uint_as_float(super_bits);
    const std::uint32_t code =
        group_detail::encode_e4m3_pair(absmax * plain_reciprocal(super), 0.0f) & 0xFFu;
    float scale, unused;
    group_detail::decode_e4m3_pair(code, scale, unused);
    scale *= super;
    const bool plain =
        super >= kSmallestScale && super <= 0x1p100f &&
        (absmax == 0.0f || (scale >= kSmallestScale && absmax <= kSaturationMargin * scale));
    if (!__all_sync(kWholeWarp, plain)) {
      Group group{};
      group.codes = reinterpret_cast<std::uint8_t*>(codes_ - lane_index()) + (place.element >> 1);
      group.scales = reinterpret_cast<std::byte*>(scales_) + (place.element >> 5);
      group.super = super_ + place.group;
      group.count = place.count;
      counts += encode_nf4_group_with_care(group, source);
      return;
    }
    if (block_ * 32 < place.count) {
      scales_[(place.element >> 5) + block_] = static_cast<std::uint8_t>(code);
    }
    if (lane_index() == 0) super_[place.group] = {static_cast<std::uint16_t>(super_bits >> 16)};
    // A block of zeros has scale 0: 0 times 0 gets the code of zero.
    const float reciprocal = scale == 0.0f ? 0.0f : plain_reciprocal(scale);
    std::uint32_t* const words = codes_ + (place.element >> 3);
    const int begin = lane_index() * kVector;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (chunk * kWarp * kVector >= place.count) break;  // the whole warp
      // The lane of the block's four that answers for it in this chunk: see group_codec.cuh.
      const float of_block =
          __shfl_sync(kWholeWarp, reciprocal, (lane_index() & ~3) | chunk >> 1 | (chunk & 1) << 1);
      float y[kVector];
      widen(x[chunk], y);
#pragma unroll
      for (int i = 0; i < kVector; ++i) y[i] *= of_block;
      const group_detail::VectorCodes encoded = group_detail::encode_vector<Code::kNf4>(y, midpoint_);
      if (chunk * kWarp * kVector + begin < place.count) words[chunk * kWarp] = encoded.low;
    }
  }

 private:
  /// The largest magnitude of the block that the lane answers for, NaN where it holds one: reduce_max of
  /// pairs.
  __device__ __forceinline__ static float absmax_of_block(const PackedGroup<Bf16>& x) {
    std::uint32_t largest[kChunks];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      largest[chunk] = larger_magnitudes(larger_magnitudes(x[chunk].words[0], x[chunk].words[1]),
                                         larger_magnitudes(x[chunk].words[2], x[chunk].words[3]));
    }
    const bool upper = (lane_index() & 1) != 0, second = (lane_index() & 2) != 0;
    std::uint32_t of_two[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t sent = upper ? largest[i] : largest[2 + i];
      const std::uint32_t kept = upper ? largest[2 + i] : largest[i];
      of_two[i] = larger_magnitudes(kept, __shfl_xor_sync(kWholeWarp, sent, 1));
    }
    const std::uint32_t sent = second ? of_two[0] : of_two[1], kept = second ? of_two[1] : of_two[0];
    const std::uint32_t pair =
        larger_magnitudes(kept, __shfl_xor_sync(kWholeWarp, sent, 2)) & 0x7FFF7FFFu;
    return __uint_as_float(max(pair << 16, pair & 0xFFFF0000u));
  }

  std::uint32_t* codes_;  // the lane's word of the first chunk
  std::uint8_t* scales_;
  Bf16* super_;
  float midpoint_;
  int block_;  // of a group, that the lane answers for
};

/// The lane's elements of a group that begins at `from`; zeros behind its end.
__device__ __forceinline__ void load_whole_group(const Bf16* from, int count, PackedGroup<Bf16>& to) {
  const int begin = lane_index() * kVector;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    to[chunk] = {};
    if (chunk * kWarp * kVector + begin < count) {
      load_packed(from + begin + chunk * kWarp * kVector, to[chunk]);
    }
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

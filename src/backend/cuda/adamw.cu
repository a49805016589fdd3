// One AdamW step with decoupled decay (Loshchilov & Hutter, 2019) in one pass:
//
//   g = gradient_scale * decode(gradient)
//   m = m + (1 - beta1) (g - m)                v = beta2 v + (1 - beta2) g^2
//   p = (1 - lr decay) p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
//
// A warp owns one chunk of 256 elements of a segment, a lane eight of them: of the gradient, both
// moments and the weight at once. That is one block of moments in dynamic8/256/fp32, the format of 8-bit
// moments, so a block is quantised as soon as it is updated. Where the formats are those of training,
// planes are walked without groups (group_codec.cuh), short last blocks of several segments are done
// side by side, and the gradient may come in pieces of several ranks, which are added in registers. Any
// other combination of formats goes group by group through local memory.
//
// The operations, their order and their rounding are the CPU's (no contraction, IEEE division and
// square root): every byte that is written is the CPU backend's.
#include <cmath>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/group_codec.cuh"
#include "backend/cuda/piece_planes.cuh"
#include "backend/operand_checks.h"
#include "core/master_weight.h"

namespace agoq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksPerMultiprocessor = 12;
constexpr int kResidentBlocks = 3;  // 80 registers: nothing spills
constexpr int kFlatThreads = 1024;  // one block per multiprocessor, 64
constexpr int kFlatWarps = kFlatThreads / kWarp;

// The smallest non-zero level of the unsigned dynamic map: 10^-6 times the first of the two midpoints
// of {.1, .55, 1}.
constexpr float kSmallestUnsignedLevel = 0.325e-6f;

struct Scalars {
  float gradient_scale, one_minus_beta1, beta2, one_minus_beta2, keep, rate, second_correction, epsilon;

  explicit Scalars(const AdamwStep& step)
      : gradient_scale(static_cast<float>(step.gradient_scale)),
        one_minus_beta1(static_cast<float>(1.0 - step.beta1)),
        beta2(static_cast<float>(step.beta2)),
        one_minus_beta2(static_cast<float>(1.0 - step.beta2)),
        keep(static_cast<float>(1.0 - step.learning_rate * step.weight_decay)),
        rate(static_cast<float>(step.learning_rate /
                                (1.0 - std::pow(step.beta1, static_cast<double>(step.step))))),
        second_correction(static_cast<float>(
            1.0 / std::sqrt(1.0 - std::pow(step.beta2, static_cast<double>(step.step))))),
        epsilon(static_cast<float>(step.epsilon)) {}
};

struct Operands {
  QuantView gradient, first, second;
  void* weight;
  void* master;
  bool aligned;  // weight and master allow one access per vector
  bool lift;
  bool may_be_plain;  // epsilon and correction are within the bounds of plain_direction
  bool is_fp32;       // the weight
  MasterKind kind;
  Scalars scalars;
  RandomWords weight_key, first_key, second_key;
  std::int64_t first_element;  // of the weight's first in the whole tensor: for stochastic rounding
};

__device__ __forceinline__ void update_moments(const Scalars& s, float gradient, float& first,
                                               float& second) {
  const float g = s.gradient_scale * gradient;
  first = first + s.one_minus_beta1 * (g - first);
  second = s.beta2 * second + s.one_minus_beta2 * g * g;
}
/// m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon).
__device__ __forceinline__ float direction(const Scalars& s, float first, float second) {
  return first / (sqrtf(second) * s.second_correction + s.epsilon);
}
__device__ __forceinline__ void update(const Scalars& s, float gradient, float& first, float& second,
                                       float& master) {
  update_moments(s, gradient, first, second);
  master = s.keep * master - s.rate * direction(s, first, second);
}

// The root and the quotient of IEEE take a long path for zeros and near the ends of the range of
// exponents. Zeros are common (rows of tokens that never came), the rest is not: a vector is plain if
// its moments are zero or within these bounds, and `direction` of it is the same bits without branches.
// With epsilon and the correction within theirs the divisor is in [2^-60, 2^31), so nothing on the way
// is subnormal or overflows.
constexpr float kLeastPlainFirst = 0x1p-90f, kLeastPlainSecond = 0x1p-100f, kMostPlain = 0x1p20f;
constexpr float kLeastEpsilon = 0x1p-60f, kMostCorrection = 0x1p20f;

// Nor need every first moment be asked. The smallest magnitudes of the two maps are above 2^-21 and 2^-9
// of a block's scale, and a sum that cancels leaves no less than the last bit of its terms: from a scale
// of 2^-44 on, or 0, and gradients of which the same holds against kLeastPlainFirst / (1 - beta1), what
// comes out is zero or at least kLeastPlainFirst.
constexpr float kLeastPlainFirstScale = kLeastPlainFirst * 0x1p46f;
constexpr float kLeastPlainGradient = kLeastPlainFirst * 0x1p10f;  // a block's scale, times 1 - beta1

__device__ __forceinline__ float plain_direction(const Scalars& s, float first, float second) {
  // An approximation of 1 / sqrt(v), and one step that rounds correctly. Of v = 0 the root is 0; the
  // number added is below the last bit of any other plain v, but for those that it moves by less than
  // the approximation errs.
  float inverse_root;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse_root) : "f"(second + 0x1p-126f));
  float root = second * inverse_root;
  root = fmaf(fmaf(-root, root, second), 0.5f * inverse_root, root);
  const float divisor = root * s.second_correction + s.epsilon;
  // An approximation of 1 / divisor, a step for it, and two for the quotient.
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(divisor));
  reciprocal = fmaf(fmaf(-divisor, reciprocal, 1.0f), reciprocal, reciprocal);
  float quotient = first * reciprocal;
  quotient = fmaf(fmaf(-divisor, quotient, first), reciprocal, quotient);
  return fmaf(fmaf(-divisor, quotient, first), reciprocal, quotient);
}

/// The smallest non-zero magnitude among what was added is at least `bound`. Zero less one is the
/// largest unsigned number.
struct LeastMagnitude {
  std::uint32_t bits = ~0u;  // twice those of the magnitude, less one
  __device__ __forceinline__ void add(float x) { bits = min(bits, __float_as_uint(x) * 2u - 1u); }
  __device__ __forceinline__ bool is_at_least(float bound) const {
    return bits >= __float_as_uint(bound) * 2u - 1u;
  }
};

/// Lifts a lane's non-zero elements that would be stored as zero to the smallest level of their block
/// of `lanes` lanes: cpu/adamw.cpp says why.
__device__ __forceinline__ void lift_underflow(float (&x)[kVector], int lanes) {
  int absmax_bits = 0;  // non-negative numbers are ordered like their bits
#pragma unroll
  for (int i = 0; i < kVector; ++i) absmax_bits = max(absmax_bits, __float_as_int(x[i]));
  for (int step = 1; step < lanes; step *= 2) {
    absmax_bits = max(absmax_bits, __shfl_xor_sync(kWholeWarp, absmax_bits, step));
  }
  const float least = __int_as_float(absmax_bits) * kSmallestUnsignedLevel;
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] = x[i] > 0.0f && x[i] < least ? least : x[i];
}

// --- weights and masters: eight elements from `first` on ---

template <typename Element>
struct alignas(16) VectorOf {
  Element element[16 / sizeof(Element)];
};

template <typename Element>
__device__ __forceinline__ void load_elements(const Element* from, bool whole, int count,
                                              Element (&to)[kVector]) {
  constexpr int kPerAccess = 16 / sizeof(Element);
  if (whole) {
#pragma unroll
    for (int access = 0; access < kVector / kPerAccess; ++access) {
      const auto part = reinterpret_cast<const VectorOf<Element>*>(from)[access];
#pragma unroll
      for (int i = 0; i < kPerAccess; ++i) to[access * kPerAccess + i] = part.element[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i] = i < count ? from[i] : Element{};
  }
}
template <typename Element>
__device__ __forceinline__ void store_elements(const Element (&from)[kVector], bool whole, int count,
                                               Element* to) {
  constexpr int kPerAccess = 16 / sizeof(Element);
  if (whole) {
#pragma unroll
    for (int access = 0; access < kVector / kPerAccess; ++access) {
      VectorOf<Element> part;
#pragma unroll
      for (int i = 0; i < kPerAccess; ++i) part.element[i] = from[access * kPerAccess + i];
      reinterpret_cast<VectorOf<Element>*>(to)[access] = part;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i < count) to[i] = from[i];
    }
  }
}

/// How the weights are held, as a type: FP32 weights, or BF16 weights with each kind of master.
template <typename Storage, MasterKind kind>
struct Weights {
  static constexpr bool kIsFp32 = std::is_same_v<Storage, float>;
  static constexpr bool kReadsFp32 = kIsFp32 || kind == MasterKind::kFp32;
  static constexpr bool kHasHigh = kReadsFp32 || kind == MasterKind::kRemainder;

  /// What is read of a vector, as it lies in memory: 16 bytes at `low_of`, and as many at `high_of`
  /// where kHasHigh.
  static __device__ __forceinline__ const uint4* low_of(const Operands& operands, std::int64_t first) {
    if constexpr (kReadsFp32) {
      const void* const held = kIsFp32 ? operands.weight : operands.master;
      return reinterpret_cast<const uint4*>(static_cast<const float*>(held) + first);
    } else {
      return reinterpret_cast<const uint4*>(static_cast<const Bf16*>(operands.weight) + first);
    }
  }
  static __device__ __forceinline__ const uint4* high_of(const Operands& operands, std::int64_t first) {
    if constexpr (kReadsFp32) {
      return low_of(operands, first) + 1;
    } else {
      return reinterpret_cast<const uint4*>(static_cast<const std::int16_t*>(operands.master) + first);
    }
  }
  /// The masters in it.
  static __device__ __forceinline__ void join(uint4 low, uint4 high, float (&master)[kVector]) {
    const std::uint32_t words[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if constexpr (kReadsFp32) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) master[i] = __uint_as_float(words[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kVector / 2; ++i) {
        if constexpr (kind == MasterKind::kRemainder) {  // join_master: a dot product extends the sign
          const auto remainders = static_cast<int>(words[4 + i]);
          master[2 * i] =
              __int_as_float(__dp2a_lo(remainders, 0x0001, static_cast<int>(words[i] << 16)));
          master[2 * i + 1] =
              __int_as_float(__dp2a_lo(remainders, 0x0100, static_cast<int>(words[i] & 0xFFFF0000u)));
        } else {
          master[2 * i] = __uint_as_float(words[i] << 16);
          master[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
        }
      }
    }
  }

  static __device__ __forceinline__ void load(const Operands& operands, std::int64_t first, bool whole,
                                              int count, float (&master)[kVector]) {
    const uint4* const low = low_of(operands, first);
    const uint4* const high = kHasHigh ? high_of(operands, first) : nullptr;
    if (whole) return join(*low, kHasHigh ? *high : uint4{}, master);
    std::uint32_t words[kVector] = {};
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i >= count) continue;
      if constexpr (kReadsFp32) {
        words[i] = reinterpret_cast<const std::uint32_t*>(low)[i];
      } else {
        const auto half = [i](const uint4* from) {
          return std::uint32_t{reinterpret_cast<const std::uint16_t*>(from)[i]} << (16 * (i % 2));
        };
        words[i / 2] |= half(low);
        if constexpr (kHasHigh) words[4 + i / 2] |= half(high);
      }
    }
    join(make_uint4(words[0], words[1], words[2], words[3]),
         make_uint4(words[4], words[5], words[6], words[7]), master);
  }

  static __device__ __forceinline__ void store(const Operands& operands, std::int64_t first, bool whole,
                                               int count, const float (&master)[kVector]) {
    if constexpr (kIsFp32) {
      store_elements(master, whole, count, static_cast<float*>(operands.weight) + first);
    } else {
      Bf16 weight[kVector];
      if constexpr (kind == MasterKind::kFp32) {
        store_elements(master, whole, count, static_cast<float*>(operands.master) + first);
#pragma unroll
        for (int i = 0; i < kVector; ++i) weight[i] = to_bf16_half_away(master[i]);
      } else if constexpr (kind == MasterKind::kRemainder) {
        if (whole) {  // split_master, two at a time
          uint4 weights, remainders;
          std::uint32_t* const weight_words = &weights.x;
          std::uint32_t* const remainder_words = &remainders.x;
#pragma unroll
          for (int i = 0; i < kVector / 2; ++i) {
            const std::uint32_t even = __float_as_uint(master[2 * i]) + 0x8000u,
                                odd = __float_as_uint(master[2 * i + 1]) + 0x8000u;
            weight_words[i] = __byte_perm(even, odd, 0x7632);
            remainder_words[i] = __byte_perm(even, odd, 0x5410) ^ 0x80008000u;
          }
          *reinterpret_cast<uint4*>(static_cast<Bf16*>(operands.weight) + first) = weights;
          *reinterpret_cast<uint4*>(static_cast<std::int16_t*>(operands.master) + first) = remainders;
          return;
        }
        std::int16_t remainder[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const SplitMaster split = split_master(master[i]);
          weight[i] = split.weight;
          remainder[i] = split.remainder;
        }
        store_elements(remainder, whole, count, static_cast<std::int16_t*>(operands.master) + first);
      } else {
        RandomWords words{};
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const auto index = static_cast<std::uint64_t>(operands.first_element + first + i);
          if (i == 0 || index % 4 == 0) words = random_words(operands.weight_key, index / 4);
          const std::uint32_t word = index % 4 == 0   ? words.word[0]
                                     : index % 4 == 1 ? words.word[1]
                                     : index % 4 == 2 ? words.word[2]
                                                      : words.word[3];
          weight[i] = to_bf16_stochastic(master[i], word);
        }
      }
      store_elements(weight, whole, count, static_cast<Bf16*>(operands.weight) + first);
    }
  }
};

/// Calls run.operator()<Weights>() for how the weights are held: the list of instances. Called on the
/// host with host code and on the device with device code, which the compiler cannot see.
#pragma nv_exec_check_disable
template <typename Run>
__host__ __device__ __forceinline__ void for_held(const Operands& operands, Run run) {
  if (operands.is_fp32) return run.template operator()<Weights<float, MasterKind::kNone>>();
  switch (operands.kind) {
    case MasterKind::kNone: return run.template operator()<Weights<Bf16, MasterKind::kNone>>();
    case MasterKind::kFp32: return run.template operator()<Weights<Bf16, MasterKind::kFp32>>();
    case MasterKind::kRemainder: return run.template operator()<Weights<Bf16, MasterKind::kRemainder>>();
  }
}

// --- chunk by chunk ---

/// x = the lane's vector of a tensor in one of the formats of the fast path.
__device__ __forceinline__ void decode_chunk(const QuantView& view, const Group& group, int chunk,
                                             float (&x)[kVector]) {
  const auto scaled = [&]<Code code>() {
    const float scale = decode_levels<code>(view, group, chunk, x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] *= scale;
  };
  switch (view.code) {
    case Code::kE4m3: return scaled.template operator()<Code::kE4m3>();
    case Code::kInt8: return scaled.template operator()<Code::kInt8>();
    case Code::kDynamic8: return scaled.template operator()<Code::kDynamic8>();
    case Code::kDynamic8Unsigned: return scaled.template operator()<Code::kDynamic8Unsigned>();
    default: break;
  }
  const int count = vector_count(group, chunk);
  load_elements(reinterpret_cast<const float*>(group.codes) + vector_begin(chunk),
                view.aligned && count == kVector, count, x);
}

/// The codes of a vector of a block in `lanes` neighbouring lanes, a power of two, and the block's
/// scale, which is FP32; nearest rounding. All lanes of the warp take part.
template <Code code>
__device__ __forceinline__ uint2 encode_moments(const float (&x)[kVector], int lanes, float& scale) {
  constexpr bool kUnsigned = code == Code::kDynamic8Unsigned;
  std::uint32_t largest = 0;  // numbers that are not negative are ordered like their bits
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const std::uint32_t magnitude = __float_as_uint(kUnsigned ? fmaxf(x[i], 0.0f) : fabsf(x[i]));
    largest = fabsf(x[i]) <= FLT_MAX && magnitude > largest ? magnitude : largest;
  }
  if (lanes == kWarp) {
    largest = __reduce_max_sync(kWholeWarp, largest);
  } else {
    for (int step = 1; step < lanes; step *= 2) {
      largest = max(largest, __shfl_xor_sync(kWholeWarp, largest, step));
    }
  }
  constexpr float maximum = code_maximum(code);
  scale = stored_scale_fp32(__uint_as_float(largest) / maximum, maximum);
  const float reciprocal = 1.0f / scale;
  float y[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) y[i] = x[i] == x[i] ? x[i] * reciprocal : 0.0f;
  group_detail::VectorCodes codes = group_detail::encode_vector<code>(y, 0.0f);
  if (scale == 0.0f) codes = group_detail::zero_codes<code>();
  return make_uint2(codes.low, codes.high);
}

template <Code code>
__device__ __forceinline__ void encode_chunk(const QuantView& view, const Group& group, int chunk,
                                             const float (&x)[kVector]) {
  if (view.code == Code::kFp32) {
    const int count = vector_count(group, chunk);
    store_elements(x, view.aligned && count == kVector, count,
                   reinterpret_cast<float*>(group.codes) + vector_begin(chunk));
  } else {
    float scale;
    const uint2 codes = encode_moments<code>(x, kWarp, scale);
    const int begin = vector_begin(chunk), count = vector_count(group, chunk);
    if (lane_index() == 0 && count > 0) reinterpret_cast<float*>(group.scales)[chunk] = scale;
    group_detail::store_codes<code>(view, group, begin, count, {codes.x, codes.y});
  }
}

template <typename Held>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    adamw_kernel(const __grid_constant__ Operands operands) {
  await_predecessors();
  const std::uint64_t chunks = std::uint64_t{operands.gradient.groups} * kChunks;
  for (std::uint64_t index = std::uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; index < chunks;
       index += std::uint64_t{gridDim.x} * kWarps) {
    const auto number = static_cast<std::uint32_t>(index / kChunks);
    const int chunk = static_cast<int>(index % kChunks);
    const Group gradient = group_at(operands.gradient, number);
    if (chunk * kWarp * kVector >= gradient.count) continue;  // the whole warp
    const std::uint32_t in_row = number % operands.gradient.groups_per_row();
    const Group first = group_of(operands.first, gradient.row, in_row);
    const Group second = group_of(operands.second, gradient.row, in_row);
    const std::int64_t element =
        gradient.row * operands.gradient.row_length + gradient.column + vector_begin(chunk);
    const int count = vector_count(gradient, chunk);
    const bool whole = operands.aligned && count == kVector;

    float g[kVector], m[kVector], v[kVector], p[kVector];
    Held::load(operands, element, whole, count, p);
    decode_chunk(operands.gradient, gradient, chunk, g);
    decode_chunk(operands.first, first, chunk, m);
    decode_chunk(operands.second, second, chunk, v);
#pragma unroll
    for (int i = 0; i < kVector; ++i) update(operands.scalars, g[i], m[i], v[i], p[i]);
    Held::store(operands, element, whole, count, p);
    encode_chunk<Code::kDynamic8>(operands.first, first, chunk, m);
    if (operands.lift) lift_underflow(v, kWarp);
    encode_chunk<Code::kDynamic8Unsigned>(operands.second, second, chunk, v);
  }
}

// --- flat: planes without gaps ---
//
// The formats that training uses (gradient e4m3 with FP32 scales, moments of 8 bits) over segments of
// whole vectors: element i of the tensor is element i of every code plane. Both maps are read from
// shared memory. MomentCut says what a chunk is.

// Encoding by one lookup, of y 2^-102: then 2^-24 is the smallest normal number, and what is below,
// whose code is that of zero, falls into the first bins. A bin is the numbers that share sign, exponent
// and upper seven fraction bits: so narrow that at most one border between codes lies in it. Its entry
// is
//   (code of its first number - number of the bin) * 2^16 + (2^16 - border)
// with `border` the sixteen lower bits from which on the code is the next; 2^16 where there is none.
// Added to the number, whose sixteen upper bits are those of its bin, it leaves the code in byte 2: the
// sixteen lower bits carry into it where they reach the border. The entries are made from quant/codec.h
// itself, once a process.
//
// For dynamic8, of which magnitudes are looked up, a code is counted from that of zero. In the unsigned
// map what is not zero has at least code 1, as lift_underflow and the encoder together give it.
constexpr float kBinned = 0x1p-102f;
constexpr std::uint32_t kBinnedExponents = 102;
constexpr std::uint32_t kBins = (128 - kBinnedExponents) << 7;  // below 2

struct EncodeTables {
  std::uint32_t first[kBins], second[kBins];
};
__device__ EncodeTables encode_tables;

template <Code code>
__device__ std::uint32_t entry_of(std::uint32_t bin) {
  const std::uint32_t begin = bin << 16;
  const auto code_of = [&](std::uint32_t low) {
    const std::uint32_t bits = begin + low;
    if (code == Code::kDynamic8) {
      return bits < 1u << 23 ? 0 : encode<code>(__uint_as_float(bits + (kBinnedExponents << 23))) - 127u;
    }
    if (bits < 1u << 23) return bits == 0 ? 0u : 1u;
    return max(1u, encode<code>(__uint_as_float(bits + (kBinnedExponents << 23))));
  };
  const std::uint32_t first = code_of(0);
  if (code_of(0xFFFF) == first) return (first - bin) << 16;
  std::uint32_t below = 0, border = 0xFFFF;
  while (border - below > 1) {
    const std::uint32_t middle = (below + border) / 2;
    (code_of(middle) == first ? below : border) = middle;
  }
  return ((first - bin) << 16) + (0x10000 - border);
}

__global__ void __launch_bounds__(kThreads) fill_encode_tables_kernel() {
  await_predecessors();
  const std::uint32_t bin = blockIdx.x * kThreads + threadIdx.x;
  if (bin >= kBins) return;
  encode_tables.first[bin] = entry_of<Code::kDynamic8>(bin);
  encode_tables.second[bin] = entry_of<Code::kDynamic8Unsigned>(bin);
}

// Shared memory by 32-bit addresses, which a dot product forms from a byte or a half of a word in one
// instruction, and which the compiler does not derive anew where they are used.
__device__ __forceinline__ std::uint32_t load_shared(std::uint32_t address) {
  std::uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}
__device__ __forceinline__ uint2 load_shared_pair(std::uint32_t address) {
  uint2 words;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "r"(address)
               : "memory");
  return words;
}
__device__ __forceinline__ uint4 load_shared_quad(std::uint32_t address) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}

/// The code of y >= 0, which is given times kBinned, in byte 2.
__device__ __forceinline__ std::uint32_t look_up(std::uint32_t entries, float binned) {
  const std::uint32_t bits = __float_as_uint(binned);
  return load_shared(__dp2a_lo(bits, 0x0400u, entries)) + bits;  // entries + 4 * (bits >> 16)
}
/// Byte 2 of four words, the first lowest.
__device__ __forceinline__ std::uint32_t pack_codes(const std::uint32_t (&sums)[kVector], int begin) {
  return __byte_perm(__byte_perm(sums[begin], sums[begin + 1], 0x0062),
                     __byte_perm(sums[begin + 2], sums[begin + 3], 0x0062), 0x5410);
}
/// 0xFF in the bytes of negative numbers among four.
__device__ __forceinline__ std::uint32_t signs_of(const float (&y)[kVector], int begin) {
  const auto pair = [&](int i) {  // 8 in a selector: the byte's sign, in all its bits
    std::uint32_t signs;
    asm("prmt.b32 %0, %1, %2, 0x00FB;"
        : "=r"(signs)
        : "r"(__float_as_uint(y[i])), "r"(__float_as_uint(y[i + 1])));
    return signs;
  };
  return __byte_perm(pair(begin), pair(begin + 2), 0x5410);
}

constexpr std::uint32_t kZeroFirsts = 0x7F7F7F7Fu;  // dynamic8's codes of zero

struct Maps {
  EncodeTables entries;
  // Once for each lane, so that each reads a bank of its own.
  float first_level[256][kWarp], second_level[256][kWarp];
};

__device__ __forceinline__ void fill_entries(Maps& maps) {
  static_assert(sizeof(EncodeTables) % sizeof(uint4) == 0);
  auto* const to = reinterpret_cast<uint4*>(&maps.entries);
  const auto* const from = reinterpret_cast<const uint4*>(&encode_tables);
  for (std::size_t i = threadIdx.x; i < sizeof(EncodeTables) / sizeof(uint4); i += kFlatThreads)
    to[i] = from[i];
}
__device__ __forceinline__ void fill_levels(Maps& maps) {
  for (int code = static_cast<int>(threadIdx.x) / kWarp; code < 256; code += kFlatWarps) {
    const auto bits = static_cast<std::uint32_t>(code);
    maps.first_level[code][lane_index()] = decode<Code::kDynamic8>(bits);
    maps.second_level[code][lane_index()] = decode<Code::kDynamic8Unsigned>(bits);
  }
}

/// level: the shared address of the lane's 256 levels.
__device__ __forceinline__ void decode_by(std::uint32_t level, uint2 codes, float scale,
                                          float (&x)[kVector]) {
  constexpr std::uint32_t kStride = kWarp * sizeof(float);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const std::uint32_t address = __dp4a(i < 4 ? codes.x : codes.y, kStride << (8 * (i % 4)), level);
    x[i] = __uint_as_float(load_shared(address)) * scale;
  }
}

/// 1 / scale, correctly rounded, times kBinned; 0 of 0. `scale` is 0 or in [2^-126, kMostPlain].
__device__ __forceinline__ float binned_reciprocal(float scale) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(scale));
  reciprocal = fmaf(fmaf(-scale, reciprocal, 1.0f), reciprocal, reciprocal);
  return scale == 0.0f ? 0.0f : reciprocal * kBinned;
}

/// dynamic8's codes of x under a scale.
__device__ __forceinline__ uint2 encode_first(std::uint32_t entries, const float (&x)[kVector],
                                              float binned) {
  std::uint32_t sums[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) sums[i] = look_up(entries, fabsf(x[i]) * binned);
  const auto codes = [&](int begin) {
    // 127 plus or less the magnitudes' codes, byte by byte without a carry. -1 is not a level: of 128,
    // the highest, one less is taken.
    const std::uint32_t magnitudes = pack_codes(sums, begin);
    const std::uint32_t negative = magnitudes & signs_of(x, begin);
    return magnitudes + kZeroFirsts + (negative >> 7 & 0x01010101u) - negative - negative;
  };
  return make_uint2(codes(0), codes(4));
}
/// Those of the unsigned map.
__device__ __forceinline__ uint2 encode_second(std::uint32_t entries, const float (&x)[kVector],
                                               float binned) {
  std::uint32_t sums[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) sums[i] = look_up(entries, x[i] * binned);
  return make_uint2(pack_codes(sums, 0), pack_codes(sums, 4));
}

/// What a warp has under way from memory while it computes: its next chunk. A lane reads what it copied
/// itself. (Scales are held in registers: copies of one number to 32 places of shared memory take as
/// many cycles of it.)
struct NextChunk {
  uint2 gradient[kWarp], first[kWarp], second[kWarp];
  uint4 low[kWarp], high[kWarp];  // of the weights
};
struct FlatShared {
  uint4 in_tail[kWarp];          // MomentCut::place_in_tail of each lane
  std::uint32_t entries[kWarp];  // where maps.entries is, for each lane
  Maps maps;
  NextChunk next[kFlatWarps];
  std::uint32_t taken;  // of the block's own chunks
};

/// The gradient is one tensor, operands.gradient.
struct OneGradient {
  static constexpr bool kIsSum = false;
};
/// It is the sum of pieces; operands.gradient is the first.
struct GradientPieces {
  static constexpr bool kIsSum = true;
  Planes<> planes;
};

/// g = the sum of a vector of the pieces, in their order; that of the first has been read.
__device__ __forceinline__ void sum_pieces(const Planes<>& planes, std::uint64_t element,
                                           std::uint32_t block, uint2 first_codes, float first_scale,
                                           float (&g)[kVector]) {
  constexpr int kInFlight = 4;
  const auto levels = [](uint2 codes, float scale, float(&x)[kVector]) {
    if (scale == 0.0f) codes = make_uint2(0, 0);  // a block whose scale is zero is zeros
    group_detail::decode_vector<Code::kE4m3>({codes.x, codes.y}, 0.0f, x);
  };
  levels(first_codes, first_scale, g);
#pragma unroll
  for (int i = 0; i < kVector; ++i) g[i] *= first_scale;
#pragma unroll 1
  for (int piece = 1; piece < planes.count; piece += kInFlight) {
    uint2 codes[kInFlight];
    float scales[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (piece + k >= planes.count) continue;
      codes[k] = *reinterpret_cast<const uint2*>(planes.codes[piece + k] + element);
      scales[k] = reinterpret_cast<const float*>(planes.scales[piece + k])[block];
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      if (piece + k >= planes.count) continue;
      float x[kVector];
      levels(codes[k], scales[k], x);
#pragma unroll
      for (int i = 0; i < kVector; ++i) g[i] += x[i] * scales[k];
    }
  }
}

/// How the kernel cuts a tensor: what a warp does at a time, its *chunk*, is a block of moments, 256
/// elements of a segment, or the short last blocks of several neighbouring segments, each in as many
/// lanes as the power of two that holds it. Those segments are a group: of segments of 896 elements the
/// chunks of a group are 2 * 3 whole blocks and two half ones side by side.
struct MomentCut {
  static constexpr std::uint32_t kElements = kWarp * kVector;

  std::uint64_t elements;                 // of the tensor
  std::uint32_t segment_length;           // elements
  std::uint32_t blocks, gradient_blocks;  // of a segment
  std::uint32_t whole_chunks, chunks;     // of a group
  std::uint32_t total_chunks;             // of the tensor
  std::uint32_t per_chunks;               // 2^32 / chunks, rounded down
  int packed_shift;                       // log2 of a group's segments
  int tail_shift;                         // log2 of the lanes of a short last block

  /// Where a lane's vector and the scales of its blocks lie.
  struct Place {
    std::uint64_t element;         // of the vector's first, in the tensor
    std::uint32_t block;           // of moments, in the tensor
    std::uint32_t gradient_block;  // in the tensor
    std::uint32_t flags;
  };
  static constexpr std::uint32_t kExists = 1, kLeads = 2, kPacked = 4;  // kPacked: in the whole warp

  /// The place in short last blocks, that of the group's first vector being zero: alike in all groups.
  /// As {element, block, gradient_block, flags}.
  __device__ __forceinline__ uint4 place_in_tail(std::uint32_t lane, int gradient_shift) const {
    const std::uint32_t segment = lane >> tail_shift, in_block = lane & ((1u << tail_shift) - 1);
    const std::uint32_t in_segment = (blocks - 1) * kElements + in_block * kVector;
    return make_uint4(
        segment * segment_length + in_segment, segment * blocks + blocks - 1,
        segment * gradient_blocks + (in_segment >> gradient_shift),
        kPacked | (in_segment < segment_length ? kExists : 0u) | (in_block == 0 ? kLeads : 0u));
  }
  /// tail: the shared address of what place_in_tail gives.
  __device__ __forceinline__ Place place(std::uint32_t chunk, std::uint32_t tail,
                                         int gradient_shift) const {
    std::uint32_t group = __umulhi(chunk, per_chunks);  // the quotient, or one less
    std::uint32_t left = chunk - group * chunks;
    if (left >= chunks) ++group, left -= chunks;
    const std::uint32_t first_segment = group << packed_shift;
    uint4 in_group;
    if (left < whole_chunks) {
      // The first block of each of the group's segments, the second of each, and so on.
      const std::uint32_t block = left >> packed_shift, segment = left - (block << packed_shift);
      const std::uint32_t lane = threadIdx.x % kWarp, in_segment = block * kElements + lane * kVector;
      in_group = make_uint4(segment * segment_length + in_segment, segment * blocks + block,
                            segment * gradient_blocks + (in_segment >> gradient_shift),
                            kExists | (lane == 0 ? kLeads : 0u));
    } else {
      in_group = load_shared_quad(tail);
    }
    const std::uint64_t element = std::uint64_t{first_segment} * segment_length + in_group.x;
    if (element >= elements) in_group.w &= kPacked;  // the last group may be a part of one
    return {element, first_segment * blocks + in_group.y, first_segment * gradient_blocks + in_group.z,
            in_group.w};
  }
};

// Most chunks are dealt to the blocks beforehand, a run of neighbouring ones to each. A block's warps
// take the next when they have done one: the multiprocessor prefers some warps to others, and with
// shares cut beforehand the last would work alone. For the same reason, between multiprocessors, the
// last eighth is taken by whichever block comes, from pools whose counters lie apart, one of them to a
// block.
constexpr std::uint32_t kPools = 4, kPoolStride = 64;  // words from one pool's counter to the next
constexpr std::uint32_t kNoChunk = ~0u;

struct Deal {
  std::uint32_t first, own;  // the block's
  std::uint32_t pool, pool_first, pool_chunks;

  __device__ __forceinline__ explicit Deal(std::uint32_t total) {
    own = total / gridDim.x * 7 / 8;
    first = blockIdx.x * own;
    const std::uint32_t pools = min(kPools, gridDim.x), dealt = gridDim.x * own;
    const std::uint32_t of_pool = (total - dealt + pools - 1) / pools;
    pool = blockIdx.x % pools;
    pool_first = dealt + pool * of_pool;
    pool_chunks = pool_first < total ? min(of_pool, total - pool_first) : 0;
  }
};

__global__ void __launch_bounds__(kPools* kPoolStride) zero_pools_kernel(std::uint32_t* pools) {
  await_predecessors();
  pools[threadIdx.x] = 0;
}

template <typename Held, typename Gradient>
__global__ void __launch_bounds__(kFlatThreads, 1)
    adamw_flat_kernel(const __grid_constant__ Operands operands, const __grid_constant__ MomentCut cut,
                      const __grid_constant__ Gradient pieces, std::uint32_t* pools) {
  extern __shared__ __align__(16) std::byte shared_bytes[];
  FlatShared& shared = *reinterpret_cast<FlatShared*>(shared_bytes);
  const int lane = lane_index();
  const Scalars& scalars = operands.scalars;
  const std::byte* const gradients = operands.gradient.codes;
  const auto* const gradient_scales = reinterpret_cast<const float*>(operands.gradient.scales);
  std::byte* const firsts = operands.first.codes;
  std::byte* const seconds = operands.second.codes;
  auto* const first_scales = reinterpret_cast<float*>(operands.first.scales);
  auto* const second_scales = reinterpret_cast<float*>(operands.second.scales);
  std::uint32_t base = static_cast<std::uint32_t>(__cvta_generic_to_shared(&shared));
  std::uint32_t pairs = static_cast<std::uint32_t>(
      __cvta_generic_to_shared(&shared.next[threadIdx.x / kWarp].gradient[lane]));
  asm("" : "+r"(base), "+r"(pairs));  // in registers
  const std::uint32_t own_bank = base + static_cast<std::uint32_t>(lane) * 4;
  const std::uint32_t first_levels = own_bank + offsetof(FlatShared, maps.first_level),
                      second_levels = own_bank + offsetof(FlatShared, maps.second_level);
  const std::uint32_t taken = base + offsetof(FlatShared, taken);
  const std::uint32_t quads = pairs + static_cast<std::uint32_t>(lane) * 8;
  constexpr std::uint32_t kFirst = offsetof(NextChunk, first), kSecond = offsetof(NextChunk, second),
                          kLow = offsetof(NextChunk, low), kHigh = offsetof(NextChunk, high);
  float next_gradient_scale = 0.0f, next_first_scale = 0.0f, next_second_scale = 0.0f;
  // Lanes behind a segment's end decode what they have, zeros at first, under scales of zero.
  const std::uint32_t in_tail =
      base + offsetof(FlatShared, in_tail) + static_cast<std::uint32_t>(lane) * sizeof(uint4);
  const auto start = [&](std::uint32_t chunk) {
    const MomentCut::Place place = cut.place(chunk, in_tail, operands.gradient.block_shift);
    next_first_scale = next_second_scale = next_gradient_scale = 0.0f;
    if ((place.flags & MomentCut::kExists) == 0) return place;
    next_first_scale = first_scales[place.block];
    next_second_scale = second_scales[place.block];
    next_gradient_scale = gradient_scales[place.gradient_block];
    copy_async<8>(gradients + place.element, pairs);
    copy_async<8>(firsts + place.element, pairs + kFirst);
    copy_async<8>(seconds + place.element, pairs + kSecond);
    copy_async<16>(Held::low_of(operands, place.element), quads + kLow);
    if constexpr (Held::kHasHigh) copy_async<16>(Held::high_of(operands, place.element), quads + kHigh);
    return place;
  };
  const Deal deal(cut.total_chunks);
  fill_levels(shared.maps);
  await_predecessors();
  const auto take_chunk = [&] {
    std::uint32_t chunk = kNoChunk;
    if (lane == 0) {
      std::uint32_t number;  // an addition would be preceded by a search for lanes that add alike
      asm volatile("atom.shared.inc.u32 %0, [%1], 0x7FFFFFFF;" : "=r"(number) : "r"(taken) : "memory");
      chunk = deal.first + number;
      if (number >= deal.own) {
        number = atomicAdd(pools + deal.pool * kPoolStride, 1u);
        chunk = number < deal.pool_chunks ? deal.pool_first + number : kNoChunk;
      }
    }
    return __shfl_sync(kWholeWarp, chunk, 0);
  };
  MomentCut::Place next_place{};
  NextChunk& own = shared.next[threadIdx.x / kWarp];
  own.gradient[lane] = own.first[lane] = own.second[lane] = make_uint2(0, 0);
  own.low[lane] = own.high[lane] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x < kWarp) {
    shared.in_tail[threadIdx.x] = cut.place_in_tail(threadIdx.x, operands.gradient.block_shift);
    shared.entries[threadIdx.x] = base + offsetof(FlatShared, maps.entries);
  }
  if (threadIdx.x == 0) shared.taken = 0;
  __syncthreads();
  std::uint32_t chunk = take_chunk();
  if (chunk != kNoChunk) next_place = start(chunk);
  fill_entries(shared.maps);
  __syncthreads();
  while (chunk != kNoChunk) {
    const MomentCut::Place place = next_place;
    const bool exists = (place.flags & MomentCut::kExists) != 0;
    const bool packed = (place.flags & MomentCut::kPacked) != 0;
    float p[kVector];
    wait_for_copies();
    const uint2 gradient = load_shared_pair(pairs);
    uint2 first = load_shared_pair(pairs + kFirst), second = load_shared_pair(pairs + kSecond);
    Held::join(load_shared_quad(quads + kLow),
               Held::kHasHigh ? load_shared_quad(quads + kHigh) : uint4{}, p);
    const float gradient_scale = next_gradient_scale, first_scale = next_first_scale,
                second_scale = next_second_scale;
    chunk = take_chunk();
    if (chunk != kNoChunk) next_place = start(chunk);

    float g[kVector], m[kVector], v[kVector];
    if constexpr (Gradient::kIsSum) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) g[i] = 0.0f;
      if (exists)
        sum_pieces(pieces.planes, place.element, place.gradient_block, gradient, gradient_scale, g);
    } else {
      group_detail::decode_vector<Code::kE4m3>({gradient.x, gradient.y}, 0.0f, g);
#pragma unroll
      for (int i = 0; i < kVector; ++i) g[i] *= gradient_scale;
    }
    decode_by(first_levels, first, first_scale, m);
    decode_by(second_levels, second, second_scale, v);
    // Numbers that are not negative are ordered like their bits, and NaN is above them.
    float largest_first = 0.0f;
    std::uint32_t largest_second = 0, least_second = ~0u;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      update_moments(scalars, g[i], m[i], v[i]);
      largest_first = group_detail::max_or_nan(largest_first, fabsf(m[i]));
      largest_second = max(largest_second, __float_as_uint(v[i]));
      least_second = min(least_second, __float_as_uint(v[i]));
    }
    std::uint32_t first_bits = __float_as_uint(largest_first), second_bits = largest_second;
    bool in_range;  // the whole warp
    if (!packed) {
      first_bits = __reduce_max_sync(kWholeWarp, first_bits);
      second_bits = __reduce_max_sync(kWholeWarp, second_bits);
      in_range = max(first_bits, second_bits) <= __float_as_uint(kMostPlain);
    } else {
      for (int step = 1; step < 1 << cut.tail_shift; step *= 2) {
        first_bits = max(first_bits, __shfl_xor_sync(kWholeWarp, first_bits, step));
        second_bits = max(second_bits, __shfl_xor_sync(kWholeWarp, second_bits, step));
      }
      in_range =
          __all_sync(kWholeWarp, max(first_bits, second_bits) <= __float_as_uint(kMostPlain)) != 0;
    }
    const float first_absmax = __uint_as_float(first_bits), second_absmax = __uint_as_float(second_bits);
    // Below 2^-46 of the largest, what is binned might become zero.
    const float least_plain_second = fmaxf(kLeastPlainSecond, second_absmax * 0x1p-46f);
    bool plain = operands.may_be_plain && in_range;
    if (plain && exists) {
      const float least_gradient =
          fabsf(gradient_scale * scalars.gradient_scale) * scalars.one_minus_beta1;
      // A sum of pieces may be smaller than the least magnitude of any.
      plain = !Gradient::kIsSum && least_second >= __float_as_uint(least_plain_second) &&
              (first_scale == 0.0f || first_scale >= kLeastPlainFirstScale) &&
              (least_gradient == 0.0f || least_gradient >= kLeastPlainGradient);
      if (!plain) {
        LeastMagnitude firsts_least, seconds_least;
#pragma unroll
        for (int i = 0; i < kVector; ++i) firsts_least.add(m[i]), seconds_least.add(v[i]);
        plain =
            firsts_least.is_at_least(kLeastPlainFirst) && seconds_least.is_at_least(least_plain_second);
      }
    }
    if (plain) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        p[i] = scalars.keep * p[i] - scalars.rate * plain_direction(scalars, m[i], v[i]);
      }
    } else {
      const float least = second_absmax * kSmallestUnsignedLevel;
#pragma unroll 1
      for (int i = 0; i < kVector; ++i) {
        float m_i = m[0], v_i = v[0], p_i = p[0];  // registers have no index that is known at run time
#pragma unroll
        for (int k = 1; k < kVector; ++k) {
          if (k == i) m_i = m[k], v_i = v[k], p_i = p[k];
        }
        p_i = scalars.keep * p_i - scalars.rate * direction(scalars, m_i, v_i);
        if (in_range && v_i > 0.0f) v_i = fmaxf(v_i, least);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          if (k == i) p[k] = p_i, v[k] = v_i;
        }
      }
    }
    if (exists) Held::store(operands, place.element, true, kVector, p);
    float new_first_scale, new_second_scale;
    if (in_range) {
      // stored_scale_fp32 of numbers that are not negative and in range.
      new_first_scale = first_absmax < kSmallestScale ? 0.0f : first_absmax;
      new_second_scale = second_absmax < kSmallestScale ? 0.0f : second_absmax;
      const std::uint32_t entries = load_shared(own_bank + offsetof(FlatShared, entries));
      first =
          encode_first(entries + offsetof(EncodeTables, first), m, binned_reciprocal(new_first_scale));
      second = encode_second(entries + offsetof(EncodeTables, second), v,
                             binned_reciprocal(new_second_scale));
    } else {
      const int lanes = packed ? 1 << cut.tail_shift : kWarp;  // of a block
      first = encode_moments<Code::kDynamic8>(m, lanes, new_first_scale);
      lift_underflow(v, lanes);
      second = encode_moments<Code::kDynamic8Unsigned>(v, lanes, new_second_scale);
    }
    if (exists) {
      *reinterpret_cast<uint2*>(firsts + place.element) = first;
      *reinterpret_cast<uint2*>(seconds + place.element) = second;
      if ((place.flags & MomentCut::kLeads) != 0)
        first_scales[place.block] = new_first_scale, second_scales[place.block] = new_second_scale;
    }
  }
}

// --- group by group, any format ---

__global__ void __launch_bounds__(kThreads) adamw_any_kernel(const __grid_constant__ Operands operands) {
  await_predecessors();
  for (std::uint64_t index = std::uint64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
       index < operands.gradient.groups; index += std::uint64_t{gridDim.x} * kWarps) {
    const auto number = static_cast<std::uint32_t>(index);
    const Group gradient = group_at(operands.gradient, number);
    const std::uint32_t in_row = number % operands.gradient.groups_per_row();
    const Group first = group_of(operands.first, gradient.row, in_row);
    const Group second = group_of(operands.second, gradient.row, in_row);
    GroupValues g, m, v;
    group_detail::decode_rarely_used(operands.gradient, gradient, &g[0][0]);
    group_detail::decode_rarely_used(operands.first, first, &m[0][0]);
    group_detail::decode_rarely_used(operands.second, second, &v[0][0]);
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const std::int64_t element =
          gradient.row * operands.gradient.row_length + gradient.column + vector_begin(chunk);
      const int count = vector_count(gradient, chunk);
      const bool whole = operands.aligned && count == kVector;
      for_held(operands, [&]<typename Held>() {
        float p[kVector];
        Held::load(operands, element, whole, count, p);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          update(operands.scalars, g[chunk][i], m[chunk][i], v[chunk][i], p[i]);
        }
        Held::store(operands, element, whole, count, p);
      });
      if (operands.lift) lift_underflow(v[chunk], operands.second.block / kVector);
    }
    LaneCounts counts;  // finite by MainGradients::norm, which refuses gradients that are not
    group_detail::encode_rarely_used(operands.first, first, &m[0][0], operands.first_key, counts);
    group_detail::encode_rarely_used(operands.second, second, &v[0][0], operands.second_key, counts);
  }
}

/// Whether a block of this GPU may have the shared memory of adamw_flat_kernel: those of data centres
/// do, others (sm_86, sm_89, sm_120) go by chunk.
bool has_room_for_maps() {
  static const bool has = [] {
    int index = 0, most = 0;
    expect_success(cudaGetDevice(&index), "adamw_update");
    expect_success(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
                   "adamw_update");
    return most >= static_cast<int>(sizeof(FlatShared));
  }();
  return has;
}

/// What adamw_flat_kernel can do.
bool is_flat(const Operands& operands) {
  const QuantView& gradient = operands.gradient;
  const auto is_block_of_256 = [](const QuantView& view, Code code) {
    return view.code == code && view.block == 256 && view.scale == ScaleType::kFp32 &&
           view.rounding == Rounding::kNearest && view.aligned;
  };
  return operands.aligned && gradient.path == Code::kE4m3 && gradient.scale == ScaleType::kFp32 &&
         gradient.aligned && gradient.block <= 256 && is_block_of_256(operands.first, Code::kDynamic8) &&
         is_block_of_256(operands.second, Code::kDynamic8Unsigned);
}

/// Of a tensor of `count` elements.
MomentCut moment_cut(const Operands& operands, std::int64_t count) {
  constexpr std::int64_t kElements = MomentCut::kElements;
  std::int64_t segment_length = operands.first.segment_length;
  // Where segments are whole blocks they do not matter.
  if (segment_length % kElements == 0) segment_length = kElements;
  const std::int64_t segments = count / segment_length;
  const std::int64_t whole = segment_length / kElements, tail = segment_length % kElements;
  int tail_shift = tail == 0 ? 5 : 0;
  while ((kVector << tail_shift) < tail) ++tail_shift;
  const int packed_shift = 5 - tail_shift;  // as many segments as fit into a warp's lanes
  const std::int64_t whole_chunks = whole << packed_shift, chunks = whole_chunks + (tail > 0 ? 1 : 0);
  const std::int64_t groups = (segments + (1 << packed_shift) - 1) >> packed_shift;
  const std::int64_t blocks = whole + (tail > 0 ? 1 : 0);
  const int gradient_block = operands.gradient.block;
  const std::int64_t gradient_blocks = (segment_length + gradient_block - 1) / gradient_block;
  check((groups << packed_shift) * std::max(chunks, gradient_blocks) < (std::int64_t{1} << 32) &&
            segment_length << packed_shift < (std::int64_t{1} << 32),
        "a tensor of {} elements is larger than kernels count", count);
  return {
      static_cast<std::uint64_t>(count),
      static_cast<std::uint32_t>(segment_length),
      static_cast<std::uint32_t>(blocks),
      static_cast<std::uint32_t>(gradient_blocks),
      static_cast<std::uint32_t>(whole_chunks),
      static_cast<std::uint32_t>(chunks),
      static_cast<std::uint32_t>(groups * chunks),
      static_cast<std::uint32_t>(std::min((std::int64_t{1} << 32) / chunks, std::int64_t{0xFFFFFFFF})),
      packed_shift,
      tail_shift};
}

bool is_moment_of(const QuantView& view, Code code) {
  return view.code == Code::kFp32 ||
         (view.code == code && view.block == 256 && view.scale == ScaleType::kFp32 &&
          view.rounding == Rounding::kNearest);
}

/// What adamw_kernel can do. 8-bit floats that are to be converted by software go the other way.
bool goes_by_chunk(const Operands& operands) {
  const QuantView& gradient = operands.gradient;
  const bool reads = gradient.code == Code::kFp32 || gradient.code == Code::kInt8 ||
                     gradient.code == Code::kDynamic8 ||
                     (gradient.code == Code::kE4m3 && !software_floats_forced());
  return reads && is_moment_of(operands.first, Code::kDynamic8) &&
         is_moment_of(operands.second, Code::kDynamic8Unsigned);
}

void check_operands(const AdamwTensors& tensors, const AdamwStep& step) {
  const BlockGrid& grid = tensors.gradient.grid;
  check(tensors.weight.count() == grid.count() && tensors.first_moment.rows() == grid.rows &&
            tensors.first_moment.width() == grid.row_length &&
            tensors.second_moment.rows() == grid.rows &&
            tensors.second_moment.width() == grid.row_length,
        "adamw_update: weight, gradient and moments must have one shape; the gradient has [{}, {}], the "
        "weight {}, the moments [{}, {}] and [{}, {}]",
        grid.rows, grid.row_length, tensors.weight.shape.to_string(), tensors.first_moment.rows(),
        tensors.first_moment.width(), tensors.second_moment.rows(), tensors.second_moment.width());
  check(tensors.first_moment.grid.segments == grid.segments &&
            tensors.second_moment.grid.segments == grid.segments,
        "adamw_update: gradient and moments must be cut alike; they have {}, {} and {} segments a row",
        grid.segments, tensors.first_moment.grid.segments, tensors.second_moment.grid.segments);
  for (const QuantTensor* tensor : {&tensors.gradient, &tensors.first_moment, &tensors.second_moment}) {
    check(tensor->format.code != Code::kFp64, "adamw_update: fp64 tensors exist on the CPU only");
  }
  const ElementType type = tensors.weight.type;
  check(type == ElementType::kBf16 || type == ElementType::kFp32,
        "adamw_update: weights on the GPU are bf16 or fp32; these are {}", name_of(type));
  check(step.master == MasterKind::kNone || type == ElementType::kBf16,
        "adamw_update: a {} weight is its own master: give MasterKind::kNone", name_of(type));
  if (step.master == MasterKind::kNone) return;
  const ElementType expected =
      step.master == MasterKind::kFp32 ? ElementType::kFp32 : ElementType::kInt16;
  check(tensors.master && tensors.master.type == expected && tensors.master.count() == grid.count(),
        "adamw_update: the master must be {} with {} elements; it is {} with {}", name_of(expected),
        grid.count(), name_of(tensors.master.type), tensors.master ? tensors.master.count() : 0);
}

/// What the kernels are to be told; check_operands has passed.
Operands operands_of(const AdamwTensors& tensors, const AdamwStep& step, const RandomKey& key) {
  // The two moments of one element must not be rounded with the same number.
  const RandomKey first_key = key.with(RandomPurpose::kMomentRounding, key.tensor);
  RandomKey second_key = first_key;
  second_key.micro_batch = first_key.micro_batch + 1;
  const std::int64_t segment = tensors.gradient.grid.segment_length();
  const Tensor& master = tensors.master;
  const bool master_aligned =
      step.master == MasterKind::kNone || reinterpret_cast<std::uintptr_t>(master.data) % 16 == 0;
  const Scalars scalars(step);
  return {view_of(tensors.gradient),
          view_of(tensors.first_moment),
          view_of(tensors.second_moment),
          tensors.weight.data,
          master.data,
          master_aligned && vector_aligned<Bf16>(tensors.weight.data, segment),
          tensors.second_moment.format.code == Code::kDynamic8Unsigned,
          scalars.epsilon >= kLeastEpsilon && scalars.epsilon <= 1.0f &&
              scalars.second_correction <= kMostCorrection,
          tensors.weight.type == ElementType::kFp32,
          step.master,
          scalars,
          mixed_key(key.with(RandomPurpose::kWeightRounding, key.tensor)),
          mixed_key(first_key),
          mixed_key(second_key),
          tensors.first_moment.first_row * tensors.gradient.width()};
}

Tensor take_pools(const Context& context) {
  return context.workspace.take(ElementType::kInt32, Shape{std::int64_t{kPools * kPoolStride}});
}

/// Queues adamw_flat_kernel for weights of `count` elements.
template <typename Gradient>
void launch_flat(cudaStream_t stream, const Operands& operands, std::int64_t count,
                 const Gradient& pieces, const Tensor& pool_counters) {
  const MomentCut cut = moment_cut(operands, count);
  static const bool filled = [&] {  // a process has one stream: what follows finds them
    Launch{(kBins + kThreads - 1) / kThreads, kThreads, 0, stream}(fill_encode_tables_kernel);
    return true;
  }();
  static_cast<void>(filled);
  auto* const pools = reinterpret_cast<std::uint32_t*>(pool_counters.as<std::int32_t>());
  Launch{1, kPools * kPoolStride, 0, stream}(zero_pools_kernel, pools);
  const unsigned blocks = grid_blocks((std::int64_t{cut.total_chunks} + kFlatWarps - 1) / kFlatWarps, 1);
  for_held(operands, [&]<typename Held>() {
    constexpr int kBytes = static_cast<int>(sizeof(FlatShared));
    expect_success(cudaFuncSetAttribute(adamw_flat_kernel<Held, Gradient>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                   "adamw_update");
    Launch{blocks, kFlatThreads, kBytes, stream}(adamw_flat_kernel<Held, Gradient>, operands, cut,
                                                 pieces, pools);
  });
}

}  // namespace

void CudaBackend::adamw_update(const Context& context, const AdamwTensors& tensors,
                               const AdamwStep& step, const RandomKey& key) {
  check_operands(tensors, step);
  const Arena::Scope scope(context.workspace);
  const Tensor pools = take_pools(context);
  if (context.workspace.is_measuring() || tensors.weight.count() == 0) return;
  const Operands operands = operands_of(tensors, step, key);
  const cudaStream_t stream = stream_of(context.stream);
  const std::int64_t groups = operands.gradient.groups;
  if (is_flat(operands) && has_room_for_maps()) {
    launch_flat(stream, operands, tensors.weight.count(), OneGradient{}, pools);
  } else if (goes_by_chunk(operands)) {
    const unsigned blocks =
        grid_blocks((groups * kChunks + kWarps - 1) / kWarps, kBlocksPerMultiprocessor);
    for_held(operands, [&]<typename Held>() {
      Launch{blocks, kThreads, 0, stream}(adamw_kernel<Held>, operands);
    });
  } else {
    const unsigned blocks = grid_blocks((groups + kWarps - 1) / kWarps, kBlocksPerMultiprocessor);
    Launch{blocks, kThreads, 0, stream}(adamw_any_kernel, operands);
  }
  expect_launched("adamw_update");
}

void CudaBackend::adamw_update_pieces(const Context& context, std::span<const QuantTensor> gradients,
                                      const AdamwTensors& tensors, const AdamwStep& step,
                                      const RandomKey& key) {
  const auto by_sums = [&] { Backend::adamw_update_pieces(context, gradients, tensors, step, key); };
  // A plan has to have room for either.
  if (context.workspace.is_measuring() || gradients.size() < 2 || gradients.size() > kMostPieces)
    return by_sums();
  expect_pieces("adamw_update_pieces", gradients, tensors.first_moment.grid);
  AdamwTensors with_first = tensors;
  with_first.gradient = gradients.front();
  check_operands(with_first, step);
  if (tensors.weight.count() == 0) return;
  Operands operands = operands_of(with_first, step, key);
  operands.gradient = view_of_all(gradients);
  if (!is_flat(operands) || !has_room_for_maps()) return by_sums();
  const Arena::Scope scope(context.workspace);
  launch_flat(stream_of(context.stream), operands, tensors.weight.count(),
              GradientPieces{planes_of(gradients)}, take_pools(context));
  expect_launched("adamw_update_pieces");
}

}  // namespace agoq::cuda

// What the plain attention kernels share: tiles of heads in shared memory and products of tiles.
//
// A block owns kOwn rows (tokens) of one head and streams the rows of the other side past them, kStream
// at a time. A warp owns 16 of the block's rows and works on kChunk = 16 streamed rows at a time. Two
// products make up everything:
//
//   scores   s[16 x 16] += A[16 x d] B[16 x d]^T          A: the warp's rows, B: a chunk
//   weighted o[16 x d]  += w[16 x 16] B[16 x d]           w: in registers
//
// Layout of a 16 x 8 n matrix in the registers of a warp (that of mma.sync's m16n8 accumulators): lane
// 4 g + t holds, of column group j, [j][0..1] = row g, columns 8 j + 2 t and 8 j + 2 t + 1, and
// [j][2..3] the same columns of row g + 8. A row lies in four neighbouring lanes.
//
// BF16 goes through the tensor cores, with FP32 sums; w is rounded to BF16. FP32 keeps FP32 throughout
// and the same layout. Sums run in a fixed order: nothing depends on the launch.
//
// Documents. Query i sees keys [first token of its document, i]. Tiles start at multiples of their size
// in the micro-batch, not in the document, and a tile may hold several documents: rows carry their own
// bounds, so no list of tiles is needed.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/launch.cuh"

namespace agoq::cuda::attention {

inline constexpr int kRows = 16;   // of a warp
inline constexpr int kChunk = 16;  // streamed rows per step
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

struct Geometry {
  std::int64_t tokens, qkv_width, out_width;
  const std::int32_t* starts;
  std::int64_t documents;
  int heads, kv_heads, size;
  float scale;  // 1 / sqrt(size)

  __host__ __device__ int group() const { return heads / kv_heads; }
  __host__ __device__ std::int64_t query(int head) const { return std::int64_t{head} * size; }
  __host__ __device__ std::int64_t key(int kv_head) const {
    return std::int64_t{heads + kv_head} * size;
  }
  __host__ __device__ std::int64_t value(int kv_head) const {
    return std::int64_t{heads + kv_heads + kv_head} * size;
  }
};

/// Tile sizes for heads of up to kSize elements; shared memory holds two own and two streamed tiles at
/// most. Rows are padded by 16 bytes, so that eight of them lie in different banks.
template <typename Storage, int kSize>
struct Tiling {
  static constexpr int kRowBytes = kSize * static_cast<int>(sizeof(Storage));
  static constexpr int kWarps = kRowBytes <= 512 ? 4 : 2;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kOwn = kWarps * kRows;
  static constexpr int kStream = kRowBytes <= 256 ? 64 : 16;
  static constexpr int kStride = kSize + 16 / static_cast<int>(sizeof(Storage));  // elements
  static constexpr int kOwnElements = kOwn * kStride;
  static constexpr int kStreamElements = kStream * kStride;
};

/// `count` rows of `size` elements, `stride` apart, as `rows` rows of kSize; zeros elsewhere.
template <typename T>
struct TileSource {
  const T* data;
  std::int64_t stride;
  int size;
};

template <int kSize, int kStride, int kThreads, typename Storage>
__device__ __forceinline__ void load_tile(const TileSource<Storage>& source, std::int64_t first,
                                          std::int64_t tokens, int rows, Storage* tile) {
  constexpr int kElements = 16 / static_cast<int>(sizeof(Storage));  // of one access
  constexpr int kPieces = kSize / kElements;
  const Storage* const begin = source.data + first * source.stride;
  for (int i = threadIdx.x; i < rows * kPieces; i += kThreads) {
    const int row = i / kPieces, column = i % kPieces * kElements;
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (first + row < tokens && column < source.size) {
      piece = *reinterpret_cast<const uint4*>(begin + row * source.stride + column);
    }
    *reinterpret_cast<uint4*>(tile + row * kStride + column) = piece;
  }
}

struct Bounds {
  std::int64_t first, last;  // of the document: [first, last)
};

/// The document of `token`, found by bisection; empty documents hold no token.
__device__ __forceinline__ Bounds document_of(const Geometry& g, std::int64_t token) {
  std::int64_t low = 0, high = g.documents;  // starts[low] <= token < starts[high]
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    if (g.starts[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const std::int64_t last = g.starts[low + 1];
  return {g.starts[low], last < g.tokens ? last : g.tokens};
}

template <int kGroups>
using Matrix = float[kGroups][4];

template <int kGroups>
__device__ __forceinline__ void clear(Matrix<kGroups>& matrix) {
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) matrix[j][i] = 0.0f;
  }
}

__device__ __forceinline__ int lane() { return threadIdx.x % kWarp; }
/// Row of elements [j][0..1]; elements [j][2..3] lie 8 rows below.
__device__ __forceinline__ int row_in_warp() { return lane() / 4; }
/// Column of element [j][0], less 8 j.
__device__ __forceinline__ int column_in_group() { return lane() % 4 * 2; }

// --- BF16: tensor cores ---

__device__ __forceinline__ void load_matrices(const Bf16* row, std::uint32_t (&words)[4]) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_transposed(const Bf16* row, std::uint32_t (&words)[4]) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void multiply(const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                                         float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

template <int kSize, int kStride>
__device__ __forceinline__ void add_scores(const Bf16* a, const Bf16* b, Matrix<2>& scores) {
  const int in = lane() % 8, quarter = lane() / 8;
  // The four 8 x 8 pieces in the order of the operands' registers: of A by rows first, of B by columns.
  const Bf16* const a_row = a + (in + quarter % 2 * 8) * kStride + quarter / 2 * 8;
  const Bf16* const b_row = b + (in + quarter / 2 * 8) * kStride + quarter % 2 * 8;
#pragma unroll
  for (int k = 0; k < kSize; k += 16) {
    std::uint32_t left[4], right[4];
    load_matrices(a_row + k, left);
    load_matrices(b_row + k, right);
    multiply(left, right[0], right[1], scores[0]);
    multiply(left, right[2], right[3], scores[1]);
  }
}

/// Columns [kFirst, kFirst + 8 kGroups) of B.
template <int kStride, int kGroups>
__device__ __forceinline__ void add_weighted(const Matrix<2>& weights, const Bf16* b,
                                             Matrix<kGroups>& sum) {
  const int in = lane() % 8, quarter = lane() / 8;
  const std::uint32_t left[4] = {pack(weights[0][0], weights[0][1]), pack(weights[0][2], weights[0][3]),
                                 pack(weights[1][0], weights[1][1]), pack(weights[1][2], weights[1][3])};
  const Bf16* const b_row = b + (in + quarter % 2 * 8) * kStride + quarter / 2 * 8;
#pragma unroll
  for (int j = 0; j < kGroups; j += 2) {
    std::uint32_t right[4];
    load_transposed(b_row + 8 * j, right);
    multiply(left, right[0], right[1], sum[j]);
    multiply(left, right[2], right[3], sum[j + 1]);
  }
}

// --- FP32 ---

__device__ __forceinline__ float dot4(const float4& a, const float4& b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

template <int kSize, int kStride>
__device__ __forceinline__ void add_scores(const float* a, const float* b, Matrix<2>& scores) {
  const float* const a_row = a + row_in_warp() * kStride;
  const float* const b_row = b + column_in_group() * kStride;
#pragma unroll 4
  for (int k = 0; k < kSize; k += 4) {
    const auto at = [k](const float* row) { return *reinterpret_cast<const float4*>(row + k); };
    const float4 upper = at(a_row), lower = at(a_row + 8 * kStride);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 left = at(b_row + 8 * j * kStride), right = at(b_row + (8 * j + 1) * kStride);
      scores[j][0] = dot4(upper, left, scores[j][0]);
      scores[j][1] = dot4(upper, right, scores[j][1]);
      scores[j][2] = dot4(lower, left, scores[j][2]);
      scores[j][3] = dot4(lower, right, scores[j][3]);
    }
  }
}

template <int kStride, int kGroups>
__device__ __forceinline__ void add_weighted(const Matrix<2>& weights, const float* b,
                                             Matrix<kGroups>& sum) {
  const float* const columns = b + column_in_group();
#pragma unroll
  for (int k = 0; k < kChunk; ++k) {
    // The weight of streamed row k lies in lane k % 8 / 2 of the four that share a row.
    const int source = lane() / 4 * 4 + k % 8 / 2;
    const float upper = __shfl_sync(kWholeWarp, weights[k / 8][k % 2], source);
    const float lower = __shfl_sync(kWholeWarp, weights[k / 8][k % 2 + 2], source);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      const float2 right = *reinterpret_cast<const float2*>(columns + k * kStride + 8 * j);
      sum[j][0] = fmaf(upper, right.x, sum[j][0]);
      sum[j][1] = fmaf(upper, right.y, sum[j][1]);
      sum[j][2] = fmaf(lower, right.x, sum[j][2]);
      sum[j][3] = fmaf(lower, right.y, sum[j][3]);
    }
  }
}

// --- results ---

__device__ __forceinline__ void store_pair(float first, float second, float* to) {
  *reinterpret_cast<float2*>(to) = make_float2(first, second);
}
__device__ __forceinline__ void store_pair(float first, float second, Bf16* to) {
  *reinterpret_cast<std::uint32_t*>(to) = pack(first, second);
}

/// The warp's rows times a factor per row (upper for row g, lower for g + 8) to tokens [first, tokens).
template <int kGroups, typename Storage>
__device__ __forceinline__ void store_rows(const Matrix<kGroups>& matrix, float upper, float lower,
                                           Storage* to, std::int64_t stride, std::int64_t first,
                                           std::int64_t tokens, int columns) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t token = first + row_in_warp() + 8 * half;
    if (token >= tokens) continue;
    const float factor = half == 0 ? upper : lower;
    Storage* const row = to + token * stride + column_in_group();
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
      if (8 * j >= columns) break;
      store_pair(matrix[j][2 * half] * factor, matrix[j][2 * half + 1] * factor, row + 8 * j);
    }
  }
}

/// Calls run.operator()<kSize>() for the smallest tiling that takes heads of `size`.
template <typename Run>
void for_size(int size, Run run) {
  if (size <= 64) return run.template operator()<64>();
  if (size <= 128) return run.template operator()<128>();
  return run.template operator()<256>();
}

/// The kernels, each for FP32 and BF16 (attention.cu, attention_backward.cu).
template <typename Storage>
void launch_forward(const Geometry& g, const Storage* qkv, Storage* out, float* log_sum_exp,
                    cudaStream_t stream);
/// delta [N, heads] is scratch.
template <typename Storage>
void launch_backward(const Geometry& g, const Storage* dout, const Storage* qkv, const Storage* out,
                     const float* log_sum_exp, float* delta, Storage* dqkv, cudaStream_t stream);

}  // namespace agoq::cuda::attention

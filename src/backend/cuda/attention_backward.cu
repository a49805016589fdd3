// Causal grouped-query attention within documents: the backward pass of the plain kernels.
//
// With p_ij = exp(s_ij - L_i) and D_i = do_i o_i (see attention.cu):
//   dv_j = sum_i p_ij do_i    ds_ij = p_ij (do_i v_j - D_i)
//   dq_i = scale sum_j ds_ij k_j    dk_j = scale sum_i ds_ij q_i, sums over the query heads of a group
//
// Ownership (attention_tiles.cuh). Three kernels, none of which adds to what another block wrote, so the
// result is the same bits in every run:
//   delta    eight lanes per (token, head)
//   dq       a block owns kOwn queries of one head and streams keys and values
//   dk, dv   a block owns kOwn keys of one kv head and streams the queries of the heads that share it;
//            score tiles are [keys, queries] there. Heads of more than kColumns elements are computed in
//            as many passes of a block each over the columns of dk and dv: the registers hold no more.
#include "backend/cuda/attention_tiles.cuh"
#include "backend/cuda/cuda_backend.h"

namespace agoq::cuda::attention {
namespace {

constexpr int kColumns = 128;
constexpr int kNever = 0x7FFFFFFF;
constexpr float kMinusInfinity = -INFINITY;

constexpr int kDeltaThreads = 256, kDeltaLanes = 8;

template <typename Storage>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(Geometry g, const Storage* dout, const Storage* out, float* delta) {
  await_predecessors();
  const std::int64_t index = std::int64_t{blockIdx.x} * (kDeltaThreads / kDeltaLanes) +
                             threadIdx.x / kDeltaLanes;  // token * heads + head
  const bool present = index < g.tokens * g.heads;
  float sum = 0.0f;
  if (present) {
    for (int i = threadIdx.x % kDeltaLanes * kVector; i < g.size; i += kDeltaLanes * kVector) {
      float a[kVector], b[kVector];
      load_vector(dout + index * g.size + i, a);
      load_vector(out + index * g.size + i, b);
#pragma unroll
      for (int k = 0; k < kVector; ++k) sum = fmaf(a[k], b[k], sum);
    }
  }
#pragma unroll
  for (int lanes = kDeltaLanes / 2; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(kWholeWarp, sum, lanes);
  }
  if (present && threadIdx.x % kDeltaLanes == 0) delta[index] = sum;
}

template <typename Storage, int kSize>
__global__ void __launch_bounds__(Tiling<Storage, kSize>::kThreads)
    dquery_kernel(Geometry g, const Storage* dout, const Storage* qkv, const float* log_sum_exp,
                  const float* delta, Storage* dqkv) {
  await_predecessors();
  using T = Tiling<Storage, kSize>;
  constexpr int kGroups = kSize / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  Storage* const queries = reinterpret_cast<Storage*>(shared);
  Storage* const douts = queries + T::kOwnElements;
  Storage* const keys = douts + T::kOwnElements;
  Storage* const values = keys + T::kStreamElements;

  const int head = blockIdx.x, kv_head = head / g.group();
  const int tokens = static_cast<int>(g.tokens);
  const int first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * T::kOwn;
  const int end = min(first + T::kOwn, tokens);
  const int in_block = static_cast<int>(threadIdx.x) / kWarp * kRows;
  const int warp_first = first + in_block;
  load_tile<kSize, T::kStride, T::kThreads>(
      TileSource<Storage>{qkv + g.query(head), g.qkv_width, g.size}, first, g.tokens, T::kOwn, queries);
  load_tile<kSize, T::kStride, T::kThreads>(
      TileSource<Storage>{dout + g.query(head), g.out_width, g.size}, first, g.tokens, T::kOwn, douts);

  int begin[2];
  float row_sum[2], row_delta[2];  // L in units of log2; D
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = warp_first + row_in_warp() + 8 * half;
    const bool present = token < tokens;
    const std::int64_t index = std::int64_t{token} * g.heads + head;
    begin[half] = present ? static_cast<int>(document_of(g, token).first) : kNever;
    row_sum[half] = present ? log_sum_exp[index] * kLog2e : 0.0f;
    row_delta[half] = present ? delta[index] : 0.0f;
  }
  const int least_begin = __shfl_sync(kWholeWarp, begin[0], 0);
  const int most_begin = __shfl_sync(kWholeWarp, begin[1], kWarp - 1);
  const float scale = g.scale * kLog2e;
  Matrix<kGroups> sum;
  clear<kGroups>(sum);

  for (int tile = static_cast<int>(document_of(g, first).first); tile < end; tile += T::kStream) {
    __syncthreads();
    load_tile<kSize, T::kStride, T::kThreads>(
        TileSource<Storage>{qkv + g.key(kv_head), g.qkv_width, g.size}, tile, g.tokens, T::kStream,
        keys);
    load_tile<kSize, T::kStride, T::kThreads>(
        TileSource<Storage>{qkv + g.value(kv_head), g.qkv_width, g.size}, tile, g.tokens, T::kStream,
        values);
    __syncthreads();
    for (int chunk = 0; chunk < T::kStream; chunk += kChunk) {
      const int key = tile + chunk;
      if (key >= warp_first + kRows) break;
      if (key + kChunk <= least_begin) continue;
      Matrix<2> scores, dscores;
      clear<2>(scores);
      clear<2>(dscores);
      add_scores<kSize, T::kStride>(queries + in_block * T::kStride, keys + chunk * T::kStride, scores);
      add_scores<kSize, T::kStride>(douts + in_block * T::kStride, values + chunk * T::kStride, dscores);
      const bool masked = key + kChunk > warp_first + 1 || key < most_begin;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = key + 8 * j + column_in_group() + i % 2;
          const int row = warp_first + row_in_warp() + i / 2 * 8;
          const bool seen = !masked || (column <= row && column >= begin[i / 2]);
          const float p = exp2f(seen ? fmaf(scores[j][i], scale, -row_sum[i / 2]) : kMinusInfinity);
          dscores[j][i] = p * (dscores[j][i] - row_delta[i / 2]);
        }
      }
      add_weighted<T::kStride, kGroups>(dscores, keys + chunk * T::kStride, sum);
    }
  }
  store_rows<kGroups>(sum, g.scale, g.scale, dqkv + g.query(head), g.qkv_width, warp_first, g.tokens,
                      g.size);
}

template <typename Storage, int kSize>
__global__ void __launch_bounds__(Tiling<Storage, kSize>::kThreads)
    dkey_dvalue_kernel(Geometry g, const Storage* dout, const Storage* qkv, const float* log_sum_exp,
                       const float* delta, Storage* dqkv) {
  await_predecessors();
  using T = Tiling<Storage, kSize>;
  constexpr int kOut = kSize < kColumns ? kSize : kColumns, kGroups = kOut / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  Storage* const keys = reinterpret_cast<Storage*>(shared);
  Storage* const values = keys + T::kOwnElements;
  Storage* const queries = values + T::kOwnElements;
  Storage* const douts = queries + T::kStreamElements;
  float* const sums = reinterpret_cast<float*>(douts + T::kStreamElements);  // L in units of log2
  float* const deltas = sums + T::kStream;

  const int kv_head = blockIdx.x, first_column = static_cast<int>(blockIdx.z) * kOut;
  const int tokens = static_cast<int>(g.tokens);
  const int first = static_cast<int>(blockIdx.y) * T::kOwn;
  const int in_block = static_cast<int>(threadIdx.x) / kWarp * kRows;
  const int warp_first = first + in_block;
  load_tile<kSize, T::kStride, T::kThreads>(
      TileSource<Storage>{qkv + g.key(kv_head), g.qkv_width, g.size}, first, g.tokens, T::kOwn, keys);
  load_tile<kSize, T::kStride, T::kThreads>(
      TileSource<Storage>{qkv + g.value(kv_head), g.qkv_width, g.size}, first, g.tokens, T::kOwn,
      values);

  const auto end_of = [&](int token) {  // of the document of the token, or of the last
    return static_cast<int>(document_of(g, min(token, tokens - 1)).last);
  };
  int end[2];  // one past the last query that sees the row; nothing sees rows beyond the last token
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = warp_first + row_in_warp() + 8 * half;
    end[half] = token < tokens ? end_of(token) : 0;
  }
  const bool whole = warp_first + kRows <= tokens;
  const int least_end = end_of(warp_first), most_end = end_of(warp_first + kRows - 1);
  const int block_end = end_of(first + T::kOwn - 1);
  const float scale = g.scale * kLog2e;
  Matrix<kGroups> dkey, dvalue;
  clear<kGroups>(dkey);
  clear<kGroups>(dvalue);

  for (int head = kv_head * g.group(); head < (kv_head + 1) * g.group(); ++head) {
    for (int tile = first; tile < block_end; tile += T::kStream) {
      __syncthreads();
      load_tile<kSize, T::kStride, T::kThreads>(
          TileSource<Storage>{qkv + g.query(head), g.qkv_width, g.size}, tile, g.tokens, T::kStream,
          queries);
      load_tile<kSize, T::kStride, T::kThreads>(
          TileSource<Storage>{dout + g.query(head), g.out_width, g.size}, tile, g.tokens, T::kStream,
          douts);
      if (threadIdx.x < T::kStream) {
        const int token = tile + static_cast<int>(threadIdx.x);
        const std::int64_t index = std::int64_t{token} * g.heads + head;
        sums[threadIdx.x] = token < tokens ? log_sum_exp[index] * kLog2e : 0.0f;
        deltas[threadIdx.x] = token < tokens ? delta[index] : 0.0f;
      }
      __syncthreads();
      for (int chunk = 0; chunk < T::kStream; chunk += kChunk) {
        const int query = tile + chunk;
        if (query >= most_end) break;
        if (query + kChunk <= warp_first) continue;
        Matrix<2> weights, dscores;
        clear<2>(weights);
        clear<2>(dscores);
        add_scores<kSize, T::kStride>(keys + in_block * T::kStride, queries + chunk * T::kStride,
                                      weights);
        add_scores<kSize, T::kStride>(values + in_block * T::kStride, douts + chunk * T::kStride,
                                      dscores);
        const bool masked = !whole || query < warp_first + kRows - 1 || query + kChunk > least_end;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = chunk + 8 * j + column_in_group();
          const float2 row_sum = *reinterpret_cast<const float2*>(sums + column);
          const float2 row_delta = *reinterpret_cast<const float2*>(deltas + column);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = tile + column + i % 2, row = warp_first + row_in_warp() + i / 2 * 8;
            const bool seen = !masked || (token >= row && token < end[i / 2]);
            const float p =
                exp2f(seen ? fmaf(weights[j][i], scale, -(i % 2 == 0 ? row_sum.x : row_sum.y))
                           : kMinusInfinity);
            weights[j][i] = p;
            dscores[j][i] = p * (dscores[j][i] - (i % 2 == 0 ? row_delta.x : row_delta.y));
          }
        }
        add_weighted<T::kStride, kGroups>(weights, douts + chunk * T::kStride + first_column, dvalue);
        add_weighted<T::kStride, kGroups>(dscores, queries + chunk * T::kStride + first_column, dkey);
      }
    }
  }
  const int columns = g.size - first_column;
  store_rows<kGroups>(dkey, g.scale, g.scale, dqkv + g.key(kv_head) + first_column, g.qkv_width,
                      warp_first, g.tokens, columns);
  store_rows<kGroups>(dvalue, 1.0f, 1.0f, dqkv + g.value(kv_head) + first_column, g.qkv_width,
                      warp_first, g.tokens, columns);
}

}  // namespace

template <typename Storage>
void launch_backward(const Geometry& g, const Storage* dout, const Storage* qkv, const Storage* out,
                     const float* log_sum_exp, float* delta, Storage* dqkv, cudaStream_t stream) {
  constexpr std::int64_t kPerBlock = kDeltaThreads / kDeltaLanes;
  const auto blocks = static_cast<unsigned>((g.tokens * g.heads + kPerBlock - 1) / kPerBlock);
  Launch{blocks, kDeltaThreads, 0, stream}(delta_kernel<Storage>, g, dout, out, delta);
  for_size(g.size, [&]<int kSize>() {
    using T = Tiling<Storage, kSize>;
    constexpr int kTiles =
        2 * (T::kOwnElements + T::kStreamElements) * static_cast<int>(sizeof(Storage));
    constexpr int kStatistics = 2 * T::kStream * static_cast<int>(sizeof(float));
    const auto prepare = [](auto kernel, int bytes) {
      expect_success(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                     "attention_backward");
    };
    const auto tiles = static_cast<unsigned>((g.tokens + T::kOwn - 1) / T::kOwn);
    prepare(dquery_kernel<Storage, kSize>, kTiles);
    Launch{dim3(static_cast<unsigned>(g.heads), tiles), T::kThreads, kTiles, stream}(
        dquery_kernel<Storage, kSize>, g, dout, qkv, log_sum_exp, delta, dqkv);
    prepare(dkey_dvalue_kernel<Storage, kSize>, kTiles + kStatistics);
    const unsigned passes = kSize <= kColumns ? 1 : kSize / kColumns;
    Launch{dim3(static_cast<unsigned>(g.kv_heads), tiles, passes), T::kThreads, kTiles + kStatistics,
           stream}(dkey_dvalue_kernel<Storage, kSize>, g, dout, qkv, log_sum_exp, delta, dqkv);
  });
}

template void launch_backward<float>(const Geometry&, const float*, const float*, const float*,
                                     const float*, float*, float*, cudaStream_t);
template void launch_backward<Bf16>(const Geometry&, const Bf16*, const Bf16*, const Bf16*, const float*,
                                    float*, Bf16*, cudaStream_t);

}  // namespace agoq::cuda::attention

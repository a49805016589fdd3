// Causal grouped-query attention within documents: the forward pass of the plain kernels, and the choice
// between them and cuDNN.
//
// For a query i, the keys j <= i of its document, and scale = 1 / sqrt(head size):
//   s_ij = scale q_i k_j    L_i = log sum_j exp(s_ij)    o_i = sum_j exp(s_ij - L_i) v_j
//
// Ownership (attention_tiles.cuh): a block owns kOwn queries of one head and streams keys and values; a
// lane keeps the maximum and its part of the sum of two queries, in units of log2.
#include "backend/cuda/attention_tiles.cuh"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/libraries.h"
#include "backend/cuda/ragged_offsets.h"
#include "backend/operand_checks.h"

namespace agoq::cuda {
namespace attention {
namespace {

constexpr float kMinusInfinity = -INFINITY;
// The start of a running maximum: with minus infinity the first difference would be NaN.
constexpr float kLowest = -3.402823466e38f;
constexpr int kNever = 0x7FFFFFFF;  // a bound that no token reaches

__device__ __forceinline__ float max_of_row(float value) {
  value = fmaxf(value, __shfl_xor_sync(kWholeWarp, value, 1));
  return fmaxf(value, __shfl_xor_sync(kWholeWarp, value, 2));
}
__device__ __forceinline__ float sum_of_row(float value) {
  value += __shfl_xor_sync(kWholeWarp, value, 1);
  return value + __shfl_xor_sync(kWholeWarp, value, 2);
}

/// Largest score so far and sum of exp2(score - most), of rows g and g + 8; the sum is this lane's part.
struct RunningSoftmax {
  float most[2] = {kLowest, kLowest};
  float total[2] = {0.0f, 0.0f};

  /// Scores to weights; returns the factors by which earlier sums shrink.
  template <int kParts>
  __device__ __forceinline__ void update(Matrix<2> (&scores)[kParts], float (&correction)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = most[half];
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          largest = fmaxf(largest, fmaxf(scores[p][j][2 * half], scores[p][j][2 * half + 1]));
        }
      }
      largest = max_of_row(largest);
      correction[half] = exp2f(most[half] - largest);
      most[half] = largest;
      float sum = total[half] * correction[half];
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            scores[p][j][i] = exp2f(scores[p][j][i] - largest);
            sum += scores[p][j][i];
          }
        }
      }
      total[half] = sum;
    }
  }
};

template <typename Storage, int kSize>
__global__ void __launch_bounds__(Tiling<Storage, kSize>::kThreads)
    forward_kernel(Geometry g, const Storage* qkv, Storage* out, float* log_sum_exp) {
  await_predecessors();
  using T = Tiling<Storage, kSize>;
  constexpr int kKeys = T::kStream < 32 ? T::kStream : 32, kParts = kKeys / kChunk;
  constexpr int kGroups = kSize / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  Storage* const queries = reinterpret_cast<Storage*>(shared);
  Storage* const keys = queries + T::kOwnElements;
  Storage* const values = keys + T::kStreamElements;

  const int head = blockIdx.x, kv_head = head / g.group();
  const int tokens = static_cast<int>(g.tokens);
  // The last tiles have the most keys: they go first.
  const int first = static_cast<int>(gridDim.y - 1 - blockIdx.y) * T::kOwn;
  const int end = min(first + T::kOwn, tokens);
  const int warp_first = first + static_cast<int>(threadIdx.x) / kWarp * kRows;
  const Storage* const own = queries + (warp_first - first) * T::kStride;
  load_tile<kSize, T::kStride, T::kThreads>(
      TileSource<Storage>{qkv + g.query(head), g.qkv_width, g.size}, first, g.tokens, T::kOwn, queries);

  int begin[2];  // of the document of each row; rows beyond the last token see nothing
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = warp_first + row_in_warp() + 8 * half;
    begin[half] = token < tokens ? static_cast<int>(document_of(g, token).first) : kNever;
  }
  const int least_begin = __shfl_sync(kWholeWarp, begin[0], 0);
  const int most_begin = __shfl_sync(kWholeWarp, begin[1], kWarp - 1);
  const float scale = g.scale * kLog2e;
  RunningSoftmax softmax;
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
    for (int chunk = 0; chunk < T::kStream; chunk += kKeys) {
      const int key = tile + chunk;
      if (key >= warp_first + kRows) break;
      if (key + kKeys <= least_begin) continue;
      Matrix<2> scores[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        clear<2>(scores[p]);
        add_scores<kSize, T::kStride>(own, keys + (chunk + p * kChunk) * T::kStride, scores[p]);
      }
      const bool masked = key + kKeys > warp_first + 1 || key < most_begin;
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int column = key + p * kChunk + 8 * j + column_in_group() + i % 2;
            const int row = warp_first + row_in_warp() + i / 2 * 8;
            const bool seen = !masked || (column <= row && column >= begin[i / 2]);
            scores[p][j][i] = seen ? scores[p][j][i] * scale : kMinusInfinity;
          }
        }
      }
      float correction[2];
      softmax.update<kParts>(scores, correction);
      if (__any_sync(kWholeWarp, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[j][i] *= correction[i / 2];
        }
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        add_weighted<T::kStride, kGroups>(scores[p], values + (chunk + p * kChunk) * T::kStride, sum);
      }
    }
  }

  const float upper = sum_of_row(softmax.total[0]), lower = sum_of_row(softmax.total[1]);
  store_rows<kGroups>(sum, 1.0f / upper, 1.0f / lower, out + g.query(head), g.out_width, warp_first,
                      g.tokens, g.size);
  if (lane() % 4 != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = warp_first + row_in_warp() + 8 * half;
    if (token >= tokens) continue;
    log_sum_exp[std::int64_t{token} * g.heads + head] =
        (softmax.most[half] + log2f(half == 0 ? upper : lower)) * kLn2;
  }
}

__global__ void ragged_offsets_kernel(const std::int32_t* starts, std::int64_t count, std::int64_t batch,
                                      std::int64_t qkv_width, std::int64_t out_width,
                                      std::int64_t kv_width, std::int64_t heads, RaggedOffsets offsets) {
  await_predecessors();
  const std::int64_t d = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (d > batch) return;
  const std::int64_t start = starts[d < count ? d : count];
  offsets.qkv[d] = start * qkv_width;
  offsets.out[d] = start * out_width;
  offsets.kv[d] = start * kv_width;
  offsets.statistics[d] = start * heads;
  if (d < batch) offsets.lengths[d] = d < count ? starts[d + 1] - static_cast<std::int32_t>(start) : 0;
}

}  // namespace

template <typename Storage>
void launch_forward(const Geometry& g, const Storage* qkv, Storage* out, float* log_sum_exp,
                    cudaStream_t stream) {
  for_size(g.size, [&]<int kSize>() {
    using T = Tiling<Storage, kSize>;
    constexpr int kBytes =
        (T::kOwnElements + 2 * T::kStreamElements) * static_cast<int>(sizeof(Storage));
    expect_success(cudaFuncSetAttribute(forward_kernel<Storage, kSize>,
                                        cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                   "attention_forward");
    const dim3 grid(static_cast<unsigned>(g.heads),
                    static_cast<unsigned>((g.tokens + T::kOwn - 1) / T::kOwn));
    Launch{grid, T::kThreads, kBytes, stream}(forward_kernel<Storage, kSize>, g, qkv, out, log_sum_exp);
  });
}

namespace {

void check_shapes(std::string_view operation, const AttentionShape& shape, const Tensor& qkv,
                  const Tensor& out, const Tensor& log_sum_exp, const Documents& documents) {
  check(
      shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0 && shape.head_size > 0,
      "{}: {} heads must be a multiple of {} kv heads, of size {}", operation, shape.heads,
      shape.kv_heads, shape.head_size);
  check_input(
      shape.head_size % 8 == 0 && shape.head_size <= 256,
      "{}: on the GPU model.head_size is a multiple of 8 up to 256 and is {}: choose another, or "
      "run on the CPU (--set run.device=cpu)",
      operation, shape.head_size);
  expect(operation, "qkv", qkv, qkv.type, qkv.rows(), shape.qkv_width());
  expect(operation, "out", out, qkv.type, qkv.rows(), shape.output_width());
  expect(operation, "log_sum_exp", log_sum_exp, ElementType::kFp32, qkv.rows(), shape.heads);
  // Its memory may be planned for more documents than there are.
  check(documents.starts && documents.starts.type == ElementType::kInt32 &&
            documents.starts.count() > documents.count,
        "{}: documents.starts must be int32 with {} elements or more and is {} {}", operation,
        documents.count + 1, name_of(documents.starts.type), documents.starts.shape.to_string());
  check(qkv.rows() == 0 || (documents.count > 0 && documents.longest > 0),
        "{}: {} tokens in {} documents of up to {}", operation, qkv.rows(), documents.count,
        documents.longest);
  check(qkv.rows() <= std::int64_t{65535} * kRows * 2, "{}: {} tokens are more than the grid counts",
        operation, qkv.rows());
}

void check_aligned(std::string_view operation, std::initializer_list<Tensor> tensors) {
  for (const Tensor& tensor : tensors) {
    check(reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0,
          "{}: tensors start at multiples of 16 bytes", operation);
  }
}

Geometry geometry_of(const AttentionShape& shape, const Tensor& qkv, const Documents& documents) {
  Geometry g{};
  g.tokens = qkv.rows();
  g.qkv_width = shape.qkv_width(), g.out_width = shape.output_width();
  g.starts = documents.starts.as<std::int32_t>(), g.documents = documents.count;
  g.heads = shape.heads, g.kv_heads = shape.kv_heads, g.size = shape.head_size;
  g.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_size));
  return g;
}

/// Whether cuDNN may be asked, and so its workspace has to be there.
bool asks_cudnn(Libraries& libraries, ElementType type) {
  return type == ElementType::kBf16 && !libraries.deterministic && libraries.attention.available();
}

/// The largest divisor of kv_heads up to the groups that were set: a model's heads need not have them.
int groups_of(Libraries& libraries, const AttentionShape& shape) {
  int groups = std::min(libraries.attention_groups, shape.kv_heads);
  while (shape.kv_heads % groups != 0) --groups;
  return groups;
}

}  // namespace
}  // namespace attention

void CudaBackend::set_attention_groups(int groups) {
  check(groups >= 1, "attention is computed in 1 group or more; {} were asked for", groups);
  libraries().attention_groups = groups;
}

void make_ragged_offsets(const std::int32_t* starts, std::int64_t count, std::int64_t batch,
                         std::int64_t qkv_width, std::int64_t out_width, std::int64_t kv_width,
                         std::int64_t heads, const RaggedOffsets& offsets, cudaStream_t stream) {
  constexpr int kThreads = 128;
  Launch{static_cast<unsigned>(batch / kThreads + 1), kThreads, 0, stream}(
      attention::ragged_offsets_kernel, starts, count, batch, qkv_width, out_width, kv_width, heads,
      offsets);
  expect_launched("attention");
}

void CudaBackend::attention_forward(const Context& context, const AttentionShape& shape,
                                    const Tensor& qkv, const Documents& documents, const Tensor& out,
                                    const Tensor& log_sum_exp) {
  using namespace attention;
  check_shapes("attention_forward", shape, qkv, out, log_sum_exp, documents);
  const Arena::Scope scope(context.workspace);
  const bool cudnn = asks_cudnn(libraries(), qkv.type);
  std::byte* const workspace =
      cudnn ? context.workspace.take(CudnnAttention::planned_bytes(shape, qkv.rows(), false, 1))
            : nullptr;
  if (context.workspace.is_measuring() || qkv.rows() == 0) return;
  check_aligned("attention_forward", {qkv, out});
  if (cudnn &&
      libraries().attention.forward(context, shape, qkv, documents, out, log_sum_exp, workspace)) {
    return;
  }
  for_storage("attention_forward", qkv.type, [&]<typename Storage>() {
    launch_forward<Storage>(geometry_of(shape, qkv, documents), qkv.as<Storage>(), out.as<Storage>(),
                            log_sum_exp.as<float>(), stream_of(context.stream));
  });
  expect_launched("attention_forward");
}

void CudaBackend::attention_backward(const Context& context, const AttentionShape& shape,
                                     const Tensor& dout, const Tensor& qkv, const Tensor& out,
                                     const Tensor& log_sum_exp, const Documents& documents,
                                     const Tensor& dqkv) {
  using namespace attention;
  check_shapes("attention_backward", shape, qkv, out, log_sum_exp, documents);
  expect("attention_backward", "dout", dout, qkv.type, qkv.rows(), shape.output_width());
  expect("attention_backward", "dqkv", dqkv, qkv.type, qkv.rows(), shape.qkv_width());
  check(dqkv.data != qkv.data, "attention_backward: dqkv must not be qkv: it is read to the end");
  const Arena::Scope scope(context.workspace);
  const bool cudnn = asks_cudnn(libraries(), qkv.type);
  const int groups = groups_of(libraries(), shape);
  const auto plain_bytes = static_cast<std::size_t>(qkv.rows() * shape.heads) * sizeof(float);
  std::byte* const workspace = context.workspace.take(
      cudnn ? std::max(plain_bytes, CudnnAttention::planned_bytes(shape, qkv.rows(), true, groups))
            : plain_bytes);
  if (context.workspace.is_measuring() || qkv.rows() == 0) return;
  check_aligned("attention_backward", {dout, qkv, out, dqkv});
  if (cudnn && libraries().attention.backward(context, shape, dout, qkv, out, log_sum_exp, documents,
                                              dqkv, groups, workspace)) {
    return;
  }
  for_storage("attention_backward", qkv.type, [&]<typename Storage>() {
    launch_backward<Storage>(geometry_of(shape, qkv, documents), dout.as<Storage>(), qkv.as<Storage>(),
                             out.as<Storage>(), log_sum_exp.as<float>(),
                             reinterpret_cast<float*>(workspace), dqkv.as<Storage>(),
                             stream_of(context.stream));
  });
  expect_launched("attention_backward");
}

}  // namespace agoq::cuda

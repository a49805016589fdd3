// Cross-entropy of logits [C, V] against targets [C], weighted per token:
//   loss_c = w_c (L_c - logits_c[target_c]),   L_c = m + log sum exp(logits_c - m),  m = max logits_c
//   dlogits_c[v] = w_c (exp(logits_c[v] - L_c) - [v = target_c]); dlogits may lie over logits.
//
// A row belongs to one thread block. The first pass finds the maximum and the sum together: a thread
// keeps its largest logit so far and the sum of exp relative to it, and scales the sum when the maximum
// grows. The second pass, for the gradient, needs the logits again: the block keeps as many from the
// start of the row as fit into shared memory, and reads the others from the end backwards, so that those
// it read last, which the L2 cache still has, come first. A row of weight 0 is not read. A target
// outside the vocabulary makes the row's loss NaN and its gradient zero: the host cannot see it without
// waiting.
//
// exp(x) is ex2(x log2 e) by the hardware's approximation, of the difference x = logit - m or logit - L,
// taken first: the error is |x| 2^-24 + 2^-22 of a term of size exp(x), so that what is far below the
// maximum and imprecise does not count. Sums are in an order that the launch fixes.
#include <algorithm>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/launch.cuh"
#include "backend/operand_checks.h"

namespace agoq::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kUnroll = 16;  // logits of a thread on their way at once: 64 KiB per multiprocessor

__device__ __forceinline__ float exponential(float x) {
  constexpr float kLog2E = 1.44269504f;
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * kLog2E));
  return e;
}

/// What exp is taken relative to; 0 where every logit so far is -infinity.
__device__ __forceinline__ float reference(float most) { return most == -INFINITY ? 0.0f : most; }

__device__ __forceinline__ void store_once(float value, float* place) { __stcs(place, value); }
__device__ __forceinline__ void store_once(float value, Bf16* place) {
  Bf16 rounded;
  store(value, rounded);
  __stcs(&place->bits, rounded.bits);
}

/// Maximum and sum of exp over a block, in a fixed order. `slots` has a float per warp.
__device__ __forceinline__ float block_max(float value, float* slots) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  value = warp_max(value);
  if (threadIdx.x % kWarp == 0) slots[threadIdx.x / kWarp] = value;
  __syncthreads();
  float most = slots[0];
  for (int warp = 1; warp < warps; ++warp) most = fmaxf(most, slots[warp]);
  return most;
}
__device__ __forceinline__ float block_sum(float value, float* slots) {
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) slots[threadIdx.x / kWarp] = value;
  __syncthreads();
  float total = slots[0];
  for (int warp = 1; warp < warps; ++warp) total += slots[warp];
  return total;
}

/// `held`: logits of a row kept in dynamic shared memory. dlogits may be null.
template <typename Gradient>
__global__ void __launch_bounds__(kMaxThreads)
    cross_entropy_kernel(const float* logits, const std::int32_t* targets, const float* weights,
                         float* token_loss, Gradient* dlogits, int width, int held) {
  extern __shared__ float kept[];
  __shared__ float max_slots[kWarp], sum_slots[kWarp];
  const std::int64_t row = blockIdx.x;
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const float* const in = logits + row * width;
  Gradient* const out = dlogits == nullptr ? nullptr : dlogits + row * width;
  const float weight = weights[row];
  const std::int32_t target = targets[row];
  const bool in_range = target >= 0 && target < width;
  if (weight == 0.0f || !in_range) {
    if (out != nullptr) {
      for (int i = thread; i < width; i += threads) store_once(0.0f, out + i);
    }
    if (thread == 0) token_loss[row] = weight == 0.0f ? 0.0f : NAN;
    return;
  }
  const float of_target = in[target];  // before the gradient lies over it

  float most = -INFINITY, total = 0.0f;
  const int tile = threads * kUnroll;
  const auto take = [&](const float(&x)[kUnroll]) {
    float largest = x[0];
#pragma unroll
    for (int k = 1; k < kUnroll; ++k) largest = fmaxf(largest, x[k]);
    if (largest > most) {
      total *= exponential(most - largest);
      most = largest;
    }
    const float base = reference(most);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) total += exponential(x[k] - base);
  };
  int begin = 0;
  for (; begin + tile <= width; begin += tile) {
    float x[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) x[k] = in[begin + k * threads + thread];
    if (begin < held) {
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        if (begin + k * threads + thread < held) kept[begin + k * threads + thread] = x[k];
      }
    }
    take(x);
  }
  if (begin < width) {
    float x[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int i = begin + k * threads + thread;
      x[k] = i < width ? in[i] : -INFINITY;
      if (i < held) kept[i] = x[k];
    }
    take(x);
  }
  const float row_most = block_max(most, max_slots);
  // A thread without elements has most = -infinity and a sum of zeros.
  total *= most == -INFINITY ? 1.0f : exponential(most - row_most);
  const float log_sum_exp = row_most + logf(block_sum(total, sum_slots));
  if (thread == 0) token_loss[row] = weight * (log_sum_exp - of_target);
  if (out == nullptr) return;

  // Elements [held, width) from the end, then what is kept. A thread wrote the kept ones that it reads.
  int end = width;
  for (; end - tile >= held; end -= tile) {
    float x[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) x[k] = __ldcs(in + end - 1 - (k * threads + thread));
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      store_once(weight * exponential(x[k] - log_sum_exp), out + end - 1 - (k * threads + thread));
    }
  }
#pragma unroll 4
  for (int i = end - 1 - thread; i >= held; i -= threads) {
    store_once(weight * exponential(__ldcs(in + i) - log_sum_exp), out + i);
  }
#pragma unroll 8
  for (int i = thread; i < held; i += threads) {
    store_once(weight * exponential(kept[i] - log_sum_exp), out + i);
  }
  __syncthreads();  // after whichever thread wrote the target's element
  if (thread == 0) store_once(weight * exponential(of_target - log_sum_exp) - weight, out + target);
}

template <typename Gradient>
void launch(const Context& context, const Tensor& logits, const Tensor& targets, const Tensor& weights,
            const Tensor& token_loss, const Tensor& dlogits) {
  const int width = static_cast<int>(logits.width());
  const int wanted = (width + kUnroll - 1) / kUnroll;
  const int threads = std::min(kMaxThreads, (wanted + kWarp - 1) / kWarp * kWarp);
  int held = 0;
  if (dlogits) {
    int index = 0, most = 0;
    expect_success(cudaGetDevice(&index), "cross_entropy");
    expect_success(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
                   "cross_entropy");
    cudaFuncAttributes attributes;
    expect_success(cudaFuncGetAttributes(&attributes, cross_entropy_kernel<Gradient>), "cross_entropy");
    const int room =
        (most - static_cast<int>(attributes.sharedSizeBytes)) / static_cast<int>(sizeof(float));
    held = std::min(width, room);
    expect_success(
        cudaFuncSetAttribute(cross_entropy_kernel<Gradient>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             room * static_cast<int>(sizeof(float))),
        "cross_entropy");
  }
  cross_entropy_kernel<Gradient><<<static_cast<unsigned>(logits.rows()), threads, held * sizeof(float),
                                   stream_of(context.stream)>>>(
      logits.as<float>(), targets.as<std::int32_t>(), weights.as<float>(), token_loss.as<float>(),
      dlogits ? dlogits.as<Gradient>() : nullptr, width, held);
  expect_launched("cross_entropy");
}

}  // namespace

void CudaBackend::cross_entropy(const Context& context, const Tensor& logits, const Tensor& targets,
                                const Tensor& weights, const Tensor& token_loss, const Tensor& dlogits) {
  const std::int64_t rows = logits.rows(), width = logits.width();
  check(logits.type == ElementType::kFp32, "cross_entropy: logits on the GPU are fp32, and {} came",
        name_of(logits.type));
  expect("cross_entropy", "targets", targets, ElementType::kInt32, rows);
  expect("cross_entropy", "weights", weights, ElementType::kFp32, rows);
  expect("cross_entropy", "token_loss", token_loss, logits.type, rows);
  if (dlogits) expect("cross_entropy", "dlogits", dlogits, dlogits.type, rows, width);
  check(width < (std::int64_t{1} << 30),
        "cross_entropy: a vocabulary of {} is larger than kernels count", width);
  if (context.workspace.is_measuring() || logits.count() == 0) return;
  for_storage("cross_entropy", dlogits ? dlogits.type : ElementType::kFp32, [&]<typename Gradient>() {
    launch<Gradient>(context, logits, targets, weights, token_loss, dlogits);
  });
}

}  // namespace agoq::cuda

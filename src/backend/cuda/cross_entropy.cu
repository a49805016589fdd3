// Cross-entropy of logits [C, V] against targets [C], weighted per token:
//   loss_c = w_c (L_c - logits_c[target_c]),   L_c = m + log sum exp(logits_c - m),  m = max logits_c
//   dlogits_c[v] = w_c (exp(logits_c[v] - L_c) - [v = target_c]); dlogits may lie over logits.
//
// Rows of 16,384 logits and more, of a multiple of four, on GPUs with clusters (sm_90). A cluster of
// eight thread blocks takes a row, each block an eighth of its vectors of four: each thread holds the
// last few of its vectors in registers and copies the others to shared memory. So each logit crosses the
// memory bus once, and four blocks of different rows share a multiprocessor, some reading while others
// write. Threads find maximum and sum of their own vectors; each block sends its own to all blocks of
// the cluster, and all compute the row's in the same order. They are sent by asynchronous stores that an
// mbarrier of the receiver counts: a barrier of the cluster would order all of a block's accesses to
// memory, and take as long as the slowest of them.
//
// Other rows. A row belongs to one thread block. The first pass finds the maximum and the sum together:
// a thread keeps its largest logit so far and the sum of exp relative to it, and scales the sum when the
// maximum grows. The second pass, for the gradient, needs the logits again: the block keeps as many from
// the start of the row as fit into shared memory, and reads the others from the end backwards, so that
// those it read last, which the L2 cache still has, come first. A row of weight 0 is not read. A target
// outside the vocabulary makes the row's loss NaN and its gradient zero: the host cannot see it without
// waiting.
//
// exp(x) is ex2(x log2 e) by the hardware's approximation, of the difference x = logit - m or logit - L:
// the error is |x| 2^-24 + 2^-22 of a term of size exp(x), so that what is far below the maximum and
// imprecise does not count. Where a cluster takes a row the difference is logit log2 e - m' or - L' in
// one rounding, with m' = m log2 e and L' = m' + log2 of the sum relative to it: what m' is rounded by
// is in the sum as well. Sums are in an order that the launch fixes.
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
  await_predecessors();
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

// --- a cluster per row ---

constexpr int kClusterBlocks = 8;
constexpr int kClusterThreads = 320;
constexpr int kClusterResidentBlocks = 4;
constexpr int kQuad = 4;       // logits of a vector
constexpr int kHeldQuads = 3;  // of a thread, in registers
constexpr int kLeastClusterWidth = 1 << 14;

__device__ __forceinline__ void store_quad_once(const float (&value)[kQuad], float* place) {
  __stcs(reinterpret_cast<float4*>(place), make_float4(value[0], value[1], value[2], value[3]));
}
__device__ __forceinline__ void store_quad_once(const float (&value)[kQuad], Bf16* place) {
  uint2 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits.x) : "f"(value[1]), "f"(value[0]));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits.y) : "f"(value[3]), "f"(value[2]));
  __stcs(reinterpret_cast<uint2*>(place), bits);
}

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

/// 2^(x log2 e - reference): one rounding before the approximation's.
__device__ __forceinline__ float exponential_below(float x, float scaled_reference) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(fmaf(x, kLog2E, -scaled_reference)));
  return e;
}

/// A maximum, times log2 e, and the sum of exponentials relative to it.
struct Part {
  float most;
  float total;
};
/// Both over groups of `lanes` neighbouring lanes, the same in all of them.
template <int kLanes>
__device__ __forceinline__ Part combined(Part part) {
  float most = part.most;
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    most = fmaxf(most, __shfl_xor_sync(kWholeWarp, most, lanes));
  }
  // What has no elements has most = -infinity and a sum of zeros.
  float factor = 1.0f;
  if (part.most != -INFINITY) {
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(factor) : "f"(part.most - most));
  }
  float total = part.total * factor;
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    total += __shfl_xor_sync(kWholeWarp, total, lanes);
  }
  return {most, total};
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/// What the blocks of a cluster send to this one; arrived when wait returns.
struct Mailbox {
  Part parts[kClusterBlocks];
  std::uint64_t barrier;

  __device__ __forceinline__ static std::uint32_t address_of(const void* place) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(place));
  }
  /// By all threads of all blocks; a block may send when wait_for_others has returned.
  __device__ __forceinline__ void open() {
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address_of(&barrier)) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(&barrier)),
                   "n"(sizeof(parts))
                   : "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
  __device__ __forceinline__ static void wait_for_others() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
  }
  /// Sends this block's part, as that of rank `from`, to the block of rank `to`.
  __device__ __forceinline__ void send(const Part& part, int from, int to) const {
    std::uint32_t slot, signal;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(slot)
                 : "r"(address_of(&parts[from])), "r"(to));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(signal)
                 : "r"(address_of(&barrier)), "r"(to));
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(slot),
        "f"(part.most), "f"(part.total), "r"(signal)
        : "memory");
  }
  __device__ __forceinline__ void wait() const {
    asm volatile(
        "{\n"
        ".reg .pred arrived;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%0], 0;\n"
        "@!arrived bra again;\n"
        "}" ::"r"(address_of(&barrier))
        : "memory");
  }
};
#endif

/// Calls visit(i, quads[i]) for the thread's vectors among [begin, end); kBatch are read at once.
constexpr int kBatch = 4;
template <typename Visit>
__device__ __forceinline__ void for_each_quad(const float4* quads, int begin, int end, Visit visit) {
  int i = begin + static_cast<int>(threadIdx.x);
  for (; i + (kBatch - 1) * kClusterThreads < end; i += kBatch * kClusterThreads) {
    float4 x[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) x[k] = quads[i + k * kClusterThreads];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) visit(i + k * kClusterThreads, x[k]);
  }
  for (; i < end; i += kClusterThreads) visit(i, quads[i]);
}

/// width: a multiple of kQuad, as are all rows' alignments. dlogits may be null.
template <typename Gradient>
__global__ void __launch_bounds__(kClusterThreads, kClusterResidentBlocks)
    cluster_kernel(const float* logits, const std::int32_t* targets, const float* weights,
                   float* token_loss, Gradient* dlogits, int width) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kWarps = kClusterThreads / kWarp;
  extern __shared__ float4 quads[];
  __shared__ Part warp_parts[kWarps];
  __shared__ Mailbox mailbox;
  __shared__ float of_target;
  const int rank = static_cast<int>(blockIdx.x % kClusterBlocks);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp, warp = thread / kWarp;
  const std::int64_t row = blockIdx.x / kClusterBlocks;
  const int in_row = width / kQuad, per_block = (in_row + kClusterBlocks - 1) / kClusterBlocks;
  const int first = rank * per_block;
  const int count = min(per_block, in_row - first);  // not positive where nothing is left
  const int copied = max(0, count - kHeldQuads * kClusterThreads);
  mailbox.open();
  await_predecessors();
  const float* const in = logits + row * width + std::int64_t{first} * kQuad;
  Gradient* const out =
      dlogits == nullptr ? nullptr : dlogits + row * width + std::int64_t{first} * kQuad;
  // Copied in two halves, each counted by itself. The first is on its way before the row's weight has
  // come, for which a row of weight 0 pays; the second while the first is looked at.
  const int half = copied / 2;
  const auto start = [&](int begin, int end) {
    for (int i = begin + thread; i < end; i += kClusterThreads) {
      copy_once_async(in + i * kQuad, quads + i);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const float weight = weights[row];
  const std::int32_t target = targets[row];
  start(0, half);
  if (weight == 0.0f || target < 0 || target >= width) {  // all blocks of the cluster alike
    if (out != nullptr) {
      const float zeros[kQuad] = {};
      for (int i = thread; i < count; i += kClusterThreads) store_quad_once(zeros, out + i * kQuad);
    }
    if (rank == 0 && thread == 0) token_loss[row] = weight == 0.0f ? 0.0f : NAN;
    wait_for_copies();
    Mailbox::wait_for_others();
    return;
  }
  start(half, copied);
  const auto held_index = [&](int k) { return copied + k * kClusterThreads + thread; };
  float4 held[kHeldQuads];
#pragma unroll
  for (int k = 0; k < kHeldQuads; ++k) {
    const int i = held_index(k);
    held[k] = i < count ? __ldcs(reinterpret_cast<const float4*>(in) + i)
                        : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
  }

  // A thread reads only what it copied itself.
  Part part{-INFINITY, 0.0f};
  const auto compare = [&](int, const float4& x) {
    part.most = fmaxf(part.most, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
  };
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  for_each_quad(quads, 0, half, compare);
  wait_for_copies();
  for_each_quad(quads, half, copied, compare);
#pragma unroll
  for (int k = 0; k < kHeldQuads; ++k) compare(held_index(k), held[k]);
  part.most *= kLog2E;
  const float base = reference(part.most);
  const auto add = [&](int, const float4& x) {
    part.total += (exponential_below(x.x, base) + exponential_below(x.y, base)) +
                  (exponential_below(x.z, base) + exponential_below(x.w, base));
  };
  for_each_quad(quads, 0, half, add);
  for_each_quad(quads, half, copied, add);
#pragma unroll
  for (int k = 0; k < kHeldQuads; ++k) add(held_index(k), held[k]);
  part = combined<kWarp>(part);
  if (lane == 0) warp_parts[warp] = part;
  // Taken before this block's part is sent, after which others lay the gradient over it.
  if (rank == 0 && thread == 0) of_target = logits[row * width + target];
  __syncthreads();
  Mailbox::wait_for_others();
  if (warp == 0) {
    part = combined<kWarp>(lane < kWarps ? warp_parts[lane] : Part{-INFINITY, 0.0f});
    if (lane < kClusterBlocks) mailbox.send(part, rank, lane);
  }
  mailbox.wait();
  part = combined<kClusterBlocks>(mailbox.parts[lane % kClusterBlocks]);
  const float scaled = part.most + log2f(part.total);
  if (rank == 0 && thread == 0) {
    token_loss[row] = weight * (part.most * kLn2 + logf(part.total) - of_target);
  }
  if (out != nullptr) {
    const int quad_of_target = target / kQuad - first;
    const auto write = [&](int i, const float4& x) {
      float gradient[kQuad] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int k = 0; k < kQuad; ++k) gradient[k] = weight * exponential_below(gradient[k], scaled);
      if (i == quad_of_target) {
#pragma unroll
        for (int k = 0; k < kQuad; ++k) gradient[k] -= k == target % kQuad ? weight : 0.0f;
      }
      store_quad_once(gradient, out + i * kQuad);
    };
#pragma unroll
    for (int k = 0; k < kHeldQuads; ++k) {
      if (held_index(k) < count) write(held_index(k), held[k]);
    }
    for_each_quad(quads, 0, half, write);
    for_each_quad(quads, half, copied, write);
  }
#endif
}

/// Whether cluster_kernel takes rows of this width: they fit into the shared memory of a cluster, and
/// vectors of four are aligned in all of them.
bool takes_cluster(const Tensor& logits, const Tensor& dlogits) {
  const std::int64_t width = logits.width();
  const auto aligned = [](const Tensor& tensor) {
    return reinterpret_cast<std::uintptr_t>(tensor.data) % 16 == 0;
  };
  constexpr std::int64_t kMostBytes = 200 << 10;  // of a block
  return compiled_for_hopper(cluster_kernel<float>) && width % kQuad == 0 &&
         width >= kLeastClusterWidth &&
         width * static_cast<std::int64_t>(sizeof(float)) <= kClusterBlocks * kMostBytes &&
         aligned(logits) && (!dlogits || aligned(dlogits)) &&
         logits.rows() < (std::int64_t{1} << 31) / kClusterBlocks;
}

template <typename Gradient>
void launch_cluster(const Context& context, const Tensor& logits, const Tensor& targets,
                    const Tensor& weights, const Tensor& token_loss, const Tensor& dlogits) {
  const int width = static_cast<int>(logits.width());
  const int quads = (width / kQuad + kClusterBlocks - 1) / kClusterBlocks;
  const int copied = std::max(0, quads - kHeldQuads * kClusterThreads);
  const int bytes = copied * static_cast<int>(sizeof(float4));
  expect_success(
      cudaFuncSetAttribute(cluster_kernel<Gradient>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
      "cross_entropy");
  Launch{static_cast<unsigned>(logits.rows() * kClusterBlocks), kClusterThreads,
         static_cast<std::size_t>(bytes), stream_of(context.stream), kClusterBlocks}(
      cluster_kernel<Gradient>, logits.as<float>(), targets.as<std::int32_t>(), weights.as<float>(),
      token_loss.as<float>(), dlogits ? dlogits.as<Gradient>() : nullptr, width);
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
  Launch{static_cast<unsigned>(logits.rows()), static_cast<unsigned>(threads), held * sizeof(float),
         stream_of(context.stream)}(cross_entropy_kernel<Gradient>, logits.as<float>(),
                                    targets.as<std::int32_t>(), weights.as<float>(),
                                    token_loss.as<float>(), dlogits ? dlogits.as<Gradient>() : nullptr,
                                    width, held);
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
    if (takes_cluster(logits, dlogits)) {
      return launch_cluster<Gradient>(context, logits, targets, weights, token_loss, dlogits);
    }
    launch<Gradient>(context, logits, targets, weights, token_loss, dlogits);
  });
}

}  // namespace agoq::cuda

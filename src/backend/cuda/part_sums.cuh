// The end of sums in double precision whose value does not depend on the launch: a tensor is cut into
// parts, kSumParts at most where nothing else is said, each the work of one block of kSumThreads
// threads, and one more block adds the parts, both in fixed trees.
#pragma once

#include <span>
#include <vector>

#include "backend/context.h"
#include "backend/cuda/launch.cuh"
#include "backend/cuda/tensor_batch.cuh"

namespace agoq::cuda {

inline constexpr int kSumThreads = 256;
inline constexpr int kSumParts = 2048;

/// The sum of `value` over the block, in thread 0.
template <int kThreads>
__device__ __forceinline__ double block_sum(double value) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ double of_warps[kWarps];
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = threadIdx.x < kWarps ? of_warps[threadIdx.x] : 0.0;
  return threadIdx.x < kWarp ? warp_sum(value) : 0.0;
}

inline constexpr int kPartThreads = 1024;

/// The parts of one total.
struct PartRange {
  const double* parts;
  int count;
  double* total;
};

static __global__ void __launch_bounds__(kPartThreads)
    add_parts_kernel(const __grid_constant__ TensorBatch<PartRange> batch) {
  await_predecessors();
  const PartRange range = batch.items[place_in(batch).item];
  double value = 0;
  for (int i = static_cast<int>(threadIdx.x); i < range.count; i += kPartThreads)
    value += range.parts[i];
  value = block_sum<kPartThreads>(value);
  if (threadIdx.x == 0) *range.total = value;
}

/// The parts of several totals, each of which becomes the sum of its own.
class PartSums {
 public:
  /// Of `totals.count()` totals, with `counts[i]` parts of totals[i]; takes memory for the parts.
  PartSums(const Context& context, const Tensor& totals, std::span<const std::int64_t> counts)
      : totals_(totals) {
    std::int64_t all = 0;
    for (const std::int64_t count : counts) {
      first_.push_back(all);
      all += count;
    }
    first_.push_back(all);
    parts_ = context.workspace.take(ElementType::kFp64, Shape{all});
  }
  double* parts(std::size_t total) const { return parts_.as<double>() + first_[total]; }
  std::uint32_t count(std::size_t total) const {
    return static_cast<std::uint32_t>(first_[total + 1] - first_[total]);
  }
  /// When they are queued.
  void add(cudaStream_t stream) const {
    BatchedLaunches<TensorBatch<PartRange>> launches(
        [&](std::uint32_t blocks, const TensorBatch<PartRange>& batch) {
          Launch{blocks, kPartThreads, 0, stream}(add_parts_kernel, batch);
        });
    for (std::size_t i = 0; i + 1 < first_.size(); ++i) {
      launches.add({parts(i), static_cast<int>(count(i)), totals_.as<double>() + i}, 1);
    }
  }

 private:
  Tensor totals_, parts_;
  std::vector<std::int64_t> first_;
};

}  // namespace agoq::cuda

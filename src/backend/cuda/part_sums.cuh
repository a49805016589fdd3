// The end of sums in double precision whose value does not depend on the launch: a tensor is cut into
// parts, kSumParts where nothing else is said, each the work of one block of kSumThreads threads, and
// one more block adds the parts, both in fixed trees.
#pragma once

#include "backend/context.h"
#include "backend/cuda/launch.cuh"

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

static __global__ void __launch_bounds__(kPartThreads)
    add_parts_kernel(const double* parts, int count, double* total) {
  await_predecessors();
  double value = 0;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kPartThreads) value += parts[i];
  value = block_sum<kPartThreads>(value);
  if (threadIdx.x == 0) *total = value;
}

inline Tensor take_parts(const Context& context, std::int64_t count = kSumParts) {
  return context.workspace.take(ElementType::kFp64, Shape{count});
}

/// total[0] = the sum of the first `count` parts.
inline void add_parts(cudaStream_t stream, const Tensor& parts, std::int64_t count,
                      const Tensor& total) {
  Launch{1, kPartThreads, 0, stream}(add_parts_kernel, parts.as<double>(), static_cast<int>(count),
                                     total.as<double>());
}

inline void check_total(std::string_view operation, const Tensor& total) {
  check(total.type == ElementType::kFp64 && total.count() == 1,
        "{}: the total is one fp64 element; {} {} was given", operation, name_of(total.type),
        total.shape.to_string());
}

}  // namespace agoq::cuda

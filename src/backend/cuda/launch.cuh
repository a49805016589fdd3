// Launching kernels over elements, and warp-wide reductions. Device code.
#pragma once

#include <cstdint>

#include "backend/cuda/device.h"
#include "core/small_float.h"
#include "core/tensor.h"

namespace agoq::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kWholeWarp = 0xFFFFFFFFu;

/// The first statement of every kernel that Launch queues: what was queued before it on its stream is
/// done behind it, and nothing may be read or written before (but see
/// await_predecessors_before_successors, and what was uploaded may be read: copies wait for what is
/// queued before them, and all behind waits for copies). The kernel queued next may then come onto
/// the multiprocessors as this one's last blocks leave them.
__device__ __forceinline__ void await_predecessors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// The same for a kernel whose successor reads, before it awaits this one, what was written before both:
/// the successor's blocks start when all of this kernel's are past this statement.
__device__ __forceinline__ void await_predecessors_before_successors() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Starts bringing `bytes` from `from` on into the L2 cache; both are multiples of 16. All writes of
/// multiprocessors meet in that cache, so what is brought early is never stale: a kernel may ask for its
/// operands before it awaits those that write them, and memory works while they end. Does nothing before
/// sm_90.
__device__ __forceinline__ void prefetch_to_l2([[maybe_unused]] const void* from,
                                               [[maybe_unused]] std::uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

/// Whether the module's kernels hold the parts under __CUDA_ARCH__ >= 900. The GPU alone does not tell:
/// code that the driver compiles for a newer one from an older one's PTX lacks them.
inline bool compiled_for_hopper(const void* any_kernel) {
  static const bool compiled = [&] {
    cudaFuncAttributes attributes;
    expect_success(cudaFuncGetAttributes(&attributes, any_kernel), "asking for a kernel's attributes");
    return attributes.ptxVersion >= 90;
  }();
  return compiled;
}
template <typename... Parameters>
bool compiled_for_hopper(void (*any_kernel)(Parameters...)) {
  return compiled_for_hopper(reinterpret_cast<const void*>(any_kernel));
}

/// Launch{blocks, threads, bytes of dynamic shared memory, stream}(kernel, arguments...) queues a
/// kernel. On sm_90 and newer it does not wait for the last block of the kernel before it to start its
/// own blocks (CUDA's programmatic dependent launch), which await_predecessors() makes safe: between two
/// kernels of 50 us that is 2 to 3 us. expect_launched is to be called behind it.
struct Launch {
  dim3 blocks;
  unsigned threads;
  std::size_t shared_bytes;
  cudaStream_t stream;
  unsigned blocks_of_cluster = 1;

  template <typename... Parameters, typename... Arguments>
  void operator()(void (*kernel)(Parameters...), const Arguments&... arguments) const {
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (compiled_for_hopper(kernel)) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (blocks_of_cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {blocks_of_cluster, 1, 1};
    }
    // What it returns is cudaGetLastError's too.
    static_cast<void>(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
  }
};

/// Blocks of a grid-stride launch over `work` items: one per item, at most `waves` per multiprocessor.
inline unsigned grid_blocks(std::int64_t work, int per_multiprocessor) {
  const std::int64_t most = std::int64_t{device().multiprocessors} * per_multiprocessor;
  return static_cast<unsigned>(work < 1 ? 1 : work < most ? work : most);
}

/// Calls run.operator()<Storage>() for fp32 and bf16: the list of the instances of every operation.
template <typename Run>
void for_storage(std::string_view operation, ElementType type, Run run) {
  switch (type) {
    case ElementType::kFp32: return run.template operator()<float>();
    case ElementType::kBf16: return run.template operator()<Bf16>();
    default:
      fail("{}: tensors on the GPU are fp32 or bf16, and {} came: convert it with copy", operation,
           name_of(type));
  }
}

__device__ __forceinline__ float load(float value) { return value; }
__device__ __forceinline__ float load(Bf16 value) { return to_float(value); }
__device__ __forceinline__ void store(float value, float& place) { place = value; }
/// One instruction on sm_80 and later; the same bits as to_bf16 but for the payload of NaN.
__device__ __forceinline__ void store(float value, Bf16& place) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(place.bits) : "f"(value));
}

/// Eight neighbouring elements: the unit of all vector accesses, 16 bytes of BF16 or 32 of FP32.
inline constexpr int kVector = 8;

__device__ __forceinline__ void load_vector(const float* from, float (&to)[kVector]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0],
               high = reinterpret_cast<const float4*>(from)[1];
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}
__device__ __forceinline__ void load_vector(const Bf16* from, float (&to)[kVector]) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  const std::uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = __uint_as_float(words[i] << 16);
    to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}
__device__ __forceinline__ void store_vector(const float (&from)[kVector], float* to) {
  reinterpret_cast<float4*>(to)[0] = make_float4(from[0], from[1], from[2], from[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(from[4], from[5], from[6], from[7]);
}
__device__ __forceinline__ void store_vector(const float (&from)[kVector], Bf16* to) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(from[2 * i + 1]), "f"(from[2 * i]));
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

/// Whether rows of `row_length` elements of this type, cut into pieces of `piece` elements, allow vector
/// accesses: host side.
template <typename Storage>
bool vector_aligned(const void* data, std::int64_t piece) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
         piece * static_cast<std::int64_t>(sizeof(Storage)) % 16 == 0 && piece % kVector == 0;
}

/// Copies kBytes to shared memory, by its 32-bit address; arrived after wait_for_copies by the same
/// thread.
template <int kBytes>
__device__ __forceinline__ void copy_async(const void* from, std::uint32_t to) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
}
/// The same of 16 bytes that are read once: past the L1 cache, which is left to others.
__device__ __forceinline__ void copy_once_async(const void* from, void* to) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(kWholeWarp, value, lanes);
  return value;
}
__device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(kWholeWarp, value, lanes);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kWholeWarp, value, lanes));
  }
  return value;
}

}  // namespace agoq::cuda

// Data movement: zero, copy with conversion, upload, read, add. A thread converts or adds elements by
// itself; nothing depends on the launch.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/launch.cuh"
#include "backend/operand_checks.h"

namespace agoq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;

// BF16 and FP16 to FP32 are exact; the way back rounds to nearest even.
__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(Bf16 value) { return to_float(value); }
__device__ __forceinline__ float widen(Fp16 value) { return to_float(value); }
__device__ __forceinline__ void narrow(float value, float& place) { place = value; }
__device__ __forceinline__ void narrow(float value, Bf16& place) { place = to_bf16(value); }
__device__ __forceinline__ void narrow(float value, Fp16& place) { place = to_fp16(value); }

template <typename Source, typename Destination>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const Source* source, Destination* destination, std::int64_t count) {
  await_predecessors();
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    narrow(widen(source[i]), destination[i]);
  }
}

template <typename Storage>
__global__ void __launch_bounds__(kThreads)
    add_kernel(const Storage* a, const Storage* b, Storage* sum, std::int64_t count) {
  await_predecessors();
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads * kVector;
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVector; i < count;
       i += step) {
    if (i + kVector <= count) {
      float left[kVector], right[kVector];
      load_vector(a + i, left);
      load_vector(b + i, right);
#pragma unroll
      for (int k = 0; k < kVector; ++k) left[k] += right[k];
      store_vector(left, sum + i);
    } else {
      for (std::int64_t k = i; k < count; ++k) store(load(a[k]) + load(b[k]), sum[k]);
    }
  }
}

unsigned blocks_for(std::int64_t threads) {
  return grid_blocks((threads + kThreads - 1) / kThreads, kBlocksPerMultiprocessor);
}

template <typename Source>
void copy_from(cudaStream_t stream, const Tensor& source, const Tensor& destination) {
  const std::int64_t count = source.count();
  const auto run = [&]<typename Destination>() {
    Launch{blocks_for(count), kThreads, 0, stream}(copy_kernel<Source, Destination>, source.as<Source>(),
                                                   destination.as<Destination>(), count);
  };
  switch (destination.type) {
    case ElementType::kFp32: return run.template operator()<float>();
    case ElementType::kBf16: return run.template operator()<Bf16>();
    case ElementType::kFp16: return run.template operator()<Fp16>();
    default:
      fail("copy: {} cannot be converted to {} on the GPU: fp32, bf16 and fp16 convert",
           name_of(source.type), name_of(destination.type));
  }
}

}  // namespace

void CudaBackend::zero(const Context& context, std::byte* memory, std::size_t bytes) {
  if (context.workspace.is_measuring() || bytes == 0) return;
  expect_success(cudaMemsetAsync(memory, 0, bytes, stream_of(context.stream)), "zero");
}

void CudaBackend::copy(const Context& context, const Tensor& source, const Tensor& destination) {
  check(source.count() == destination.count(), "copy: source has {} elements and destination {}",
        source.count(), destination.count());
  if (context.workspace.is_measuring() || source.count() == 0) return;
  const cudaStream_t stream = stream_of(context.stream);
  if (source.type == destination.type) {
    if (source.data == destination.data) return;
    expect_success(
        cudaMemcpyAsync(destination.data, source.data, source.bytes(), cudaMemcpyDeviceToDevice, stream),
        "copy");
    return;
  }
  switch (source.type) {
    case ElementType::kFp32: copy_from<float>(stream, source, destination); break;
    case ElementType::kBf16: copy_from<Bf16>(stream, source, destination); break;
    case ElementType::kFp16: copy_from<Fp16>(stream, source, destination); break;
    default:
      fail("copy: {} cannot be converted to {} on the GPU: fp32, bf16 and fp16 convert",
           name_of(source.type), name_of(destination.type));
  }
  expect_launched("copy");
}

void CudaBackend::upload(const Context& context, const void* source, std::byte* destination,
                         std::size_t bytes) {
  if (context.workspace.is_measuring() || bytes == 0) return;
  expect_success(
      cudaMemcpyAsync(destination, source, bytes, cudaMemcpyHostToDevice, stream_of(context.stream)),
      "upload");
}

void CudaBackend::read(const Context& context, const std::byte* source, void* destination,
                       std::size_t bytes) {
  // What a plan reads has no value yet: zeros keep it deterministic.
  if (context.workspace.is_measuring()) {
    std::fill_n(static_cast<std::byte*>(destination), bytes, std::byte{0});
    return;
  }
  const cudaStream_t stream = stream_of(context.stream);
  expect_success(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDeviceToHost, stream), "read");
  expect_success(cudaStreamSynchronize(stream), "read");
}

void CudaBackend::add(const Context& context, const Tensor& a, const Tensor& b, const Tensor& sum) {
  expect("add", "b", b, a.type, a.rows(), a.width());
  expect("add", "sum", sum, a.type, a.rows(), a.width());
  if (context.workspace.is_measuring() || a.count() == 0) return;
  for_storage("add", a.type, [&]<typename Storage>() {
    const std::int64_t count = a.count();
    check(vector_aligned<Storage>(a.data, kVector) && vector_aligned<Storage>(b.data, kVector) &&
              vector_aligned<Storage>(sum.data, kVector),
          "add: tensors start at multiples of 16 bytes");
    Launch{blocks_for((count + kVector - 1) / kVector), kThreads, 0, stream_of(context.stream)}(
        add_kernel<Storage>, a.as<Storage>(), b.as<Storage>(), sum.as<Storage>(), count);
  });
  expect_launched("add");
}

}  // namespace agoq::cuda

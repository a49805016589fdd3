// Data movement: zero, copy with conversion, upload, read, add, gather and scatter of rows. A thread
// converts or adds elements by itself, a warp copies rows; nothing depends on the launch.
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

// --- rows by their number ---

/// One plane of the rows of a gather or scatter. `word`: bytes per access.
struct PlaneOfRows {
  const std::byte* from;
  std::byte* to;
  std::int64_t row_bytes;
  int word;
};
struct PlanesOfRows {
  PlaneOfRows plane[4];
  int count = 0;

  /// Unless rows have no bytes in it.
  void add(const std::byte* from, std::byte* to, std::int64_t row_bytes) {
    if (row_bytes == 0) return;
    const std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(from) |
                                reinterpret_cast<std::uintptr_t>(to) |
                                static_cast<std::uintptr_t>(row_bytes);
    plane[count++] = {from, to, row_bytes, bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1};
  }
};

PlanesOfRows planes_of_rows(const QuantTensor& from, const QuantTensor& to) {
  const RowBytes row = row_bytes(from.format, from.grid);
  PlanesOfRows planes;
  planes.add(from.codes, to.codes, row.codes);
  planes.add(from.bits, to.bits, row.bits);
  planes.add(from.scales, to.scales, row.scales);
  planes.add(from.super, to.super, row.super);
  return planes;
}

template <typename Word>
__device__ __forceinline__ void copy_words(const std::byte* __restrict__ from,
                                           std::byte* __restrict__ to, std::int64_t bytes) {
  const auto words = static_cast<std::uint32_t>(bytes / static_cast<std::int64_t>(sizeof(Word)));
  const Word* const __restrict__ in = reinterpret_cast<const Word*>(from);
  Word* const __restrict__ out = reinterpret_cast<Word*>(to);
#pragma unroll 4
  for (std::uint32_t i = threadIdx.x % kWarp; i < words; i += kWarp) out[i] = in[i];
}

/// A warp copies all planes of a row at a time: row rows[i] to row i, or i to rows[i] if it scatters.
template <bool scatters>
__global__ void __launch_bounds__(kThreads)
    move_rows_kernel(const __grid_constant__ PlanesOfRows planes, const std::int32_t* rows,
                     std::int64_t count) {
  await_predecessors();
  const std::int64_t step = std::int64_t{gridDim.x} * (kThreads / kWarp);
  for (std::int64_t i = std::int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp; i < count;
       i += step) {
    const std::int64_t numbered = rows[i];
    for (int p = 0; p < planes.count; ++p) {
      const PlaneOfRows& plane = planes.plane[p];
      const std::byte* const from = plane.from + (scatters ? i : numbered) * plane.row_bytes;
      std::byte* const to = plane.to + (scatters ? numbered : i) * plane.row_bytes;
      switch (plane.word) {
        case 16: copy_words<uint4>(from, to, plane.row_bytes); break;
        case 4: copy_words<std::uint32_t>(from, to, plane.row_bytes); break;
        default: copy_words<std::uint8_t>(from, to, plane.row_bytes);
      }
    }
  }
}

template <bool scatters>
void move_rows(const Context& context, const QuantTensor& source, const Tensor& rows,
               const QuantTensor& destination) {
  if (context.workspace.is_measuring() || rows.count() == 0) return;
  constexpr std::int64_t kWarps = kThreads / kWarp;
  Launch{grid_blocks((rows.count() + kWarps - 1) / kWarps, kBlocksPerMultiprocessor), kThreads, 0,
         stream_of(context.stream)}(move_rows_kernel<scatters>, planes_of_rows(source, destination),
                                    rows.as<std::int32_t>(), rows.count());
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

void CudaBackend::gather_rows(const Context& context, const QuantTensor& source, const Tensor& rows,
                              const QuantTensor& destination) {
  expect_rows_of("gather_rows", source, rows, destination);
  move_rows<false>(context, source, rows, destination);
  expect_launched("gather_rows");
}

void CudaBackend::scatter_rows(const Context& context, const QuantTensor& source, const Tensor& rows,
                               const QuantTensor& destination) {
  expect_rows_of("scatter_rows", destination, rows, source);
  move_rows<true>(context, source, rows, destination);
  expect_launched("scatter_rows");
}

}  // namespace agoq::cuda

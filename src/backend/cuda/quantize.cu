// Tensors to and from a QuantFormat.
//
//   quantize     destination = Q(source)
//   dequantize   destination = Q^-1(source)
//   accumulate   main = Q(Q^-1(main) + addend), block scales fresh, the sum in FP32
//
// A warp works on one group of up to 1,024 elements at a time (group_codec.cuh); the warps of the grid
// share out the groups of the tensor. What is used in training has kernels of its own; any other format
// goes through the path that all share.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/group_codec.cuh"
#include "backend/operand_checks.h"

namespace agoq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;
// Keeps registers at 80: 24 warps, which hold more loads in flight than copy speed needs. The dynamic
// map would spill when accumulated, and gets 128.
constexpr int kResidentBlocks = 3;

unsigned blocks_for(const QuantView& view) {
  constexpr std::int64_t kWarps = kThreads / kWarp;
  return grid_blocks((std::int64_t{view.groups} + kWarps - 1) / kWarps, kBlocksPerMultiprocessor);
}

/// Calls visit(group) for each group that the warp owns.
template <typename Visit>
__device__ __forceinline__ void for_each_group(const QuantView& view, Visit visit) {
  const std::uint32_t step = gridDim.x * (kThreads / kWarp);
  for (std::uint64_t index = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp; index < view.groups;
       index += step) {
    visit(group_at(view, static_cast<std::uint32_t>(index)));
  }
}

template <Code code, typename Storage>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    quantize_kernel(const Storage* source, bool aligned, QuantView view, RandomWords key,
                    std::int64_t* counters) {
  LaneCounts counts;
  for_each_group(view, [&](const Group& group) {
    GroupValues values;
    load_group(group, source + group.row * view.row_length, aligned, values);
    encode_group<code>(view, group, values, key, counts);
  });
  counts.add_to(counters);
}

template <Code code, typename Storage>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    dequantize_kernel(QuantView view, Storage* destination, bool aligned) {
  for_each_group(view, [&](const Group& group) {
    GroupValues values;
    decode_group<code>(view, group, values);
    store_group(group, destination + group.row * view.row_length, aligned, values);
  });
}

template <Code code, typename Storage>
__global__ void __launch_bounds__(kThreads, kResidentBlocks - (code == Code::kDynamic8))
    accumulate_kernel(const Storage* addend, bool aligned, QuantView view, RandomWords key,
                      std::int64_t* counters) {
  LaneCounts counts;
  for_each_group(view, [&](const Group& group) {
    GroupValues values;
    load_group(group, addend + group.row * view.row_length, aligned, values);
    add_decoded_group<code>(view, group, values);
    encode_group<code>(view, group, values, key, counts);
  });
  counts.add_to(counters);
}

// The path that all formats share, for quantize and accumulate and for either element type: it is large,
// and compiled once.
struct SharedSource {
  const void* elements;
  bool is_fp32, aligned, accumulates;
};
__global__ void __launch_bounds__(kThreads)
    shared_encode_kernel(SharedSource source, QuantView view, RandomWords key, std::int64_t* counters) {
  LaneCounts counts;
  for_each_group(view, [&](const Group& group) {
    GroupValues values;
    const std::int64_t begin = group.row * view.row_length;
    if (source.is_fp32) {
      load_group(group, static_cast<const float*>(source.elements) + begin, source.aligned, values);
    } else {
      load_group(group, static_cast<const Bf16*>(source.elements) + begin, source.aligned, values);
    }
    if (source.accumulates) add_decoded_group<kSharedPath>(view, group, values);
    encode_group<kSharedPath>(view, group, values, key, counts);
  });
  counts.add_to(counters);
}

void launch_shared(const Context& context, const Tensor& source, bool accumulates, const QuantView& view,
                   const RandomKey& key, std::int64_t* counters) {
  const bool is_fp32 = source.type == ElementType::kFp32;
  const bool aligned = is_fp32 ? vector_aligned<float>(source.data, view.segment_length)
                               : vector_aligned<Bf16>(source.data, view.segment_length);
  shared_encode_kernel<<<blocks_for(view), kThreads, 0, stream_of(context.stream)>>>(
      {source.data, is_fp32, aligned, accumulates}, view, mixed_key(key), counters);
}

/// Calls run.operator()<code>() for the path of an activation's format, which are the instances for
/// `Storage`, and shared() for the others.
template <typename Storage, typename Run, typename Shared>
void for_activation_path(const QuantView& view, Run run, Shared shared) {
  switch (view.path) {
    case Code::kNf4: return run.template operator()<Code::kNf4>();
    case Code::kE4m3: return run.template operator()<Code::kE4m3>();
    default: break;
  }
  if constexpr (std::is_same_v<Storage, Bf16>) {
    switch (view.path) {
      case Code::kBf16: return run.template operator()<Code::kBf16>();
      case Code::kE2m1: return run.template operator()<Code::kE2m1>();
      case Code::kBnbFp4: return run.template operator()<Code::kBnbFp4>();
      case Code::kInt8: return run.template operator()<Code::kInt8>();
      default: break;
    }
  }
  shared();
}

/// The same for a gradient's.
template <typename Run, typename Shared>
void for_gradient_path(const QuantView& view, Run run, Shared shared) {
  switch (view.path) {
    case Code::kE4m3: return run.template operator()<Code::kE4m3>();
    case Code::kInt8: return run.template operator()<Code::kInt8>();
    case Code::kDynamic8: return run.template operator()<Code::kDynamic8>();
    default: shared();
  }
}

std::int64_t* counters_of(const Tensor& counters) {
  return counters ? counters.as<std::int64_t>() : nullptr;
}

void refuse_fp64(std::string_view operation, const QuantTensor& tensor) {
  check(tensor.format.code != Code::kFp64, "{}: fp64 tensors exist on the CPU only", operation);
}

}  // namespace

void CudaBackend::quantize(const Context& context, const Tensor& source, const QuantTensor& destination,
                           const RandomKey& key, const Tensor& counters) {
  expect_same_shape("quantize", source, destination);
  expect_counters("quantize", counters);
  refuse_fp64("quantize", destination);
  if (context.workspace.is_measuring() || source.count() == 0) return;
  const QuantView view = view_of(destination);
  for_storage("quantize", source.type, [&]<typename Storage>() {
    for_activation_path<Storage>(
        view,
        [&]<Code code>() {
          quantize_kernel<code><<<blocks_for(view), kThreads, 0, stream_of(context.stream)>>>(
              source.as<Storage>(), vector_aligned<Storage>(source.data, view.segment_length), view,
              mixed_key(key), counters_of(counters));
        },
        [&] { launch_shared(context, source, false, view, key, counters_of(counters)); });
  });
  expect_launched("quantize");
}

void CudaBackend::dequantize(const Context& context, const QuantTensor& source,
                             const Tensor& destination) {
  expect_same_shape("dequantize", destination, source);
  refuse_fp64("dequantize", source);
  if (context.workspace.is_measuring() || destination.count() == 0) return;
  const QuantView view = view_of(source);
  for_storage("dequantize", destination.type, [&]<typename Storage>() {
    for_activation_path<Storage>(
        view,
        [&]<Code code>() {
          dequantize_kernel<code><<<blocks_for(view), kThreads, 0, stream_of(context.stream)>>>(
              view, destination.as<Storage>(),
              vector_aligned<Storage>(destination.data, view.segment_length));
        },
        [&] {
          dequantize_kernel<kSharedPath><<<blocks_for(view), kThreads, 0, stream_of(context.stream)>>>(
              view, destination.as<Storage>(),
              vector_aligned<Storage>(destination.data, view.segment_length));
        });
  });
  expect_launched("dequantize");
}

void CudaBackend::accumulate(const Context& context, const Tensor& addend, const QuantTensor& main,
                             const RandomKey& key, const Tensor& counters) {
  expect_same_shape("accumulate", addend, main);
  expect_counters("accumulate", counters);
  refuse_fp64("accumulate", main);
  if (context.workspace.is_measuring() || addend.count() == 0) return;
  const QuantView view = view_of(main);
  for_storage("accumulate", addend.type, [&]<typename Storage>() {
    for_gradient_path(
        view,
        [&]<Code code>() {
          accumulate_kernel<code><<<blocks_for(view), kThreads, 0, stream_of(context.stream)>>>(
              addend.as<Storage>(), vector_aligned<Storage>(addend.data, view.segment_length), view,
              mixed_key(key), counters_of(counters));
        },
        [&] { launch_shared(context, addend, true, view, key, counters_of(counters)); });
  });
  expect_launched("accumulate");
}

}  // namespace agoq::cuda

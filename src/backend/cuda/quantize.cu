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
#include "backend/cuda/group_vectors.cuh"
#include "backend/operand_checks.h"

namespace agoq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;
// Keeps registers at 80: 24 warps, which hold more loads in flight than copy speed needs. The dynamic
// map would spill when accumulated, and gets 128.
constexpr int kResidentBlocks = 3;
constexpr int kWholeResidentBlocks = 4;  // 64 registers

unsigned blocks_for(const QuantView& view) {
  constexpr std::int64_t kWarps = kThreads / kWarp;
  return grid_blocks((std::int64_t{view.groups} + kWarps - 1) / kWarps, kBlocksPerMultiprocessor);
}

/// A warp for each group. Blocks that come and go stay in the order of memory; ones that stay and walk
/// the tensor drift apart, and memory is slower where it is used in many places at once.
unsigned whole_blocks_for(const QuantView& view) {
  constexpr std::uint32_t kWarps = kThreads / kWarp;
  return view.groups / kWarps + (view.groups % kWarps != 0);
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
  await_predecessors();
  LaneCounts counts;
  for_each_group(view, [&](const Group& group) {
    GroupValues values;
    load_group(group, source + group.row * view.row_length, aligned, values);
    encode_group<code>(view, group, values, key, counts);
  });
  counts.add_to(counters);
}

/// quantize where has_whole_nf4_blocks and the source is aligned.
__global__ void __launch_bounds__(kThreads, kWholeResidentBlocks)
    whole_quantize_kernel(const Bf16* source, QuantView view, WholeGroups groups,
                          std::int64_t* counters) {
  await_predecessors();
  const WholeNf4Encoder encoder(view);
  LaneCounts counts;
  const std::uint32_t step = gridDim.x * (kThreads / kWarp);
  for (std::uint64_t index = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp; index < groups.count;
       index += step) {
    const WholeGroups::Place place = groups.place(static_cast<std::uint32_t>(index));
    PackedGroup<Bf16> x;
    load_whole_group(source + place.element, place.count, x);
    encoder.encode(x, place, source + place.element, counts);
  }
  counts.add_to(counters);
}

template <Code code, typename Storage>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    dequantize_kernel(QuantView view, Storage* destination, bool aligned) {
  await_predecessors();
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
  await_predecessors();
  LaneCounts counts;
  for_each_group(view, [&](const Group& group) {
    GroupValues values;
    load_group(group, addend + group.row * view.row_length, aligned, values);
    add_decoded_group<code>(view, group, values);
    encode_group<code>(view, group, values, key, counts);
  });
  counts.add_to(counters);
}

// --- flat: planes without gaps ---
//
// What training uses most, without the arithmetic of groups: segments of whole vectors, so that element
// i of the tensor is element i of the code plane and a lane's eight elements lie in one block. A warp
// takes kFlatChunks chunks of 256 at a time, and has all their loads in flight before it decodes one.

constexpr int kFlatChunk = kWarp * kVector;
constexpr int kFlatChunks = 2;
constexpr int kFlatResidentBlocks = 4;  // 64 registers

unsigned flat_blocks_for(std::int64_t chunks) {
  constexpr std::int64_t kPerBlock = kThreads / kWarp * kFlatChunks;
  return static_cast<unsigned>((chunks + kPerBlock - 1) / kPerBlock);
}

/// accumulate into e4m3 with FP32 scales: kFlatChunks chunks for a warp. Blocks that stayed and walked
/// the tensor would drift apart, as in whole_blocks_for.
template <typename Storage>
__global__ void __launch_bounds__(kThreads, kFlatResidentBlocks)
    flat_accumulate_kernel(const Storage* addend, uint2* codes, float* scales, int block_shift,
                           ChunkCut cut, std::int64_t* counters) {
  const int lanes = (1 << block_shift) / kVector;  // of a block
  const bool leads_block = (lane_index() & (lanes - 1)) == 0;
  const std::uint64_t first =
      (std::uint64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp) * kFlatChunks;
  await_predecessors();
  if (first >= cut.total_chunks) return;  // the whole warp
  float x[kFlatChunks][kVector];
  uint2 loaded[kFlatChunks];
  float scale[kFlatChunks];
  ChunkCut::Place place[kFlatChunks];
#pragma unroll
  for (int k = 0; k < kFlatChunks; ++k) {
    place[k] = cut.place(static_cast<std::uint32_t>(first) + k, block_shift);
    if (first + k >= cut.total_chunks) place[k].exists = false;
    if (place[k].exists) {
      load_vector(addend + place[k].element, x[k]);
      loaded[k] = codes[place[k].element / kVector];
      scale[k] = scales[place[k].block];
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[k][i] = 0.0f;
      loaded[k] = make_uint2(0, 0);
      scale[k] = 0.0f;
    }
  }
  LaneCounts counts;
#pragma unroll
  for (int k = 0; k < kFlatChunks; ++k) {
    add_e4m3_vector(loaded[k], scale[k], x[k]);
    const uint2 encoded = encode_e4m3(x[k], lanes, scale[k], counts);
    if (!place[k].exists) continue;
    codes[place[k].element / kVector] = encoded;
    if (leads_block) scales[place[k].block] = scale[k];
  }
  counts.add_to(counters);
}

/// dequantize nf4 with two-level scales.
template <typename Storage>
__global__ void __launch_bounds__(kThreads, kFlatResidentBlocks)
    flat_dequantize_kernel(const std::uint32_t* codes, const std::uint8_t* scales, const Bf16* super,
                           int block_shift, std::uint32_t chunks_per_segment,
                           std::uint32_t groups_per_segment, std::int64_t chunks, Storage* destination) {
  const float level = group_detail::level_of_lane<Code::kNf4>();
  const std::int64_t first =
      (std::int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp) * kFlatChunks;
  await_predecessors();
  std::uint32_t loaded[kFlatChunks];
  float scale[kFlatChunks];
#pragma unroll
  for (int k = 0; k < kFlatChunks; ++k) {
    const std::int64_t vector = (first + k) * kWarp + lane_index();
    if (first + k < chunks) {
      const auto chunk = static_cast<std::uint32_t>(first + k);
      const std::uint32_t segment = chunk / chunks_per_segment;
      const std::uint32_t in_segment = chunk - segment * chunks_per_segment;
      loaded[k] = codes[vector];
      scale[k] =
          two_level_scale(scales[vector * kVector >> block_shift],
                          super[std::int64_t{segment} * groups_per_segment + in_segment / kChunks]);
    }
  }
#pragma unroll
  for (int k = 0; k < kFlatChunks; ++k) {
    if (first + k >= chunks) continue;  // the whole warp
    group_detail::VectorCodes vector_codes{loaded[k], 0};
    if (scale[k] == 0.0f) vector_codes = group_detail::zero_codes<Code::kNf4>();
    float x[kVector];
    group_detail::decode_vector<Code::kNf4>(vector_codes, level, x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] *= scale[k];
    store_vector(x, destination + ((first + k) * kWarp + lane_index()) * kVector);
  }
}

constexpr int kDecodingBlocks = 5;  // 48 registers
/// dequantize where has_whole_nf4_blocks and the destination is aligned, a group per warp.
template <typename Storage>
__global__ void __launch_bounds__(kThreads, kDecodingBlocks)
    whole_dequantize_kernel(QuantView view, WholeGroups groups, Storage* destination) {
  const float level = group_detail::level_of_lane<Code::kNf4>();
  const std::uint32_t index = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
  await_predecessors();
  if (index >= groups.count) return;  // the whole warp
  const WholeGroups::Place place = groups.place(index);
  WholeNf4Group packed;
  packed.load(view, place);
  packed.resolve();
  Storage* const to = destination + place.element;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk * kWarp * kVector >= place.count) break;  // the whole warp
    float x[kVector];
    packed.decode(chunk, level, x);
    if (vector_begin(chunk) < place.count) store_vector(x, to + vector_begin(chunk));
  }
}

// The path that all formats share, for quantize and accumulate and for either element type: it is large,
// and compiled once.
struct SharedSource {
  const void* elements;
  bool is_fp32, aligned, accumulates;
};
__global__ void __launch_bounds__(kThreads)
    shared_encode_kernel(SharedSource source, QuantView view, RandomWords key, std::int64_t* counters) {
  await_predecessors();
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
  Launch{blocks_for(view), kThreads, 0, stream_of(context.stream)}(
      shared_encode_kernel, SharedSource{source.data, is_fp32, aligned, accumulates}, view,
      mixed_key(key), counters);
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
          if constexpr (code == Code::kNf4 && std::is_same_v<Storage, Bf16>) {
            if (has_whole_nf4_blocks(view) && vector_aligned<Bf16>(source.data, view.segment_length)) {
              Launch{blocks_for(view), kThreads, 0, stream_of(context.stream)}(
                  whole_quantize_kernel, source.as<Bf16>(), view, whole_groups(view),
                  counters_of(counters));
              return;
            }
          }
          Launch{blocks_for(view), kThreads, 0, stream_of(context.stream)}(
              quantize_kernel<code, Storage>, source.as<Storage>(),
              vector_aligned<Storage>(source.data, view.segment_length), view, mixed_key(key),
              counters_of(counters));
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
    if (has_whole_nf4_blocks(view) && vector_aligned<Storage>(destination.data, view.segment_length)) {
      Launch{whole_blocks_for(view), kThreads, 0, stream_of(context.stream)}(
          whole_dequantize_kernel<Storage>, view, whole_groups(view), destination.as<Storage>());
      return;
    }
    const std::int64_t chunks = destination.count() / kFlatChunk;
    if (view.path == Code::kNf4 && view.scale == ScaleType::kTwoLevel &&
        chunks < std::int64_t{1} << 32 && view.aligned &&
        vector_aligned<Storage>(destination.data, view.segment_length) &&
        view.segment_length % kFlatChunk == 0) {
      Launch{flat_blocks_for(chunks), kThreads, 0, stream_of(context.stream)}(
          flat_dequantize_kernel<Storage>, reinterpret_cast<const std::uint32_t*>(view.codes),
          reinterpret_cast<const std::uint8_t*>(view.scales), reinterpret_cast<const Bf16*>(view.super),
          view.block_shift, static_cast<std::uint32_t>(view.segment_length / kFlatChunk),
          view.groups_per_segment, chunks, destination.as<Storage>());
      return;
    }
    for_activation_path<Storage>(
        view,
        [&]<Code code>() {
          Launch{blocks_for(view), kThreads, 0, stream_of(context.stream)}(
              dequantize_kernel<code, Storage>, view, destination.as<Storage>(),
              vector_aligned<Storage>(destination.data, view.segment_length));
        },
        [&] {
          Launch{blocks_for(view), kThreads, 0, stream_of(context.stream)}(
              dequantize_kernel<kSharedPath, Storage>, view, destination.as<Storage>(),
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
    if (view.path == Code::kE4m3 && view.scale == ScaleType::kFp32 && view.aligned &&
        vector_aligned<Storage>(addend.data, view.segment_length)) {
      const ChunkCut cut = chunk_cut(view, addend.count());
      Launch{flat_blocks_for(cut.total_chunks), kThreads, 0, stream_of(context.stream)}(
          flat_accumulate_kernel<Storage>, addend.as<Storage>(), reinterpret_cast<uint2*>(view.codes),
          reinterpret_cast<float*>(view.scales), view.block_shift, cut, counters_of(counters));
      return;
    }
    for_gradient_path(
        view,
        [&]<Code code>() {
          Launch{blocks_for(view), kThreads, 0, stream_of(context.stream)}(
              accumulate_kernel<code, Storage>, addend.as<Storage>(),
              vector_aligned<Storage>(addend.data, view.segment_length), view, mixed_key(key),
              counters_of(counters));
        },
        [&] { launch_shared(context, addend, true, view, key, counters_of(counters)); });
  });
  expect_launched("accumulate");
}

}  // namespace agoq::cuda

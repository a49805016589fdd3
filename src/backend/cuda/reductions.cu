// Sums in double precision whose value does not depend on the launch.
//
//   sum              of x
//   sum_of_squares   of what x decodes to: the norm of the main gradient is taken from it
//
// The tensor is cut into kParts parts, each the work of one block of threads; a thread adds what it owns
// in order, the block adds its threads in a fixed tree, and one more block adds the parts in a fixed
// tree. Nothing of that depends on the GPU, so neither does the result. (The CPU adds in another order:
// the two agree to FP64 rounding.)
//
// A block of quantised elements adds scale^2 times the sum of its squared levels. Levels are small
// numbers, so eight of them are added in FP32, where a sum in FP64 would cost twice the time of reading
// them: 2^-24 of each eight squares at most, as much as the CPU rounds each element by.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/group_codec.cuh"
#include "backend/cuda/part_sums.cuh"
#include "backend/operand_checks.h"

namespace agoq::cuda {
namespace {

constexpr int kThreads = kSumThreads;
constexpr int kWarps = kThreads / kWarp;
constexpr int kParts = kSumParts;

template <typename Element>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const Element* x, std::int64_t count, double* parts) {
  await_predecessors();
  double total = 0;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += std::int64_t{kParts} * kThreads) {
    if constexpr (std::is_same_v<Element, double>) {
      total += x[i];
    } else {
      total += to_float(x[i]);
    }
  }
  total = block_sum<kThreads>(total);
  if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

/// A warp's share of group `index`.
template <Code code>
__device__ __forceinline__ double group_sum_of_squares(const QuantView& view, std::uint32_t index) {
  const Group group = group_at(view, index);
  double total = 0;
  if constexpr (group_detail::has_blocks<code>()) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float level[kVector];
      const double scale = decode_levels<code>(view, group, chunk, level);
      float squares = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) squares = fmaf(level[i], level[i], squares);
      total = fma(scale * scale, static_cast<double>(squares), total);
    }
  } else {
    GroupValues values;
    decode_group<code>(view, group, values);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const double value = values[chunk][i];
        total = fma(value, value, total);
      }
    }
  }
  return total;
}

template <Code code>
__global__ void __launch_bounds__(kThreads) sum_of_squares_kernel(QuantView view, double* parts) {
  await_predecessors();
  double total = 0;
  for (std::uint64_t index = blockIdx.x * kWarps + threadIdx.x / kWarp; index < view.groups;
       index += std::uint64_t{kParts} * kWarps) {
    total += group_sum_of_squares<code>(view, static_cast<std::uint32_t>(index));
  }
  total = block_sum<kThreads>(total);
  if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

// E4M3 under FP32 scales, segments of whole blocks: planes have no gaps, and a thread adds sixteen
// neighbouring elements of one block at a time.
constexpr int kWide = 16;
constexpr int kInFlight = 4;

__global__ void __launch_bounds__(kThreads)
    flat_sum_of_squares_kernel(const uint4* codes, const float* scales, int block_shift,
                               std::int64_t vectors, double* parts) {
  await_predecessors();
  double total = 0;
  constexpr std::int64_t kStep = std::int64_t{kParts} * kThreads;
  const std::int64_t begin = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (std::int64_t first = begin; first < vectors; first += kInFlight * kStep) {
    uint4 loaded[kInFlight];
    float scale[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const std::int64_t vector = first + k * kStep;
      const bool present = vector < vectors;
      loaded[k] = present ? codes[vector] : make_uint4(0, 0, 0, 0);
      scale[k] = present ? scales[vector * kWide >> block_shift] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      float low[kVector], high[kVector];
      group_detail::decode_vector<Code::kE4m3>({loaded[k].x, loaded[k].y}, 0.0f, low);
      group_detail::decode_vector<Code::kE4m3>({loaded[k].z, loaded[k].w}, 0.0f, high);
      float of_low = 0, of_high = 0;  // of eight elements each
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        of_low = fmaf(low[i], low[i], of_low);
        of_high = fmaf(high[i], high[i], of_high);
      }
      const double wide_scale = scale[k];
      const double squares = static_cast<double>(of_low) + static_cast<double>(of_high);
      total = fma(wide_scale * wide_scale, squares, total);
    }
  }
  total = block_sum<kThreads>(total);
  if (threadIdx.x == 0) parts[blockIdx.x] = total;
}

bool is_flat(const QuantView& view) {
  return view.path == Code::kE4m3 && view.scale == ScaleType::kFp32 &&
         view.segment_length % view.block == 0 &&
         reinterpret_cast<std::uintptr_t>(view.codes) % sizeof(uint4) == 0;
}

}  // namespace

void CudaBackend::sum(const Context& context, const Tensor& x, const Tensor& total) {
  check_total("sum", total);
  const Arena::Scope scope(context.workspace);
  const Tensor parts = take_parts(context);
  if (context.workspace.is_measuring()) return;
  const cudaStream_t stream = stream_of(context.stream);
  const auto run = [&]<typename Element>() {
    Launch{kParts, kThreads, 0, stream}(sum_kernel<Element>, x.as<Element>(), x.count(),
                                        parts.as<double>());
  };
  switch (x.type) {
    case ElementType::kFp64: run.template operator()<double>(); break;
    case ElementType::kFp32: run.template operator()<float>(); break;
    case ElementType::kBf16: run.template operator()<Bf16>(); break;
    case ElementType::kFp16: run.template operator()<Fp16>(); break;
    default: fail("sum: floating-point elements were expected; {} was given", name_of(x.type));
  }
  add_parts(stream, parts, total);
  expect_launched("sum");
}

void CudaBackend::sum_of_squares(const Context& context, const QuantTensor& x, const Tensor& total) {
  check_total("sum_of_squares", total);
  check(x.format.code != Code::kFp64, "sum_of_squares: fp64 tensors exist on the CPU only");
  const Arena::Scope scope(context.workspace);
  const Tensor parts = take_parts(context);
  if (context.workspace.is_measuring()) return;
  const cudaStream_t stream = stream_of(context.stream);
  const QuantView view = view_of(x);
  const auto run = [&]<Code code>() {
    Launch{kParts, kThreads, 0, stream}(sum_of_squares_kernel<code>, view, parts.as<double>());
  };
  if (is_flat(view)) {
    Launch{kParts, kThreads, 0, stream}(flat_sum_of_squares_kernel,
                                        reinterpret_cast<const uint4*>(view.codes),
                                        reinterpret_cast<const float*>(view.scales), view.block_shift,
                                        x.grid.count() / kWide, parts.as<double>());
    add_parts(stream, parts, total);
    return expect_launched("sum_of_squares");
  }
  switch (view.path) {
    case Code::kE4m3: run.template operator()<Code::kE4m3>(); break;
    case Code::kInt8: run.template operator()<Code::kInt8>(); break;
    case Code::kFp32: run.template operator()<Code::kFp32>(); break;
    default: run.template operator()<kSharedPath>();
  }
  add_parts(stream, parts, total);
  expect_launched("sum_of_squares");
}

}  // namespace agoq::cuda

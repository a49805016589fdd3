// Sums in double precision whose value does not depend on the launch.
//
//   sum               of x
//   sums_of_squares   of what tensors decode to: the norm of the main gradient is taken from them
//
// A tensor is cut into parts, by its size alone, each the work of one block of threads; a thread adds
// what it owns in order, the block adds its threads in a fixed tree, and one more block adds the parts
// in a fixed tree. Nothing of that depends on the GPU, so neither does the result. (The CPU adds in
// another order: the two agree to FP64 rounding.)
//
// A block of quantised elements adds scale^2 times the sum of its squared levels. Levels are small
// numbers, so up to sixteen of them are added in FP32, where a sum in FP64 would cost twice the time of
// reading them: each addition rounds by 2^-24 at most, as much as the CPU rounds each element by.
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

struct GroupedTensor {
  QuantView view;
  double* parts;
};

template <Code code>
__global__ void __launch_bounds__(kThreads)
    sums_of_squares_kernel(const __grid_constant__ TensorBatch<GroupedTensor> batch) {
  await_predecessors();
  const BatchPlace place = place_in(batch);
  const GroupedTensor& tensor = batch.items[place.item];
  double total = 0;
  for (std::uint64_t index = place.block * kWarps + threadIdx.x / kWarp; index < tensor.view.groups;
       index += std::uint64_t{kParts} * kWarps) {
    total += group_sum_of_squares<code>(tensor.view, static_cast<std::uint32_t>(index));
  }
  total = block_sum<kThreads>(total);
  if (threadIdx.x == 0) tensor.parts[place.block] = total;
}

/// A part has at least one group: parts without one would add zeros.
std::int64_t grouped_parts(std::int64_t groups) {
  return std::clamp<std::int64_t>((groups + kWarps - 1) / kWarps, 1, kParts);
}

// E4M3 under FP32 scales, segments of whole blocks: a thread adds kInFlight units (group_codec.cuh), of
// which neighbouring threads have neighbouring ones. Parts are small, so that multiprocessors which are
// served sooner do more of them; a tensor of more than kMostFlatParts has several rounds.
constexpr int kInFlight = 4;
constexpr int kResidentBlocks = 6;  // 40 registers: nothing spills
constexpr std::int64_t kMostFlatParts = 8192;

struct FlatTensor {
  const uint4* codes;
  const float* scales;
  double* parts;
  std::uint32_t units, step;  // step: units of all parts at a time
  int units_per_block_shift;
};

__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    flat_sums_of_squares_kernel(const __grid_constant__ TensorBatch<FlatTensor> batch) {
  await_predecessors();
  const BatchPlace place = place_in(batch);
  const auto [codes, scales, parts, units, step, units_per_block_shift] = batch.items[place.item];
  double total = 0;
  for (std::uint32_t first = place.block * kThreads + threadIdx.x; first < units;
       first += kInFlight * step) {
    uint4 loaded[kInFlight];
    float scale[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const std::uint32_t unit = first + k * step;
      loaded[k] = make_uint4(0, 0, 0, 0), scale[k] = 0.0f;
      if (unit < units) loaded[k] = codes[unit], scale[k] = scales[unit >> units_per_block_shift];
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
      total = fma(wide_scale * wide_scale, static_cast<double>(of_low + of_high), total);
    }
  }
  total = block_sum<kThreads>(total);
  if (threadIdx.x == 0) parts[place.block] = total;
}

/// Parts of a tensor of `units`.
std::int64_t flat_parts(std::int64_t units) {
  constexpr std::int64_t kOfPart = kThreads * kInFlight;
  return std::clamp<std::int64_t>((units + kOfPart - 1) / kOfPart, 1, kMostFlatParts);
}

bool is_flat(const QuantView& view, std::int64_t units) {
  return has_flat_units(view) && units < (std::int64_t{1} << 32) - kMostFlatParts * kThreads * kInFlight;
}

/// The path by which a tensor's squares are added: kSharedPath serves all.
Code summing_path(const QuantView& view) {
  switch (view.path) {
    case Code::kE4m3:
    case Code::kInt8:
    case Code::kFp32: return view.path;
    default: return kSharedPath;
  }
}

}  // namespace

void CudaBackend::sum(const Context& context, const Tensor& x, const Tensor& total) {
  check_totals("sum", total, 1);
  const Arena::Scope scope(context.workspace);
  const std::int64_t count = kParts;
  const PartSums sums(context, total, {&count, 1});
  if (context.workspace.is_measuring()) return;
  const cudaStream_t stream = stream_of(context.stream);
  const auto run = [&]<typename Element>() {
    Launch{kParts, kThreads, 0, stream}(sum_kernel<Element>, x.as<Element>(), x.count(), sums.parts(0));
  };
  switch (x.type) {
    case ElementType::kFp64: run.template operator()<double>(); break;
    case ElementType::kFp32: run.template operator()<float>(); break;
    case ElementType::kBf16: run.template operator()<Bf16>(); break;
    case ElementType::kFp16: run.template operator()<Fp16>(); break;
    default: fail("sum: floating-point elements were expected; {} was given", name_of(x.type));
  }
  sums.add(stream);
  expect_launched("sum");
}

void CudaBackend::sums_of_squares(const Context& context, std::span<const QuantTensor> xs,
                                  const Tensor& totals) {
  check_totals("sums_of_squares", totals, xs.size());
  const Arena::Scope scope(context.workspace);
  std::vector<QuantView> views;
  std::vector<std::int64_t> units, counts;
  for (const QuantTensor& x : xs) {
    check(x.format.code != Code::kFp64, "sums_of_squares: fp64 tensors exist on the CPU only");
    views.push_back(view_of(x));
    units.push_back(x.grid.count() / kUnit);  // in the formats that have them
    const std::int64_t grouped = grouped_parts(views.back().groups), flat = flat_parts(units.back());
    if (context.workspace.is_measuring()) {  // no addresses yet, which decide between the two
      counts.push_back(std::max(grouped, flat));
    } else {
      counts.push_back(is_flat(views.back(), units.back()) ? flat : grouped);
    }
  }
  const PartSums sums(context, totals, counts);
  if (context.workspace.is_measuring()) return;
  const cudaStream_t stream = stream_of(context.stream);
  {
    BatchedLaunches<TensorBatch<FlatTensor>> launches(
        [&](unsigned blocks, const TensorBatch<FlatTensor>& batch) {
          Launch{blocks, kThreads, 0, stream}(flat_sums_of_squares_kernel, batch);
        });
    for (std::size_t i = 0; i < xs.size(); ++i) {
      if (!is_flat(views[i], units[i])) continue;
      launches.add({reinterpret_cast<const uint4*>(views[i].codes),
                    reinterpret_cast<const float*>(views[i].scales), sums.parts(i),
                    static_cast<std::uint32_t>(units[i]), sums.count(i) * kThreads,
                    views[i].block_shift - 4},  // log2(kUnit)
                   sums.count(i));
    }
  }
  const auto run = [&]<Code code>() {
    BatchedLaunches<TensorBatch<GroupedTensor>> launches(
        [&](unsigned blocks, const TensorBatch<GroupedTensor>& batch) {
          Launch{blocks, kThreads, 0, stream}(sums_of_squares_kernel<code>, batch);
        });
    for (std::size_t i = 0; i < xs.size(); ++i) {
      if (is_flat(views[i], units[i]) || summing_path(views[i]) != code) continue;
      launches.add({views[i], sums.parts(i)}, sums.count(i));
    }
  };
  run.template operator()<Code::kE4m3>();
  run.template operator()<Code::kInt8>();
  run.template operator()<Code::kFp32>();
  run.template operator()<kSharedPath>();
  sums.add(stream);
  expect_launched("sums_of_squares");
}

}  // namespace agoq::cuda

// Sums of what several ranks hold of the same rows.
//
//   add_pieces               sum = Q(Q^-1(p0) + Q^-1(p1) + ...)
//   pieces_sums_of_squares   totals = sums over elements of (Q^-1(p0) + Q^-1(p1) + ...)^2
//
// Elements are added in FP32, in the order of the pieces, which one kernel reads: their planes'
// addresses are among its parameters. Sums of more than kMostPieces go by the default body.
//
// add_pieces. E4M3 under FP32 scales in segments of whole blocks, planes without gaps: a thread owns
// *units* of sixteen neighbouring elements, which lie in one block, and reads two pieces at a time.
// Other formats: a warp owns groups (group_codec.cuh).
//
// pieces_sums_of_squares. Every row is cut into units of sixteen columns, the last one short; unit u
// belongs to thread u modulo all threads, which adds its units in order and the elements of a unit in
// order, in FP64; threads and blocks are added in fixed trees (part_sums.cuh). So the result depends on
// the values only: it has the same bits for pieces and for their FP32 sum, whatever the format, block or
// segments.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/group_codec.cuh"
#include "backend/cuda/part_sums.cuh"
#include "backend/cuda/piece_planes.cuh"
#include "backend/operand_checks.h"

namespace agoq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;
// Whose planes' addresses fit into the 32,764 bytes of a kernel's parameters.
constexpr int kMostSquared = 960;

template <int kMost>
__device__ __forceinline__ QuantView view_of_piece(const QuantView& all, const Planes<kMost>& planes,
                                                   int piece) {
  QuantView view = all;
  view.codes = planes.codes[piece];
  view.bits = planes.bits[piece];
  view.scales = planes.scales[piece];
  view.super = planes.super[piece];
  return view;
}

// --- units of E4M3 under FP32 scales, planes without gaps ---

struct PieceUnit {
  uint4 codes;
  float scale;
};
template <int kMost>
__device__ __forceinline__ PieceUnit load_unit(const Planes<kMost>& planes, int piece, std::int64_t unit,
                                               int block_shift) {
  return {reinterpret_cast<const uint4*>(planes.codes[piece])[unit],
          reinterpret_cast<const float*>(planes.scales[piece])[unit * kUnit >> block_shift]};
}

/// x = or += the unit's elements.
template <bool adds>
__device__ __forceinline__ void decode_unit(const PieceUnit& unit, float (&x)[kUnit]) {
  decode_e4m3_unit<adds>(unit.codes, unit.scale, x);
}

/// x = the sum of the pieces' elements of a unit that exists.
template <int kMost>
__device__ __forceinline__ void sum_unit(const Planes<kMost>& planes, std::int64_t unit, int block_shift,
                                         float (&x)[kUnit]) {
  const int count = planes.count;
  PieceUnit even = load_unit(planes, 0, unit, block_shift), odd{};
  if (count > 1) odd = load_unit(planes, 1, unit, block_shift);
  decode_unit<false>(even, x);
#pragma unroll 1
  for (int piece = 1; piece < count; piece += 2) {
    if (piece + 1 < count) even = load_unit(planes, piece + 1, unit, block_shift);
    decode_unit<true>(odd, x);
    if (piece + 2 < count) odd = load_unit(planes, piece + 2, unit, block_shift);
    if (piece + 1 < count) decode_unit<true>(even, x);
  }
}

// While one bucket is summed another one is exchanged. NCCL's blocks take the registers of a
// multiprocessor each, and wait for a kernel that has some of all: so a block here takes a whole
// multiprocessor too, and some are left free. 1,024 threads with two loads of 16 bytes each in flight
// are what copy speed needs.
constexpr int kFlatThreads = 1024;
constexpr int kLeftForExchange = 32;

unsigned flat_blocks(std::int64_t units) {
  const std::int64_t all = device().multiprocessors;
  const std::int64_t most = std::max(all - kLeftForExchange, (all + 1) / 2);
  return static_cast<unsigned>(std::min((units + kFlatThreads - 1) / kFlatThreads, most));
}

__global__ void __launch_bounds__(kFlatThreads, 1)
    add_flat_kernel(const __grid_constant__ Planes<> planes, uint4* codes, float* scales,
                    int block_shift, std::int64_t units, std::int64_t* counters) {
  await_predecessors();
  const int lanes = (1 << block_shift) / kUnit;  // of a block
  const bool leads_block = (lane_index() & (lanes - 1)) == 0;
  LaneCounts counts;
  const std::int64_t step = std::int64_t{gridDim.x} * kFlatThreads;
  // A warp goes on until all of its lanes are past the end: blocks are reduced over lanes.
  for (std::int64_t first = std::int64_t{blockIdx.x} * kFlatThreads + threadIdx.x - lane_index();
       first < units; first += step) {
    const std::int64_t unit = first + lane_index();
    float x[kUnit] = {};
    if (unit < units) sum_unit(planes, unit, block_shift, x);
    float scale;
    const uint4 encoded = encode_e4m3(x, lanes, scale, counts);
    if (unit >= units) continue;
    codes[unit] = encoded;
    if (leads_block) scales[unit * kUnit >> block_shift] = scale;
  }
  counts.add_to(counters);
}

// --- groups of any format ---

/// `code` is the path of the pieces and of the sum, or kSharedPath, which serves all.
template <Code code>
__global__ void __launch_bounds__(kThreads)
    add_groups_kernel(const __grid_constant__ Planes<> planes, const __grid_constant__ QuantView pieces,
                      const __grid_constant__ QuantView sum, const std::int32_t* row_numbers,
                      RandomWords key, std::int64_t* counters) {
  await_predecessors();
  LaneCounts counts;
  const std::uint32_t step = gridDim.x * (kThreads / kWarp);
  for (std::uint64_t index = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp; index < sum.groups;
       index += step) {
    const auto number = static_cast<std::uint32_t>(index);
    GroupValues values;
    {
      const QuantView view = view_of_piece(pieces, planes, 0);
      decode_group<code>(view, group_at(view, number), values);
    }
#pragma unroll 1
    for (int piece = 1; piece < planes.count; ++piece) {
      const QuantView view = view_of_piece(pieces, planes, piece);
      add_decoded_group<code>(view, group_at(view, number), values);
    }
    Group group = group_at(sum, number);
    if constexpr (code == kSharedPath) {  // which stochastic formats take
      // The planes' addresses are made: the row is from here on what rounding is keyed by.
      if (row_numbers != nullptr) group.row = row_numbers[group.row] - sum.first_row;
    }
    encode_group<code>(sum, group, values, key, counts);
  }
  counts.add_to(counters);
}

// --- squares, unit by unit ---

/// How rows are cut into units.
struct UnitCut {
  std::int64_t units;  // of the tensor
  std::uint32_t per_row;
};

/// Element `column` of row `row`, of any format: reads the element's own bits only.
__device__ float element_of(const QuantView& view, std::int64_t row, std::int64_t column) {
  const auto* const codes = reinterpret_cast<const std::uint8_t*>(view.codes) + row * view.row.codes;
  if (view.code == Code::kFp32) return reinterpret_cast<const float*>(codes)[column];
  if (view.code == Code::kBf16) return to_float(reinterpret_cast<const Bf16*>(codes)[column]);
  if (view.code == Code::kFp16) return to_float(reinterpret_cast<const Fp16*>(codes)[column]);
  const auto segment = static_cast<std::uint32_t>(column / view.segment_length);
  const std::int64_t in_segment = column - segment * view.segment_length;
  const auto in_row =
      segment * view.groups_per_segment + static_cast<std::uint32_t>(in_segment / kSuperBlock);
  const Group group = group_of(view, row, in_row);
  const auto at = static_cast<int>(in_segment % kSuperBlock);
  const float scale = group_detail::load_scale(view, group, at >> view.block_shift);
  if (scale == 0.0f) return 0.0f;
  std::uint32_t code;
  if (view.code >= Code::kInt8) {
    code = group.codes[at];
  } else {
    code = group.codes[at / 2] >> (4 * (at % 2)) & 0xFu;
    for (int bit = 0; bit < extra_bits(view.code); ++bit) {
      code |= (group.bits[bit * group.bits_stride + at / 8] >> (at % 8) & 1u) << (4 + bit);
    }
  }
  return group_detail::decode_any(view.code, code) * scale;
}

/// The pieces' format and layout, where it is known when compiled.
enum class Layout { kFlatE4m3, kFlatFp32, kAny };

template <Layout layout, int kMost>
__device__ __forceinline__ void sum_columns(const Planes<kMost>& planes, const QuantView& pieces,
                                            const UnitCut& cut, std::int64_t unit, float (&x)[kUnit]) {
  if constexpr (layout == Layout::kFlatE4m3) {
    sum_unit(planes, unit, pieces.block_shift, x);
  } else if constexpr (layout == Layout::kFlatFp32) {
#pragma unroll 1
    for (int piece = 0; piece < planes.count; ++piece) {
      const float* const from = reinterpret_cast<const float*>(planes.codes[piece]) + unit * kUnit;
      float low[kVector], high[kVector];
      load_vector(from, low);
      load_vector(from + kVector, high);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        x[i] = piece == 0 ? low[i] : x[i] + low[i];
        x[kVector + i] = piece == 0 ? high[i] : x[kVector + i] + high[i];
      }
    }
  } else {
    const std::int64_t row = unit / cut.per_row;
    const std::int64_t column = (unit - row * cut.per_row) * kUnit;
#pragma unroll 1
    for (int piece = 0; piece < planes.count; ++piece) {
      const QuantView view = view_of_piece(pieces, planes, piece);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if (column + i >= view.row_length) continue;
        const float value = element_of(view, row, column + i);
        x[i] = piece == 0 ? value : x[i] + value;
      }
    }
  }
}

/// Of up to kMost pieces.
template <int kMost>
struct SquaredPieces {
  Planes<kMost> planes;
  QuantView view;
  UnitCut cut;
  double* parts;
};

/// As many tensors as fit into a batch, one at least.
template <int kMost>
using SquaredBatch =
    TensorBatch<SquaredPieces<kMost>,
                std::max(1, static_cast<int>(kBatchBytes / (sizeof(SquaredPieces<kMost>) + 4)))>;

template <Layout layout, int kMost>
__global__ void __launch_bounds__(kSumThreads)
    squares_kernel(const __grid_constant__ SquaredBatch<kMost> batch) {
  await_predecessors();
  const BatchPlace place = place_in(batch);
  const SquaredPieces<kMost>& tensor = batch.items[place.item];
  double total = 0;
  for (std::int64_t unit = std::int64_t{place.block} * kSumThreads + threadIdx.x;
       unit < tensor.cut.units; unit += std::int64_t{kSumParts} * kSumThreads) {
    float x[kUnit] = {};  // a square of zero changes no sum
    sum_columns<layout>(tensor.planes, tensor.view, tensor.cut, unit, x);
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const double value = x[i];
      total = fma(value, value, total);
    }
  }
  total = block_sum<kSumThreads>(total);
  if (threadIdx.x == 0) tensor.parts[place.block] = total;
}

Layout layout_of(const QuantView& view) {
  if (has_flat_units(view)) return Layout::kFlatE4m3;
  const bool flat = view.code == Code::kFp32 && view.aligned && view.row_length % kUnit == 0;
  return flat ? Layout::kFlatFp32 : Layout::kAny;
}

// --- the naive sum, a control: an element to a thread ---

__device__ __forceinline__ float rounded_to_e4m3(float y) {
  return decode<Code::kE4m3>(encode<Code::kE4m3>(y));
}

__global__ void __launch_bounds__(kThreads)
    add_naively_kernel(const __grid_constant__ Planes<> planes, const __grid_constant__ QuantView pieces,
                       const __grid_constant__ QuantView sum, std::int64_t elements, float scale) {
  await_predecessors();
  const float reciprocal = scale > 0.0f ? 1.0f / scale : 0.0f;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < elements; i += step) {
    const std::int64_t row = i / sum.row_length;
    const std::int64_t column = i - row * sum.row_length;
    float total = 0.0f;
#pragma unroll 1
    for (int piece = 0; piece < planes.count; ++piece) {
      const float value = element_of(view_of_piece(pieces, planes, piece), row, column);
      total = rounded_to_e4m3(total + rounded_to_e4m3(value * reciprocal));
    }
    // Codes only: the sum may be one of the pieces, whose scales other threads still read.
    reinterpret_cast<std::uint8_t*>(sum.codes)[row * sum.row.codes + column] =
        static_cast<std::uint8_t>(encode<Code::kE4m3>(total));
  }
}

__global__ void __launch_bounds__(kThreads)
    fill_scales_kernel(float* scales, std::int64_t count, float scale) {
  await_predecessors();
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) scales[i] = scale;
}

void refuse_fp64(std::string_view operation, const QuantTensor& tensor) {
  check(tensor.format.code != Code::kFp64, "{}: fp64 tensors exist on the CPU only", operation);
}

}  // namespace

void CudaBackend::add_pieces(const Context& context, std::span<const QuantTensor> pieces,
                             const QuantTensor& sum, const RandomKey& key, const Tensor& counters,
                             const Tensor& row_numbers) {
  expect_pieces("add_pieces", pieces, sum.grid);
  expect_counters("add_pieces", counters);
  expect_row_numbers(sum, row_numbers);
  refuse_fp64("add_pieces", pieces.front());
  refuse_fp64("add_pieces", sum);
  if (pieces.size() > kMostPieces) {
    return Backend::add_pieces(context, pieces, sum, key, counters, row_numbers);
  }
  if (context.workspace.is_measuring() || sum.grid.count() == 0) return;
  const Planes<> planes = planes_of(pieces);
  const QuantView of_pieces = view_of_all(pieces);
  const QuantView of_sum = view_of(sum);
  const cudaStream_t stream = stream_of(context.stream);
  std::int64_t* const counted = counters ? counters.as<std::int64_t>() : nullptr;
  if (has_flat_units(of_pieces) && has_flat_units(of_sum) && of_pieces.block == of_sum.block) {
    const std::int64_t units = sum.grid.count() / kUnit;
    Launch{flat_blocks(units), kFlatThreads, 0, stream}(
        add_flat_kernel, planes, reinterpret_cast<uint4*>(of_sum.codes),
        reinterpret_cast<float*>(of_sum.scales), of_sum.block_shift, units, counted);
    return expect_launched("add_pieces");
  }
  const std::int32_t* const numbers = row_numbers ? row_numbers.as<std::int32_t>() : nullptr;
  const auto run = [&]<Code code>() {
    constexpr std::int64_t kWarps = kThreads / kWarp;
    const unsigned blocks =
        grid_blocks((std::int64_t{of_sum.groups} + kWarps - 1) / kWarps, kBlocksPerMultiprocessor);
    Launch{blocks, kThreads, 0, stream}(add_groups_kernel<code>, planes, of_pieces, of_sum, numbers,
                                        mixed_key(key), counted);
  };
  switch (of_pieces.path == of_sum.path ? of_sum.path : kSharedPath) {
    case Code::kE4m3: run.template operator()<Code::kE4m3>(); break;
    case Code::kInt8: run.template operator()<Code::kInt8>(); break;
    case Code::kDynamic8: run.template operator()<Code::kDynamic8>(); break;
    case Code::kFp32: run.template operator()<Code::kFp32>(); break;
    case Code::kBf16: run.template operator()<Code::kBf16>(); break;
    default: run.template operator()<kSharedPath>();
  }
  expect_launched("add_pieces");
}

void CudaBackend::add_pieces_naively(const Context& context, std::span<const QuantTensor> pieces,
                                     const QuantTensor& sum, float scale) {
  expect_naive_pieces(pieces, sum);
  check(pieces.size() <= kMostPieces, "add_pieces_naively: at most {} pieces; {} were given",
        kMostPieces, pieces.size());
  if (context.workspace.is_measuring() || sum.grid.count() == 0) return;
  const cudaStream_t stream = stream_of(context.stream);
  const std::int64_t elements = sum.grid.count();
  Launch{grid_blocks((elements + kThreads - 1) / kThreads, kBlocksPerMultiprocessor), kThreads, 0,
         stream}(add_naively_kernel, planes_of(pieces), view_of_all(pieces), view_of(sum), elements,
                 scale);
  const std::int64_t scales =
      sum.rows() * row_bytes(sum.format, sum.grid).scales / static_cast<std::int64_t>(sizeof(float));
  Launch{static_cast<unsigned>((scales + kThreads - 1) / kThreads), kThreads, 0, stream}(
      fill_scales_kernel, reinterpret_cast<float*>(sum.scales), scales, scale);
  expect_launched("add_pieces_naively");
}

void CudaBackend::pieces_sums_of_squares(const Context& context, std::span<const TensorPieces> tensors,
                                         const Tensor& totals) {
  constexpr const char* kOperation = "pieces_sums_of_squares";
  check_totals(kOperation, totals, tensors.size());
  const Arena::Scope scope(context.workspace);
  std::vector<QuantView> views;
  std::vector<UnitCut> cuts;
  std::vector<std::int64_t> parts;
  for (const TensorPieces& pieces : tensors) {
    expect_pieces(kOperation, pieces);
    refuse_fp64(kOperation, pieces.front());
    check(
        pieces.size() <= kMostSquared,
        "{}: up to {} pieces can be added on the GPU, and {} were given: shard the optimizer over fewer "
        "ranks",
        kOperation, kMostSquared, pieces.size());
    views.push_back(view_of_all(pieces));
    const std::int64_t per_row = (views.back().row_length + kUnit - 1) / kUnit;
    cuts.push_back({pieces.front().rows() * per_row, static_cast<std::uint32_t>(per_row)});
    // A part has at least one unit: parts without one would add zeros.
    parts.push_back(
        std::clamp<std::int64_t>((cuts.back().units + kSumThreads - 1) / kSumThreads, 1, kSumParts));
  }
  const PartSums sums(context, totals, parts);
  if (context.workspace.is_measuring()) return;
  const cudaStream_t stream = stream_of(context.stream);
  const auto run = [&]<Layout layout, int kFewest, int kMost>() {
    BatchedLaunches<SquaredBatch<kMost>> launches(
        [&](unsigned blocks, const SquaredBatch<kMost>& batch) {
          Launch{blocks, kSumThreads, 0, stream}(squares_kernel<layout, kMost>, batch);
        });
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto count = static_cast<int>(tensors[i].size());
      if (count < kFewest || count > kMost || layout_of(views[i]) != layout) continue;
      launches.add({planes_of<kMost>(tensors[i]), views[i], cuts[i], sums.parts(i)}, sums.count(i));
    }
  };
  const auto run_layout = [&]<Layout layout>() {
    run.template operator()<layout, 1, 2>();
    run.template operator()<layout, 3, 8>();
    run.template operator()<layout, 9, kMostPieces>();
    run.template operator()<layout, kMostPieces + 1, kMostSquared>();
  };
  run_layout.template operator()<Layout::kFlatE4m3>();
  run_layout.template operator()<Layout::kFlatFp32>();
  run_layout.template operator()<Layout::kAny>();
  sums.add(stream);
  expect_launched(kOperation);
}

}  // namespace agoq::cuda

// Normalisation of the rows of x [N, H], plain and fused with the residual sum and the codec.
//   RMSNorm    r = 1 / sqrt(mean(x^2) + eps)            y = x r w
//   LayerNorm  r = 1 / sqrt(mean((x - mean)^2) + eps)   y = (x - mean) r
// Backward, with the normalised row n = x r or (x - mean) r and g = dy w or dy:
//   RMSNorm    dx += r (g - n mean(g n))                dw += sum over rows of dy n
//   LayerNorm  dx += r (g - mean(g) - n mean(g n))
//
// Ownership. A row belongs to a *team* of warps of one thread block, one warp per group of up to 1,024
// elements (group_codec.cuh), which holds its elements in registers from the first load to the last
// store: each byte crosses the memory bus once. A block has as many teams as fit into eight warps, so
// that narrow rows fill the GPU too. Rows of more than kMaxGroups groups take kernels of their own,
// which read a row again where they need it.
//
// dw. A block takes every gridDim-th set of rows and adds up their dw in registers, its teams in order,
// then writes one row of partial sums to the workspace; a second kernel adds the partial rows in a fixed
// order. So results are the same in every run; they depend on the number of multiprocessors.
//
// Kernels that read a packed x use what it decodes to, in FP32; the plain composition rounds that to the
// tensors' type on its way through memory.
#include <algorithm>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/group_vectors.cuh"
#include "backend/operand_checks.h"

namespace agoq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxGroups = kThreads / kWarp;  // of a row that a team holds in registers: H <= 8,192
// Blocks of the backward kernels: two per multiprocessor, of which no GPU so far has more than 160. The
// workspace is planned without a GPU, so this is a constant.
constexpr int kBackwardBlocksPerMultiprocessor = 2;
constexpr std::int64_t kMaxPartials = 320;
constexpr int kSumThreads = 1024;

/// The rows of a launch and how blocks share them.
struct NormRows {
  std::int64_t rows;
  std::int64_t width;
  int warps;  // of a team
  int teams;  // of a block
  float epsilon;
  float inverse_width;
  bool layer_norm;

  unsigned threads() const { return static_cast<unsigned>(warps * teams * kWarp); }
  std::int64_t sets() const { return (rows + teams - 1) / teams; }
};

bool held_in_registers(const QuantView& view) { return view.groups_per_row() <= kMaxGroups; }

NormRows rows_of(NormKind kind, const QuantView& view, std::int64_t rows, double epsilon) {
  const int warps = static_cast<int>(view.groups_per_row());
  return {rows,
          view.row_length,
          warps,
          std::max(1, kMaxGroups / warps),
          static_cast<float>(epsilon),
          1.0f / static_cast<float>(view.row_length),
          kind == NormKind::kLayerNorm};
}

/// A warp's place in a block: its team, and the group of the team's row that it owns.
struct Place {
  int team;
  int group;
};
__device__ __forceinline__ Place place_of_warp(const NormRows& shape) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int team = warp / shape.warps;
  return {team, warp - team * shape.warps};
}

/// A sum over the elements of a row in two steps with a barrier between them: each warp leaves its
/// part in its slot, then every warp adds the slots of its team, all in the same order.
__device__ __forceinline__ void leave(float value, float* slots) {
  const float total = warp_sum(value);
  if (threadIdx.x % kWarp == 0) slots[threadIdx.x / kWarp] = total;
}
__device__ __forceinline__ float collect(const NormRows& shape, const Place& place, const float* slots) {
  const int warp = lane_index() % kMaxGroups;
  float total = warp < shape.warps ? slots[place.team * shape.warps + warp] : 0.0f;
#pragma unroll
  for (int lanes = kMaxGroups / 2; lanes > 0; lanes /= 2) {
    total += __shfl_xor_sync(kWholeWarp, total, lanes);
  }
  return total;
}

__device__ __forceinline__ float sum_of(const GroupValues& values) {
  float total = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) total += values[chunk][i];
  }
  return total;
}

/// values -= mean, except behind the group's end, where they stay zero.
__device__ __forceinline__ void centre(const Group& group, float mean, GroupValues& values) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const int count = vector_count(group, chunk);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i < count) values[chunk][i] -= mean;
    }
  }
}

/// Brings the lane's elements of a row nearer: they are wanted after the row's sums, and registers are
/// few.
template <typename Storage>
__device__ __forceinline__ void prefetch_group(const Group& group, const Storage* row) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (vector_count(group, chunk) == 0) continue;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + group.column + vector_begin(chunk)));
  }
}

enum class Input {
  kTensor,  // x, to which delta is added where it is given
  kSave,    // the same, and the sum is quantised
  kSaved,   // what the packed tensor decodes to
};

/// y = norm(input). delta and rstd may be null; weight is null for LayerNorm.
/// code: the path of the packed tensor (group_codec.cuh); of no account for Input::kTensor.
/// kWhole: Input::kSave, RMSNorm, has_whole_nf4_groups, everything is aligned, and a block is one team.
template <typename Storage, Input kInput, Code code, bool kWhole>
__global__ void __launch_bounds__(kThreads, sizeof(Storage) == 4                ? 2
                                            : kWhole || kInput == Input::kSaved ? 4
                                                                                : 3)
    forward_kernel(NormRows shape, QuantView given_view, Storage* x, const Storage* delta,
                   const Storage* weight, Storage* y, float* rstd, bool vectors, RandomWords key,
                   std::int64_t* counters) {
  await_predecessors();
  const QuantView view = kWhole ? with_known_layout(given_view) : given_view;
  const bool aligned = kWhole || vectors;
  __shared__ float mean_slots[kMaxGroups], square_slots[kMaxGroups];
  const Place place = place_of_warp(shape);
  const std::int64_t row = std::int64_t{blockIdx.x} * shape.teams + place.team;
  const bool active = kWhole || row < shape.rows;
  Group group = group_of(view, active ? row : shape.rows - 1, static_cast<std::uint32_t>(place.group));
  if constexpr (kWhole) group.count = kSuperBlock;
  if (!kWhole && !active) group.count = 0;
  const std::int64_t offset = group.row * shape.width;

  GroupValues values;
  PackedGroup<Storage> packed;  // of x, or of the sum
  if constexpr (kInput == Input::kSaved) {
    decode_group<code>(view, group, values);
  } else {
    load_packed_group(group, x + offset, aligned, packed);
    if (delta != nullptr) {
      PackedGroup<Storage> added;
      load_packed_group(group, delta + offset, aligned, added);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        float addend[kVector];
        widen(packed[chunk], values[chunk]);
        widen(added[chunk], addend);
#pragma unroll
        for (int i = 0; i < kVector; ++i) values[chunk][i] += addend[i];
        // What is quantised and normalised is the sum as x holds it.
        pack(values[chunk], packed[chunk]);
        widen(packed[chunk], values[chunk]);
        store_packed_part(group, x + offset, aligned, chunk, packed[chunk]);
      }
    } else {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) widen(packed[chunk], values[chunk]);
    }
  }
  const auto encode = [&](const GroupValues& sums) {
    if constexpr (kInput == Input::kSave) {
      LaneCounts counts;
      if constexpr (kWhole) {
        const WholeGroups::Place in_planes{
            static_cast<std::uint32_t>(row) * view.groups_per_row() + place.group, offset + group.column,
            static_cast<int>(kSuperBlock)};
        WholeNf4Encoder(view).encode(packed, in_planes, x + in_planes.element, counts);
      } else if (active) {
        encode_group<code>(view, group, sums, key, counts);
      }
      counts.add_to(counters);
    }
  };

  if (!kWhole && shape.layer_norm) {
    encode(values);  // before they are centred
    leave(sum_of(values), mean_slots);
    __syncthreads();
    centre(group, collect(shape, place, mean_slots) * shape.inverse_width, values);
  }
  float squares = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) squares = fmaf(values[chunk][i], values[chunk][i], squares);
  }
  leave(squares, square_slots);
  if (kWhole || !shape.layer_norm) encode(values);  // while other warps arrive
  __syncthreads();
  const float mean_square = collect(shape, place, square_slots) * shape.inverse_width;
  const float r = rsqrtf(mean_square + shape.epsilon);
  if (active && rstd != nullptr && place.group == 0 && threadIdx.x % kWarp == 0) rstd[row] = r;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if constexpr (kWhole) widen(packed[chunk], values[chunk]);  // not kept while they were encoded
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[chunk][i] *= r;
    if (weight != nullptr) {
      float w[kVector];
      load_part(group, weight, aligned, chunk, w);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[chunk][i] *= w[i];
    }
    store_part(group, y + offset, aligned, chunk, values[chunk]);
  }
}

/// y = norm(what the packed tensor decodes to) for RMSNorm where has_whole_nf4_groups and everything is
/// aligned. A block is one row: blocks that come and go stay in the order of memory.
__global__ void __launch_bounds__(kThreads, 4)
    whole_forward_saved_kernel(NormRows shape, QuantView view, const Bf16* weight, Bf16* y) {
  __shared__ float slots[kMaxGroups];
  const Place place = place_of_warp(shape);
  const float level = group_detail::level_of_lane<Code::kNf4>();
  const int in_row = place.group * static_cast<int>(kSuperBlock);
  const std::int64_t element = std::int64_t{blockIdx.x} * shape.width + in_row;
  await_predecessors();
  WholeNf4Group packed;
  packed.load(view, element);
  packed.resolve();
  GroupValues values;
  float squares = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    packed.decode(chunk, level, values[chunk]);
#pragma unroll
    for (int i = 0; i < kVector; ++i) squares = fmaf(values[chunk][i], values[chunk][i], squares);
  }
  leave(squares, slots);
  __syncthreads();
  const float mean_square = collect(shape, place, slots) * shape.inverse_width;
  const float r = rsqrtf(mean_square + shape.epsilon);
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    float w[kVector];
    load_vector(weight + in_row + vector_begin(chunk), w);
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[chunk][i] = values[chunk][i] * r * w[i];
    store_vector(values[chunk], y + element + vector_begin(chunk));
  }
}

/// Adds up the teams' dw of a block, in order, through `columns` and writes the block's row of partials.
__device__ __forceinline__ void write_partials(const NormRows& shape, const QuantView& view,
                                               const GroupValues& dw,
                                               float (&columns)[kMaxGroups][kSuperBlock],
                                               float* partials) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    store_vector(dw[chunk], columns[threadIdx.x / kWarp] + vector_begin(chunk));
  }
  __syncthreads();
  const int held = shape.warps * static_cast<int>(kSuperBlock);
  for (int i = static_cast<int>(threadIdx.x); i < held; i += static_cast<int>(blockDim.x)) {
    const int in_row = i / static_cast<int>(kSuperBlock), in_group = i % static_cast<int>(kSuperBlock);
    const Group group = group_of(view, 0, static_cast<std::uint32_t>(in_row));
    if (in_group >= group.count) continue;
    float total = 0.0f;
    for (int team = 0; team < shape.teams; ++team) {
      total += columns[team * shape.warps + in_row][in_group];
    }
    partials[std::int64_t{blockIdx.x} * shape.width + group.column + in_group] = total;
  }
}

/// dx of the rows of x, packed or not, and a row of partial sums of dw per block. rstd may be null;
/// weight and partials are null for LayerNorm.
template <typename Storage, Code code>
__global__ void __launch_bounds__(kThreads, sizeof(Storage) == 2 ? kBackwardBlocksPerMultiprocessor : 1)
    backward_kernel(NormRows shape, QuantView view, const Storage* dy, const Storage* weight,
                    const float* rstd, Storage* dx, bool aligned, float* partials) {
  await_predecessors();
  // Two sets, used in turn: a warp that is a row ahead writes to the other one, and the barrier of that
  // row keeps it from going further.
  __shared__ float slots[2][4][kMaxGroups];
  __shared__ __align__(16) float columns[kMaxGroups][kSuperBlock];
  const Place place = place_of_warp(shape);
  float dw[kChunks][kVector] = {};
  int turn = 0;
  const std::int64_t step = std::int64_t{gridDim.x} * shape.teams;
  for (std::int64_t first = std::int64_t{blockIdx.x} * shape.teams; first < shape.rows;
       first += step, turn ^= 1) {
    const std::int64_t row = first + place.team;
    const bool active = row < shape.rows;
    Group group = group_of(view, active ? row : shape.rows - 1, static_cast<std::uint32_t>(place.group));
    if (!active) group.count = 0;
    const std::int64_t offset = group.row * shape.width;

    PackedGroup<Storage> dy_packed;
    load_packed_group(group, dy + offset, aligned, dy_packed);
    prefetch_group(group, dx + offset);
    GroupValues values;
    decode_group<code>(view, group, values);
    if (shape.layer_norm) {
      leave(sum_of(values), slots[turn][3]);
      __syncthreads();
      centre(group, collect(shape, place, slots[turn][3]) * shape.inverse_width, values);
    }
    float squares = 0.0f, products = 0.0f, sum = 0.0f;  // of x, of g x, of g
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float g[kVector];
      widen(dy_packed[chunk], g);
      if (weight != nullptr) {
        float w[kVector];
        load_part(group, weight, aligned, chunk, w);
#pragma unroll
        for (int i = 0; i < kVector; ++i) g[i] *= w[i];
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        squares = fmaf(values[chunk][i], values[chunk][i], squares);
        products = fmaf(g[i], values[chunk][i], products);
        sum += g[i];
      }
    }
    leave(squares, slots[turn][0]);
    leave(products, slots[turn][1]);
    if (shape.layer_norm) leave(sum, slots[turn][2]);
    __syncthreads();
    const float mean_square = collect(shape, place, slots[turn][0]) * shape.inverse_width;
    float r = 0.0f;
    if (active) r = rstd != nullptr ? rstd[row] : rsqrtf(mean_square + shape.epsilon);
    const float mean_product = r * (collect(shape, place, slots[turn][1]) * shape.inverse_width);
    const float mean =
        shape.layer_norm ? collect(shape, place, slots[turn][2]) * shape.inverse_width : 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float g[kVector], out[kVector];
      widen(dy_packed[chunk], g);
      load_part(group, dx + offset, aligned, chunk, out);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        values[chunk][i] *= r;  // the normalised row
        dw[chunk][i] = fmaf(g[i], values[chunk][i], dw[chunk][i]);
      }
      if (weight != nullptr) {
        float w[kVector];
        load_part(group, weight, aligned, chunk, w);
#pragma unroll
        for (int i = 0; i < kVector; ++i) g[i] *= w[i];
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        out[i] = fmaf(r, fmaf(-values[chunk][i], mean_product, g[i] - mean), out[i]);
      }
      store_part(group, dx + offset, aligned, chunk, out);
    }
  }
  if (partials != nullptr) write_partials(shape, view, dw, columns, partials);
}

/// What a warp of whole_backward_kernel has under way from memory. A lane reads what it copied itself.
struct NextGroup {
  uint4 dy[kChunks][kWarp], dx[kChunks][kWarp];
};

/// The same for RMSNorm where has_whole_nf4_groups, everything is aligned and a block has at most two
/// teams, which then do not wait for each other. A row is decoded twice, which takes fewer registers
/// than keeping it. As soon as a vector of dy or dx has been used, that of the next row is on its way to
/// its place. The weights, read twice for each row, lie in shared memory, since the L1 cache does not
/// keep them while dx goes through it.
__global__ void __launch_bounds__(kThreads, kBackwardBlocksPerMultiprocessor)
    whole_backward_kernel(NormRows shape, QuantView view, const Bf16* dy, const Bf16* weight,
                          const float* rstd, Bf16* dx, float* partials) {
  __shared__ float slots[2][2][kMaxGroups];  // as in backward_kernel
  extern __shared__ __align__(16) std::byte shared[];
  auto* const next_groups = reinterpret_cast<NextGroup*>(shared);
  NextGroup& next = next_groups[threadIdx.x / kWarp];
  auto* const weights = reinterpret_cast<Bf16*>(next_groups + kMaxGroups);  // of a row
  const int lane = lane_index();
  const Place place = place_of_warp(shape);
  const float level = group_detail::level_of_lane<Code::kNf4>();
  float dw[kChunks][kVector] = {};
  const std::int64_t step = std::int64_t{gridDim.x} * shape.teams;
  const std::int64_t in_row = std::int64_t{place.group} * kSuperBlock;
  std::int64_t row = std::int64_t{blockIdx.x} * shape.teams + place.team;
  await_predecessors();
  for (int i = static_cast<int>(threadIdx.x) * kVector; i < shape.width;
       i += static_cast<int>(blockDim.x) * kVector) {
    copy_once_async(weight + i, weights + i);
  }
  WholeNf4Group next_x;
  if (row < shape.rows) {
    const std::int64_t element = row * shape.width + in_row;
    next_x.load(view, element);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      copy_once_async(dy + element + vector_begin(chunk), &next.dy[chunk][lane]);
      copy_once_async(dx + element + vector_begin(chunk), &next.dx[chunk][lane]);
    }
  }
  wait_for_copies();
  __syncthreads();  // the weights have come
  for (int turn = 0; row < shape.rows; row += step, turn ^= 1) {
    const std::int64_t element = row * shape.width + in_row;
    const std::int64_t of_next = element + step * shape.width;
    const bool more = row + step < shape.rows;
    WholeNf4Group x_packed = next_x;
    x_packed.resolve();
    if (more) next_x.load(view, of_next);
    wait_for_copies();
    float squares = 0.0f, products = 0.0f;  // of x, of g x
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float x[kVector], g[kVector], w[kVector];
      widen(packed_of(next.dy[chunk][lane]), g);
      load_vector(weights + in_row + vector_begin(chunk), w);
      x_packed.decode(chunk, level, x);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        squares = fmaf(x[i], x[i], squares);
        products = fmaf(g[i] * w[i], x[i], products);
      }
    }
    leave(squares, slots[turn][0]);
    leave(products, slots[turn][1]);
    // Hardware barriers of each team's own.
    if (place.team == 0) {
      asm volatile("bar.sync 1, %0;" ::"r"(shape.warps * kWarp) : "memory");
    } else {
      asm volatile("bar.sync 2, %0;" ::"r"(shape.warps * kWarp) : "memory");
    }
    const float mean_square = collect(shape, place, slots[turn][0]) * shape.inverse_width;
    const float r = rstd != nullptr ? rstd[row] : rsqrtf(mean_square + shape.epsilon);
    const float mean_product = r * (collect(shape, place, slots[turn][1]) * shape.inverse_width);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      float x[kVector], g[kVector], w[kVector], out[kVector];
      widen(packed_of(next.dy[chunk][lane]), g);
      widen(packed_of(next.dx[chunk][lane]), out);
      if (more) {
        copy_once_async(dy + of_next + vector_begin(chunk), &next.dy[chunk][lane]);
        copy_once_async(dx + of_next + vector_begin(chunk), &next.dx[chunk][lane]);
      }
      load_vector(weights + in_row + vector_begin(chunk), w);
      x_packed.decode(chunk, level, x);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float normalised = x[i] * r;
        dw[chunk][i] = fmaf(g[i], normalised, dw[chunk][i]);
        out[i] = fmaf(r, fmaf(-normalised, mean_product, g[i] * w[i]), out[i]);
      }
      store_vector(out, dx + element + vector_begin(chunk));
    }
  }
  __syncthreads();  // nothing is under way: the same memory adds up the teams
  write_partials(shape, view, dw, *reinterpret_cast<float(*)[kMaxGroups][kSuperBlock]>(shared),
                 partials);
}

/// dweight += the sum of the partial rows. A block takes 32 columns; warp w adds rows w, w + 16, ...,
/// then the first warp adds the warps' sums in order.
__global__ void __launch_bounds__(kSumThreads)
    sum_partials_kernel(const float* partials, std::int64_t count, std::int64_t width, float* dweight) {
  await_predecessors();
  constexpr int kWarps = kSumThreads / kWarp;
  __shared__ float sums[kWarps][kWarp];
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t column = std::int64_t{blockIdx.x} * kWarp + lane;
  float total = 0.0f;
  if (column < width) {
#pragma unroll 8
    for (std::int64_t row = warp; row < count; row += kWarps) total += partials[row * width + column];
  }
  sums[warp][lane] = total;
  __syncthreads();
  if (warp != 0 || column >= width) return;
  total = sums[0][lane];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) total += sums[i][lane];
  dweight[column] += total;
}

// Rows too long for a team: a block per row, thread t owns the columns t, t + 256, ...

/// The sum over the block's threads, the same in all of them. `slots` has room for one float per warp.
__device__ __forceinline__ float block_sum(float value, float* slots) {
  __syncthreads();  // an earlier sum has been read
  leave(value, slots);
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) total += slots[warp];
  return total;
}

struct RowStatistics {
  float mean;  // 0 for RMSNorm
  float rstd;
};

template <typename Storage>
__device__ __forceinline__ RowStatistics statistics_of(const NormRows& shape, const Storage* x,
                                                       float* slots) {
  float mean = 0.0f;
  if (shape.layer_norm) {
    float total = 0.0f;
    for (std::int64_t i = threadIdx.x; i < shape.width; i += kThreads) total += load(x[i]);
    mean = block_sum(total, slots) / static_cast<float>(shape.width);
  }
  float squares = 0.0f;
  for (std::int64_t i = threadIdx.x; i < shape.width; i += kThreads) {
    const float deviation = load(x[i]) - mean;
    squares = fmaf(deviation, deviation, squares);
  }
  const float mean_square = block_sum(squares, slots) / static_cast<float>(shape.width);
  return {mean, 1.0f / sqrtf(mean_square + shape.epsilon)};
}

template <typename Storage>
__global__ void __launch_bounds__(kThreads)
    long_forward_kernel(NormRows shape, const Storage* x, const Storage* weight, Storage* y,
                        float* rstd) {
  await_predecessors();
  __shared__ float slots[kThreads / kWarp];
  for (std::int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    const Storage* const in = x + row * shape.width;
    Storage* const out = y + row * shape.width;
    const RowStatistics row_statistics = statistics_of(shape, in, slots);
    if (rstd != nullptr && threadIdx.x == 0) rstd[row] = row_statistics.rstd;
    for (std::int64_t i = threadIdx.x; i < shape.width; i += kThreads) {
      const float normalised = (load(in[i]) - row_statistics.mean) * row_statistics.rstd;
      store(weight == nullptr ? normalised : normalised * load(weight[i]), out[i]);
    }
  }
}

template <typename Storage>
__global__ void __launch_bounds__(kThreads)
    long_backward_kernel(NormRows shape, const Storage* x, const Storage* dy, const Storage* weight,
                         const float* rstd, Storage* dx, float* partials) {
  await_predecessors();
  __shared__ float slots[kThreads / kWarp];
  const float width = static_cast<float>(shape.width);
  float* const dw = partials == nullptr ? nullptr : partials + std::int64_t{blockIdx.x} * shape.width;
  if (dw != nullptr) {
    for (std::int64_t i = threadIdx.x; i < shape.width; i += kThreads) dw[i] = 0.0f;
  }
  for (std::int64_t row = blockIdx.x; row < shape.rows; row += gridDim.x) {
    const Storage* const in = x + row * shape.width;
    const Storage* const dout = dy + row * shape.width;
    Storage* const out = dx + row * shape.width;
    const auto gradient = [&](std::int64_t i) {
      return weight == nullptr ? load(dout[i]) : load(dout[i]) * load(weight[i]);
    };
    auto [mean, r] = statistics_of(shape, in, slots);
    if (rstd != nullptr) r = rstd[row];
    float products = 0.0f, sum = 0.0f;
    for (std::int64_t i = threadIdx.x; i < shape.width; i += kThreads) {
      const float g = gradient(i);
      products = fmaf(g, load(in[i]) - mean, products);
      sum += g;
    }
    const float mean_product = r * block_sum(products, slots) / width;
    const float mean_gradient = shape.layer_norm ? block_sum(sum, slots) / width : 0.0f;
    for (std::int64_t i = threadIdx.x; i < shape.width; i += kThreads) {
      const float normalised = (load(in[i]) - mean) * r;
      const float change = fmaf(-normalised, mean_product, gradient(i) - mean_gradient);
      if (dw != nullptr) dw[i] = fmaf(load(dout[i]), normalised, dw[i]);
      store(fmaf(r, change, load(out[i])), out[i]);
    }
  }
}

/// A tensor that need not be given.
template <typename T>
T* data_of(const Tensor& tensor) {
  return tensor ? tensor.as<T>() : nullptr;
}

/// Whether every tensor that is given allows vector accesses in pieces of `piece` elements.
template <typename Storage>
bool all_aligned(std::int64_t piece, std::initializer_list<const Tensor*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [piece](const Tensor* tensor) {
    return vector_aligned<Storage>(tensor->data, piece);
  });
}

template <typename Storage, Input kInput, Code code>
void launch_forward(const Context& context, const NormRows& shape, const QuantView& view,
                    const Tensor& x, const Tensor& delta, const Tensor& weight, const Tensor& y,
                    const Tensor& rstd, const RandomKey& key, const Tensor& counters) {
  const bool aligned = all_aligned<Storage>(view.segment_length, {&x, &delta, &weight, &y});
  const auto launch = [&](auto kernel, const NormRows& rows) {
    Launch{static_cast<unsigned>(rows.sets()), rows.threads(), 0, stream_of(context.stream)}(
        kernel, rows, view, data_of<Storage>(x), data_of<Storage>(delta), data_of<Storage>(weight),
        y.as<Storage>(), data_of<float>(rstd), aligned, mixed_key(key), data_of<std::int64_t>(counters));
  };
  if constexpr (kInput != Input::kTensor && code == Code::kNf4 && std::is_same_v<Storage, Bf16>) {
    if (aligned && has_whole_nf4_groups(view) && !shape.layer_norm) {
      NormRows one_team = shape;
      one_team.teams = 1;
      if constexpr (kInput == Input::kSave) {
        return launch(forward_kernel<Storage, kInput, code, true>, one_team);
      } else {
        Launch{static_cast<unsigned>(shape.rows), one_team.threads(), 0, stream_of(context.stream)}(
            whole_forward_saved_kernel, one_team, view, weight.as<Bf16>(), y.as<Bf16>());
        return;
      }
    }
  }
  launch(forward_kernel<Storage, kInput, code, false>, shape);
}

unsigned backward_blocks(std::int64_t sets) {
  return static_cast<unsigned>(
      std::min<std::int64_t>(kMaxPartials, grid_blocks(sets, kBackwardBlocksPerMultiprocessor)));
}

/// Workspace for the partial rows of dw. Taken alike by both kinds of kernel, and before it is known
/// whether there is a GPU.
Tensor take_partials(const Context& context, NormKind kind, std::int64_t rows, std::int64_t width) {
  if (kind == NormKind::kLayerNorm) return {};
  return context.workspace.take(ElementType::kFp32, Shape{std::min(rows, kMaxPartials), width});
}

void sum_partials(const Context& context, const Tensor& partials, unsigned count,
                  const Tensor& dweight) {
  if (!partials) return;
  const std::int64_t width = dweight.count();
  Launch{static_cast<unsigned>((width + kWarp - 1) / kWarp), kSumThreads, 0, stream_of(context.stream)}(
      sum_partials_kernel, partials.as<float>(), count, width, dweight.as<float>());
}

/// dx and dw from an x that `view` describes, in registers.
void launch_backward(const Context& context, const NormRows& shape, const QuantView& view,
                     const Tensor& dy, const Tensor& weight, const Tensor& rstd, const Tensor& dx,
                     const Tensor& dweight, const Tensor& partials) {
  const unsigned blocks = backward_blocks(shape.sets());
  for_storage("norm_backward", dy.type, [&]<typename Storage>() {
    for_fused_path<Storage>(view, [&]<Code code>() {
      const bool aligned = all_aligned<Storage>(view.segment_length, {&dy, &weight, &dx});
      if constexpr (code == Code::kNf4 && std::is_same_v<Storage, Bf16>) {
        if (aligned && has_whole_nf4_groups(view) && !shape.layer_norm && shape.teams <= 2) {
          static_assert(sizeof(NextGroup) >= kSuperBlock * sizeof(float));  // of write_partials
          const int bytes = kMaxGroups * static_cast<int>(sizeof(NextGroup)) +
                            static_cast<int>(shape.width * sizeof(Bf16));
          expect_success(cudaFuncSetAttribute(whole_backward_kernel,
                                              cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
                         "norm_backward");
          Launch{blocks, shape.threads(), static_cast<std::size_t>(bytes), stream_of(context.stream)}(
              whole_backward_kernel, shape, view, dy.as<Bf16>(), weight.as<Bf16>(), data_of<float>(rstd),
              dx.as<Bf16>(), partials.as<float>());
          return;
        }
      }
      Launch{blocks, shape.threads(), 0, stream_of(context.stream)}(
          backward_kernel<Storage, code>, shape, view, dy.as<Storage>(), data_of<Storage>(weight),
          data_of<float>(rstd), dx.as<Storage>(), aligned, data_of<float>(partials));
    });
  });
  sum_partials(context, partials, blocks, dweight);
}

void check_backward(std::string_view operation, NormKind kind, ElementType type, std::int64_t rows,
                    std::int64_t width, const Tensor& dy, const Tensor& weight, const Tensor& rstd,
                    const Tensor& dx, const Tensor& dweight) {
  expect_norm_weight(operation, kind, weight, type, width);
  expect(operation, "dy", dy, type, rows, width);
  expect(operation, "dx", dx, type, rows, width);
  if (rstd) expect(operation, "rstd", rstd, ElementType::kFp32, rows);
  expect_norm_weight_gradient(operation, kind, dweight, ElementType::kFp32, width);
}

}  // namespace

void CudaBackend::norm_forward(const Context& context, NormKind kind, const Tensor& x,
                               const Tensor& weight, double epsilon, const Tensor& y,
                               const Tensor& rstd) {
  expect_norm_weight("norm_forward", kind, weight, x.type, x.width());
  expect("norm_forward", "y", y, x.type, x.rows(), x.width());
  if (rstd) expect("norm_forward", "rstd", rstd, ElementType::kFp32, x.rows());
  if (context.workspace.is_measuring() || x.count() == 0) return;
  const QuantView view = view_of(as_quant_tensor(x));
  const NormRows shape = rows_of(kind, view, x.rows(), epsilon);
  for_storage("norm_forward", x.type, [&]<typename Storage>() {
    if (held_in_registers(view)) {
      launch_forward<Storage, Input::kTensor, kAnyCode>(context, shape, view, x, {}, weight, y, rstd, {},
                                                        {});
    } else {
      Launch{grid_blocks(x.rows(), 8), kThreads, 0, stream_of(context.stream)}(
          long_forward_kernel<Storage>, shape, x.as<Storage>(), data_of<Storage>(weight),
          y.as<Storage>(), data_of<float>(rstd));
    }
  });
  expect_launched("norm_forward");
}

void CudaBackend::norm_backward(const Context& context, NormKind kind, const Tensor& dy, const Tensor& x,
                                const Tensor& weight, double epsilon, const Tensor& rstd,
                                const Tensor& dx, const Tensor& dweight) {
  check_backward("norm_backward", kind, x.type, x.rows(), x.width(), dy, weight, rstd, dx, dweight);
  const Arena::Scope scope(context.workspace);
  const Tensor partials = take_partials(context, kind, x.rows(), x.width());
  if (context.workspace.is_measuring() || x.count() == 0) return;
  const QuantView view = view_of(as_quant_tensor(x));
  const NormRows shape = rows_of(kind, view, x.rows(), epsilon);
  if (held_in_registers(view)) {
    launch_backward(context, shape, view, dy, weight, rstd, dx, dweight, partials);
  } else {
    const unsigned blocks = backward_blocks(x.rows());
    for_storage("norm_backward", x.type, [&]<typename Storage>() {
      Launch{blocks, kThreads, 0, stream_of(context.stream)}(
          long_backward_kernel<Storage>, shape, x.as<Storage>(), dy.as<Storage>(),
          data_of<Storage>(weight), data_of<float>(rstd), dx.as<Storage>(), data_of<float>(partials));
    });
    sum_partials(context, partials, blocks, dweight);
  }
  expect_launched("norm_backward");
}

void CudaBackend::residual_norm_forward(const Context& context, NormKind kind, const Tensor& x,
                                        const Tensor& delta, const Tensor& weight, double epsilon,
                                        const Tensor& y, const Tensor& rstd, const QuantTensor& saved,
                                        const RandomKey& key, const Tensor& counters) {
  const char* const operation = "residual_norm_forward";
  expect_norm_weight(operation, kind, weight, x.type, x.width());
  expect(operation, "y", y, x.type, x.rows(), x.width());
  if (delta) expect(operation, "delta", delta, x.type, x.rows(), x.width());
  if (rstd) expect(operation, "rstd", rstd, ElementType::kFp32, x.rows());
  if (saved) expect_same_shape(operation, x, saved);
  expect_counters(operation, counters);
  check(!saved || saved.format.code != Code::kFp64, "{}: fp64 tensors exist on the CPU only", operation);
  if (context.workspace.is_measuring() || x.count() == 0) return;
  const QuantView view = view_of(saved ? saved : as_quant_tensor(x));
  if (!held_in_registers(view) || (saved && !has_fused_path(operation, x.type, view))) {
    Backend::residual_norm_forward(context, kind, x, delta, weight, epsilon, y, rstd, saved, key,
                                   counters);
    return;
  }
  const NormRows shape = rows_of(kind, view, x.rows(), epsilon);
  for_storage(operation, x.type, [&]<typename Storage>() {
    if (saved) {
      for_fused_path<Storage>(view, [&]<Code code>() {
        launch_forward<Storage, Input::kSave, code>(context, shape, view, x, delta, weight, y, rstd, key,
                                                    counters);
      });
    } else {
      launch_forward<Storage, Input::kTensor, kAnyCode>(context, shape, view, x, delta, weight, y, rstd,
                                                        key, {});
    }
  });
  expect_launched(operation);
}

void CudaBackend::norm_forward_saved(const Context& context, NormKind kind, const QuantTensor& x,
                                     const Tensor& weight, double epsilon, const Tensor& y) {
  const char* const operation = "norm_forward_saved";
  expect_norm_weight(operation, kind, weight, y.type, x.width());
  expect(operation, "y", y, y.type, x.rows(), x.width());
  check(x.format.code != Code::kFp64, "{}: fp64 tensors exist on the CPU only", operation);
  const QuantView view = view_of(x);
  if (!held_in_registers(view) || !has_fused_path(operation, y.type, view)) {
    Backend::norm_forward_saved(context, kind, x, weight, epsilon, y);
    return;
  }
  if (context.workspace.is_measuring() || y.count() == 0) return;
  const NormRows shape = rows_of(kind, view, x.rows(), epsilon);
  for_storage(operation, y.type, [&]<typename Storage>() {
    for_fused_path<Storage>(view, [&]<Code code>() {
      launch_forward<Storage, Input::kSaved, code>(context, shape, view, {}, {}, weight, y, {}, {}, {});
    });
  });
  expect_launched(operation);
}

void CudaBackend::norm_backward_saved(const Context& context, NormKind kind, const Tensor& dy,
                                      const QuantTensor& x, const Tensor& weight, double epsilon,
                                      const Tensor& rstd, const Tensor& dx, const Tensor& dweight) {
  const char* const operation = "norm_backward_saved";
  check_backward(operation, kind, dy.type, x.rows(), x.width(), dy, weight, rstd, dx, dweight);
  check(x.format.code != Code::kFp64, "{}: fp64 tensors exist on the CPU only", operation);
  const QuantView view = view_of(x);
  if (!held_in_registers(view) || !has_fused_path(operation, dy.type, view)) {
    Backend::norm_backward_saved(context, kind, dy, x, weight, epsilon, rstd, dx, dweight);
    return;
  }
  const Arena::Scope scope(context.workspace);
  const Tensor partials = take_partials(context, kind, x.rows(), x.width());
  if (context.workspace.is_measuring() || dy.count() == 0) return;
  const NormRows shape = rows_of(kind, view, x.rows(), epsilon);
  launch_backward(context, shape, view, dy, weight, rstd, dx, dweight, partials);
  expect_launched(operation);
}

}  // namespace agoq::cuda

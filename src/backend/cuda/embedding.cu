// Embedding: out[n] = table[tokens[n]], and its gradient
//
//   dtable[t] += sum of dout[n] over the positions n with tokens[n] = t
//
// Backward sorts the positions by token, stably, by least significant digits of nine bits; then the
// positions of a token are neighbours and in order. A pass over N positions in tiles of kTile:
//   count     a warp counts the digits of its tile
//   scan      one block turns counts [512, tiles] into where each tile's first of each digit goes
//   place     a warp goes through its tile in order, 32 positions at a time; positions of one digit
//             take their places in lane order
// Then one block of threads owns one group (up to 1,024 columns) of one token's row. Each of its four
// warps adds one chunk of 256 columns over the token's positions, in order; the first warp takes the
// sums together through shared memory and requantises the group once. Where blocks do not reach across
// chunks a warp owns a chunk, and needs no other. Rows of tokens that are absent are not touched.
//
// Workspace: 4 N int32 and 512 tiles int32.
// Invariant: sums and bytes are the CPU's. Atomics add integers only, whose order does not matter.
//
// A token outside the table cannot be reported from a kernel without waiting for it: forward fills its
// row with NaN, which the step's guard against NaN names, and backward leaves it out.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/group_codec.cuh"
#include "backend/operand_checks.h"

namespace agoq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kDigitBits = 9;  // two digits for vocabularies of up to 2^18
constexpr int kDigits = 1 << kDigitBits;
constexpr int kTile = 256;     // positions of one warp
constexpr int kTileWarps = 2;  // per block
constexpr int kScanThreads = 1024;
constexpr int kRowThreads = kWarp * kChunks;
constexpr int kRowsInFlight = 4;  // loads of a long sum do not wait for one another

// --- forward ---

constexpr int kWordsInFlight = 8;  // of a lane

/// A warp copies a row. Word: 16 bytes where rows allow it, else an element.
template <typename Word, typename Storage>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const std::int32_t* tokens, std::int64_t count, const Storage* table,
                   std::int64_t vocabulary, std::int64_t width, Storage* out) {
  const std::int64_t words =
      width * static_cast<std::int64_t>(sizeof(Storage)) / static_cast<std::int64_t>(sizeof(Word));
  const std::int64_t n = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  await_predecessors();
  if (n >= count) return;  // the whole warp
  const std::int32_t token = tokens[n];
  Storage* const to = out + n * width;
  if (token < 0 || token >= vocabulary) {
    for (std::int64_t i = lane_index(); i < width; i += kWarp)
      store(__uint_as_float(0x7FC00000u), to[i]);
    return;
  }
  const Word* const source = reinterpret_cast<const Word*>(table + token * width);
  Word* const destination = reinterpret_cast<Word*>(to);
  std::int64_t i = lane_index();
  for (; i + (kWordsInFlight - 1) * kWarp < words; i += kWordsInFlight * kWarp) {
    Word copied[kWordsInFlight];
#pragma unroll
    for (int k = 0; k < kWordsInFlight; ++k) copied[k] = source[i + k * kWarp];
#pragma unroll
    for (int k = 0; k < kWordsInFlight; ++k) destination[i + k * kWarp] = copied[k];
  }
  for (; i < words; i += kWarp) destination[i] = source[i];
}

// --- backward: sorting positions by token ---

__device__ __forceinline__ std::uint32_t digit_of(std::int32_t token, int shift) {
  return static_cast<std::uint32_t>(token) >> shift & (kDigits - 1);
}
/// Ids outside the table become one id behind its last, so that they are sorted there.
__device__ __forceinline__ std::int32_t bounded(std::int32_t token, std::int32_t vocabulary) {
  return token < 0 || token > vocabulary ? vocabulary : token;
}

/// counts[digit][tile].  One block per kTileWarps tiles.
__global__ void __launch_bounds__(kTileWarps* kWarp)
    count_kernel(const std::int32_t* tokens, std::int32_t vocabulary, int positions, int shift,
                 std::uint32_t* counts, int tiles) {
  await_predecessors();
  __shared__ std::uint32_t of_warps[kTileWarps][kDigits];
  std::uint32_t* const counted = of_warps[threadIdx.x / kWarp];
  for (int digit = lane_index(); digit < kDigits; digit += kWarp) counted[digit] = 0;
  __syncwarp();
  const int tile = static_cast<int>(blockIdx.x) * kTileWarps + static_cast<int>(threadIdx.x / kWarp);
  if (tile >= tiles) return;  // a whole warp; no barrier of the block follows
  const int end = min(positions, (tile + 1) * kTile);
  for (int n = tile * kTile + lane_index(); n < end; n += kWarp) {
    atomicAdd(&counted[digit_of(bounded(tokens[n], vocabulary), shift)], 1u);
  }
  __syncwarp();
  for (int digit = lane_index(); digit < kDigits; digit += kWarp) {
    counts[static_cast<std::int64_t>(digit) * tiles + tile] = counted[digit];
  }
}

/// counts[i] = sum of counts[0, i).  One block; a warp owns a run of neighbouring counts, and takes four
/// per lane at a time. `count` is a multiple of four.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(std::uint32_t* counts, int count) {
  await_predecessors();
  constexpr int kScanWarps = kScanThreads / kWarp, kStep = 4 * kWarp;
  __shared__ std::uint32_t of_warps[kScanWarps];
  const int warp = static_cast<int>(threadIdx.x / kWarp);
  const int run = (count + kScanWarps * kStep - 1) / (kScanWarps * kStep) * kStep;
  const int begin = min(count, warp * run), end = min(count, begin + run);
  std::uint32_t own = 0;
#pragma unroll 8
  for (int i = begin + 4 * lane_index(); i < end; i += kStep) {
    const uint4 here = *reinterpret_cast<const uint4*>(counts + i);
    own += here.x + here.y + here.z + here.w;
  }
  own = __reduce_add_sync(kWholeWarp, own);
  if (lane_index() == 0) of_warps[warp] = own;
  __syncthreads();
  std::uint32_t before = 0;
  for (int other = 0; other < warp; ++other) before += of_warps[other];
#pragma unroll 2
  for (int first = begin; first < end; first += kStep) {
    const int i = first + 4 * lane_index();
    uint4 here = i < end ? *reinterpret_cast<const uint4*>(counts + i) : make_uint4(0, 0, 0, 0);
    const std::uint32_t sum = here.x + here.y + here.z + here.w;
    std::uint32_t up_to = sum;  // over the warp's lanes up to this one
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const std::uint32_t below = __shfl_up_sync(kWholeWarp, up_to, step);
      if (lane_index() >= step) up_to += below;
    }
    const std::uint32_t x = before + up_to - sum, y = x + here.x, z = y + here.y, w = z + here.z;
    if (i < end) *reinterpret_cast<uint4*>(counts + i) = make_uint4(x, y, z, w);
    before += __shfl_sync(kWholeWarp, up_to, kWarp - 1);
  }
}

/// Moves tokens and their positions to where the digit puts them. `from` null: positions 0, 1, 2, ...
__global__ void __launch_bounds__(kTileWarps* kWarp)
    place_kernel(const std::int32_t* tokens, std::int32_t vocabulary, const std::int32_t* from,
                 int positions, int shift, const std::uint32_t* starts, int tiles,
                 std::int32_t* sorted_tokens, std::int32_t* sorted_positions) {
  await_predecessors();
  __shared__ std::uint32_t of_warps[kTileWarps][kDigits];
  std::uint32_t* const next = of_warps[threadIdx.x / kWarp];
  const int tile = static_cast<int>(blockIdx.x) * kTileWarps + static_cast<int>(threadIdx.x / kWarp);
  if (tile >= tiles) return;  // a whole warp; no barrier of the block follows
  for (int digit = lane_index(); digit < kDigits; digit += kWarp) {
    next[digit] = starts[static_cast<std::int64_t>(digit) * tiles + tile];
  }
  __syncwarp();
  const int end = min(positions, (tile + 1) * kTile);
  for (int first = tile * kTile; first < end; first += kWarp) {
    const int n = first + lane_index();
    const bool present = n < end;
    const std::int32_t token = present ? bounded(tokens[n], vocabulary) : 0;
    // Lanes behind the end match one another and nothing else.
    const std::uint32_t digit = present ? digit_of(token, shift) : kDigits;
    const std::uint32_t same = __match_any_sync(kWholeWarp, digit);
    const std::uint32_t before = __popc(same & ((1u << lane_index()) - 1));
    const std::uint32_t place = present ? next[digit] + before : 0;
    __syncwarp();
    if (present && before == 0) next[digit] += __popc(same);
    __syncwarp();
    if (present) {
      sorted_tokens[place] = token;
      sorted_positions[place] = from == nullptr ? n : from[n];
    }
  }
}

// --- backward: rows ---

/// Where the tokens equal to tokens[first] end. Most are single: doubling steps first.
__device__ __forceinline__ int end_of_run(const std::int32_t* tokens, int first, int count) {
  const std::int32_t token = tokens[first];
  int last = first, step = 1;
  while (last + step < count && tokens[last + step] == token) {
    last += step;
    step *= 2;
  }
  for (step /= 2; step > 0; step /= 2) {
    if (last + step < count && tokens[last + step] == token) last += step;
  }
  return last + 1;
}

template <Code code, typename Storage>
__global__ void __launch_bounds__(kRowThreads)
    backward_kernel(const std::int32_t* tokens, const std::int32_t* positions, int count,
                    const Storage* dout, bool aligned, QuantView view, std::int32_t vocabulary,
                    RandomWords key, std::int64_t* counters) {
  await_predecessors();
  __shared__ float sums[kSuperBlock];
  const std::uint32_t groups = view.groups_per_row();
  const int first = static_cast<int>(blockIdx.x / groups);
  const std::int32_t token = tokens[first];
  if (first > 0 && tokens[first - 1] == token) return;  // not the token's first position
  if (token >= vocabulary) return;
  const Group group = group_of(view, token, blockIdx.x % groups);

  const int chunk = static_cast<int>(threadIdx.x / kWarp);
  const int begin = vector_begin(chunk), length = vector_count(group, chunk);
  float sum[kVector] = {};
  const Storage* const column = dout + group.column + begin;
  const int end = end_of_run(tokens, first, count);
  for (int k = first; k < end; k += kRowsInFlight) {
    float x[kRowsInFlight][kVector];
#pragma unroll
    for (int row = 0; row < kRowsInFlight; ++row) {
      if (k + row < end) {
        const Storage* const from = column + positions[k + row] * view.row_length;
        if (aligned && length == kVector) {
          load_vector(from, x[row]);
        } else {
#pragma unroll
          for (int i = 0; i < kVector; ++i) x[row][i] = i < length ? load(from[i]) : 0.0f;
        }
      }
    }
#pragma unroll
    for (int row = 0; row < kRowsInFlight; ++row) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum[i] = k + row < end ? sum[i] + x[row][i] : sum[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) sums[begin + i] = sum[i];
  __syncthreads();
  if (chunk != 0) return;  // whole warps

  GroupValues values;
#pragma unroll
  for (int part = 0; part < kChunks; ++part) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[part][i] = sums[vector_begin(part) + i];
  }
  add_decoded_group<code>(view, group, values);
  LaneCounts counts;
  encode_group<code>(view, group, values, key, counts);
  counts.add_to(counters);
}

/// The same for E4M3 with FP32 scales in segments of whole chunks of 256: blocks do not reach across
/// chunks, so that a warp owns one chunk of a token's row.
template <typename Storage>
__global__ void __launch_bounds__(kThreads)
    flat_backward_kernel(const std::int32_t* tokens, const std::int32_t* positions, int count,
                         const Storage* dout, int chunks_per_row, std::uint8_t* codes, float* scales,
                         int block_shift, std::int32_t vocabulary, std::int64_t* counters) {
  await_predecessors();
  const std::int64_t index = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  const auto first = static_cast<int>(index / chunks_per_row);
  if (first >= count) return;  // whole warps, from here on
  const std::int32_t token = tokens[first];
  const std::int32_t token_before = first > 0 ? tokens[first - 1] : -1;
  const std::int32_t token_behind = first + 1 < count ? tokens[first + 1] : -1;
  const std::int32_t position = positions[first];
  if (token_before == token || token >= vocabulary) return;
  const auto chunk = static_cast<int>(index - std::int64_t{first} * chunks_per_row);
  const std::int64_t width = std::int64_t{chunks_per_row} * (kWarp * kVector);
  const std::int64_t column = (chunk * kWarp + lane_index()) * kVector;
  const std::int64_t element = token * width + column;
  uint2* const own_codes = reinterpret_cast<uint2*>(codes + element);
  float* const own_scale = scales + (element >> block_shift);
  const uint2 old_codes = *own_codes;
  float scale = *own_scale;

  const Storage* const from = dout + column;
  float sum[kVector], x[kRowsInFlight][kVector];
  load_vector(from + position * width, x[0]);
#pragma unroll
  for (int i = 0; i < kVector; ++i) sum[i] = 0.0f + x[0][i];
  if (token_behind == token) {
    const int end = end_of_run(tokens, first, count);
    for (int k = first + 1; k < end; k += kRowsInFlight) {
#pragma unroll
      for (int row = 0; row < kRowsInFlight; ++row) {
        if (k + row < end) load_vector(from + positions[k + row] * width, x[row]);
      }
#pragma unroll
      for (int row = 0; row < kRowsInFlight; ++row) {
        if (k + row >= end) break;
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[i] += x[row][i];
      }
    }
  }
  LaneCounts counts;
  const int lanes = (1 << block_shift) / kVector;
  add_e4m3_vector(old_codes, scale, sum);
  *own_codes = encode_e4m3_vector(sum, lanes, scale, counts);
  if ((lane_index() & (lanes - 1)) == 0) *own_scale = scale;
  counts.add_to(counters);
}

/// Digits of ids 0..last.
int digits_of(std::int32_t last) {
  int digits = 1;
  while (digits < 4 && last >> (kDigitBits * digits) > 0) ++digits;
  return digits;
}

}  // namespace

void CudaBackend::embedding_forward(const Context& context, const Tensor& tokens, const Tensor& table,
                                    const Tensor& out) {
  check(tokens.type == ElementType::kInt32 && out.type == table.type && out.width() == table.width() &&
            out.rows() == tokens.count(),
        "embedding_forward: {} tokens of a {} table {} give an output of that type [{}, {}]; the output "
        "is {} {}",
        tokens.count(), name_of(table.type), table.shape.to_string(), tokens.count(), table.width(),
        name_of(out.type), out.shape.to_string());
  if (context.workspace.is_measuring() || out.count() == 0) return;
  for_storage("embedding_forward", table.type, [&]<typename Storage>() {
    const auto run = [&]<typename Word>() {
      Launch{static_cast<unsigned>((tokens.count() + kWarps - 1) / kWarps), kThreads, 0,
             stream_of(context.stream)}(forward_kernel<Word, Storage>, tokens.as<std::int32_t>(),
                                        tokens.count(), table.as<Storage>(), table.rows(), table.width(),
                                        out.as<Storage>());
    };
    if (vector_aligned<Storage>(table.data, table.width()) &&
        vector_aligned<Storage>(out.data, out.width())) {
      run.template operator()<uint4>();
    } else {
      run.template operator()<Storage>();
    }
  });
  expect_launched("embedding_forward");
}

void CudaBackend::embedding_backward(const Context& context, const Tensor& tokens, const Tensor& dout,
                                     const QuantTensor& dtable, const RandomKey& key,
                                     const Tensor& counters) {
  check(tokens.type == ElementType::kInt32 && dout.rows() == tokens.count() &&
            dout.width() == dtable.width(),
        "embedding_backward: {} int32 tokens and a table of width {} need dout [{}, {}]; tokens are {}, "
        "dout is {}",
        tokens.count(), dtable.width(), tokens.count(), dtable.width(), name_of(tokens.type),
        dout.shape.to_string());
  expect_counters("embedding_backward", counters);
  check(dtable.format.code != Code::kFp64, "embedding_backward: fp64 tensors exist on the CPU only");
  const std::int64_t positions = tokens.count();
  check(positions < (std::int64_t{1} << 31) - kTile,
        "embedding_backward: {} tokens are more than an int32 counts: choose a smaller micro-batch",
        positions);
  check(dtable.rows() < std::int64_t{1} << 31,
        "embedding_backward: {} rows are more than an int32 counts", dtable.rows());
  const auto vocabulary = static_cast<std::int32_t>(dtable.rows());
  const std::int64_t tiles = (positions + kTile - 1) / kTile;
  const Arena::Scope scope(context.workspace);
  const Tensor sorted = context.workspace.take(ElementType::kInt32, Shape{4, positions});
  const Tensor counts = context.workspace.take(ElementType::kInt32, Shape{kDigits, tiles});
  if (context.workspace.is_measuring() || dout.count() == 0) return;

  const cudaStream_t stream = stream_of(context.stream);
  const int count = static_cast<int>(positions), tile_count = static_cast<int>(tiles);
  const auto tile_blocks = static_cast<unsigned>((tiles + kTileWarps - 1) / kTileWarps);
  auto* const starts = reinterpret_cast<std::uint32_t*>(counts.as<std::int32_t>());
  std::int32_t* const buffers = sorted.as<std::int32_t>();
  const std::int32_t* from_tokens = tokens.as<std::int32_t>();
  const std::int32_t* from_positions = nullptr;
  for (int digit = 0; digit < digits_of(vocabulary); ++digit) {
    std::int32_t* const to_tokens = buffers + digit % 2 * 2 * positions;
    std::int32_t* const to_positions = to_tokens + positions;
    const int shift = kDigitBits * digit;
    Launch{tile_blocks, kTileWarps * kWarp, 0, stream}(count_kernel, from_tokens, vocabulary, count,
                                                       shift, starts, tile_count);
    Launch{1, kScanThreads, 0, stream}(scan_kernel, starts, kDigits * tile_count);
    Launch{tile_blocks, kTileWarps * kWarp, 0, stream}(place_kernel, from_tokens, vocabulary,
                                                       from_positions, count, shift, starts, tile_count,
                                                       to_tokens, to_positions);
    from_tokens = to_tokens;
    from_positions = to_positions;
  }

  const QuantView view = view_of(dtable);
  const std::int64_t blocks = positions * view.groups_per_row();
  check(blocks < std::int64_t{1} << 31, "embedding_backward: {} tokens of width {} are too many",
        positions, dtable.width());
  for_storage("embedding_backward", dout.type, [&]<typename Storage>() {
    constexpr int kChunk = kWarp * kVector;
    if (view.path == Code::kE4m3 && view.scale == ScaleType::kFp32 && view.aligned &&
        view.segment_length % kChunk == 0 && vector_aligned<Storage>(dout.data, view.segment_length)) {
      const auto chunks = static_cast<int>(view.row_length / kChunk);
      Launch{static_cast<unsigned>((positions * chunks + kWarps - 1) / kWarps), kThreads, 0, stream}(
          flat_backward_kernel<Storage>, from_tokens, from_positions, count, dout.as<Storage>(), chunks,
          reinterpret_cast<std::uint8_t*>(view.codes), reinterpret_cast<float*>(view.scales),
          view.block_shift, vocabulary, counters ? counters.as<std::int64_t>() : nullptr);
      return;
    }
    const auto run = [&]<Code code>() {
      Launch{static_cast<unsigned>(blocks), kRowThreads, 0, stream}(
          backward_kernel<code, Storage>, from_tokens, from_positions, count, dout.as<Storage>(),
          vector_aligned<Storage>(dout.data, view.segment_length), view, vocabulary, mixed_key(key),
          counters ? counters.as<std::int64_t>() : nullptr);
    };
    if (view.path == Code::kE4m3) {
      run.template operator()<Code::kE4m3>();
    } else {
      run.template operator()<kSharedPath>();
    }
  });
  expect_launched("embedding_backward");
}

}  // namespace agoq::cuda

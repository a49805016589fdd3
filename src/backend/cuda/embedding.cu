// Embedding: out[n] = table[tokens[n]], and its gradient
//
//   dtable[t] += sum of dout[n] over the positions n with tokens[n] = t
//
// Backward sorts the positions by token in one kernel. Block b places tokens [1024 b, 1024 (b + 1)): a
// warp walks through a run of all positions and counts those of its block's tokens; of the counts, by
// token and warp, and the number of smaller tokens the block makes where the first of each goes. By
// these the warp places what it remembers of its walk, or walks again where that was too much. Blocks
// exchange nothing; in exchange each reads all tokens. Tokens have been uploaded (backend.h), so all but
// the placing is done while the kernel before still runs.
//
// Rows in E4M3 under FP32 scales, segments of whole blocks: a warp owns a part of 512 columns of two
// positions. Of its token's first position it adds the other positions' parts, in order, and requantises
// the sum once; other positions are not even read. As many blocks as the GPU holds start before the
// positions are sorted: these have both positions, and what the table holds for their tokens, on its way
// by then, and the sort asks for what the next will read of dout. Tokens of 32 positions and more, of
// which text has some with hundreds, are left to the blocks of their first sixteen positions, 128
// columns to each: its threads copy rows ahead and add a column each. (Under scales of more columns than
// that: four positions, 512 columns, four each.)
//
// Other formats: a block of threads owns one group (up to 1,024 columns) of one token's row. Each of its
// four warps adds one chunk of 256 columns over the token's positions, in order; the first warp takes
// the sums together through shared memory and requantises the group once. Rows of tokens that are absent
// are not touched.
//
// Workspace: 5 N int32.
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
constexpr int kSortWarps = 16, kSortThreads = kSortWarps * kWarp;
constexpr int kDigits = 1024;  // tokens of a block of sort_kernel
constexpr int kDigitsPerThread = kDigits / kSortThreads;
constexpr int kTokensInFlight = 16;
constexpr int kFound = 128;                                   // that a warp of sort_kernel remembers
constexpr std::int64_t kBytesAhead = std::int64_t{16} << 20;  // of dout, into the L2 cache
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

/// Of position n: its token's positions are positions[first, first + count), this one is number `rank`
/// of them. Of an id outside the table count is 0.
struct alignas(16) Occurrence {
  int first, count, rank;

  static __device__ __forceinline__ Occurrence load(const Occurrence* from) {
    const int4 words = *reinterpret_cast<const int4*>(from);
    return {words.x, words.y, words.z};
  }
};

struct SortShared {
  // counts[digit / kDigitsPerThread]: of a thread's digits those of each warp. Each thread reads a run
  // of its own, of an odd number of words.
  std::uint32_t counts[kSortThreads][kDigitsPerThread * kSortWarps + 1];
  // Read four at a time, which have to be these alone: racecheck sees those beside them too.
  alignas(16) std::uint32_t of_warps[2][kSortWarps];
  std::uint32_t firsts[kDigits + 1];
  uint2 found[kSortWarps][kFound];  // a warp's positions of the block's tokens, and their digits

  __device__ __forceinline__ std::uint32_t& count(std::uint32_t digit, int warp) {
    return counts[digit / kDigitsPerThread][digit % kDigitsPerThread * kSortWarps + warp];
  }
};

/// positions: by token and, of one token, ascending.  Block b places tokens [b, b + 1) * kDigits, the
/// last block also ids outside the table, as token `vocabulary`.
__global__ void __launch_bounds__(kSortThreads)
    sort_kernel(const std::int32_t* tokens, std::uint32_t vocabulary, int total, std::int32_t* positions,
                Occurrence* occurrences, const std::byte* ahead, std::int64_t bytes_ahead) {
  extern __shared__ __align__(16) std::byte shared_bytes[];
  SortShared& shared = *reinterpret_cast<SortShared*>(shared_bytes);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp;
  static_assert(sizeof(shared.counts) % sizeof(uint4) == 0);
  for (std::size_t i = threadIdx.x; i < sizeof(shared.counts) / sizeof(uint4); i += kSortThreads)
    reinterpret_cast<uint4*>(&shared.counts)[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();

  const std::uint32_t first_token = blockIdx.x * kDigits;
  const int run = (total + kSortThreads - 1) / kSortThreads * kWarp;  // positions of a warp
  const int begin = min(total, warp * run), end = min(total, begin + run);
  const auto load_tokens = [&](int from, std::uint32_t(&token)[kTokensInFlight]) {
#pragma unroll
    for (int k = 0; k < kTokensInFlight; ++k) {
      const int n = from + k * kWarp + lane_index();
      token[k] = n < end ? min(static_cast<std::uint32_t>(tokens[n]), vocabulary) : ~0u;  // no token
    }
  };
  std::uint32_t below = 0;
  int found = 0;  // of the warp
  for (int from = begin; from < end; from += kTokensInFlight * kWarp) {
    std::uint32_t token[kTokensInFlight];
    load_tokens(from, token);
#pragma unroll
    for (int k = 0; k < kTokensInFlight; ++k) {
      const std::uint32_t digit = token[k] - first_token;
      below += token[k] < first_token ? 1 : 0;
      const bool owned = digit < kDigits;
      const std::uint32_t owners = __ballot_sync(kWholeWarp, owned);
      if (owners == 0) continue;
      if (owned) {
        atomicAdd(&shared.count(digit, warp), 1u);
        const int at = found + __popc(owners & ((1u << lane_index()) - 1));
        if (at < kFound)
          shared.found[warp][at] =
              make_uint2(static_cast<unsigned>(from + k * kWarp + lane_index()), digit);
      }
      found += __popc(owners);
    }
  }
  below = __reduce_add_sync(kWholeWarp, below);
  if (lane_index() == 0) shared.of_warps[0][warp] = below;
  __syncthreads();

  // Counts become where the first of each goes.
  constexpr int kOwn = kDigitsPerThread * kSortWarps;
  std::uint32_t counted[kOwn], sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += counted[i] = shared.counts[thread][i];
  std::uint32_t up_to = sum;  // over the warp's lanes up to this one
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const std::uint32_t lower = __shfl_up_sync(kWholeWarp, up_to, step);
    if (lane_index() >= step) up_to += lower;
  }
  if (lane_index() == kWarp - 1) shared.of_warps[1][warp] = up_to;
  __syncthreads();
  std::uint32_t next = up_to - sum;
  for (int other = 0; other < kSortWarps; ++other) {
    next += shared.of_warps[0][other] + (other < warp ? shared.of_warps[1][other] : 0);
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (i % kSortWarps == 0) shared.firsts[thread * kDigitsPerThread + i / kSortWarps] = next;
    shared.counts[thread][i] = next;
    next += counted[i];
  }
  if (thread == kSortThreads - 1) shared.firsts[kDigits] = next;
  __syncthreads();

  await_predecessors_before_successors();
  // What the next kernel reads first.
  if (lane_index() == 0) {
    constexpr std::int64_t kPiece = 16384;
    for (std::int64_t at = (std::int64_t{warp} * gridDim.x + blockIdx.x) * kPiece; at < bytes_ahead;
         at += kPiece * kSortWarps * gridDim.x) {
      prefetch_to_l2(ahead + at, static_cast<std::uint32_t>(min(kPiece, bytes_ahead - at)));
    }
  }
  // Up to 32 of the warp's positions, in order. digit: kDigits of those that the block does not place.
  const auto place_positions = [&](int n, std::uint32_t digit) {
    const bool owned = digit < kDigits;
    const std::uint32_t same = __match_any_sync(kWholeWarp, digit);
    const std::uint32_t before = __popc(same & ((1u << lane_index()) - 1));
    std::uint32_t& place = shared.count(owned ? digit : 0, warp);
    const std::uint32_t taken = place;
    __syncwarp();
    if (owned && before == 0) place = taken + __popc(same);
    __syncwarp();
    if (!owned) return;
    const auto first = static_cast<int>(shared.firsts[digit]),
               count = static_cast<int>(shared.firsts[digit + 1]) - first,
               at = static_cast<int>(taken + before);
    positions[at] = n;
    *reinterpret_cast<int4*>(occurrences + n) =
        make_int4(first, first_token + digit < vocabulary ? count : 0, at - first, 0);
  };
  if (found <= kFound) {
    for (int i = lane_index(); i - lane_index() < found; i += kWarp) {
      const uint2 entry = i < found ? shared.found[warp][i] : make_uint2(0, kDigits);
      place_positions(static_cast<int>(entry.x), entry.y);
    }
    return;
  }
  for (int from = begin; from < end; from += kTokensInFlight * kWarp) {
    std::uint32_t token[kTokensInFlight];
    load_tokens(from, token);
#pragma unroll
    for (int k = 0; k < kTokensInFlight; ++k) {
      const std::uint32_t digit = min(token[k] - first_token, static_cast<std::uint32_t>(kDigits));
      if (__any_sync(kWholeWarp, digit < kDigits))
        place_positions(from + k * kWarp + lane_index(), digit);
    }
  }
}

// --- backward: rows ---

template <Code code, typename Storage>
__global__ void __launch_bounds__(kRowThreads)
    backward_kernel(const std::int32_t* tokens, const std::int32_t* positions,
                    const Occurrence* occurrences, const Storage* dout, bool aligned, QuantView view,
                    RandomWords key, std::int64_t* counters) {
  await_predecessors();
  __shared__ float sums[kSuperBlock];
  const std::uint32_t groups = view.groups_per_row();
  const std::uint32_t n = blockIdx.x / groups;
  const Occurrence of = occurrences[n];
  if (of.count == 0 || of.rank > 0) return;  // not a token's first position
  const Group group = group_of(view, tokens[n], blockIdx.x % groups);

  const int chunk = static_cast<int>(threadIdx.x / kWarp);
  const int begin = vector_begin(chunk), length = vector_count(group, chunk);
  float sum[kVector] = {};
  const Storage* const column = dout + group.column + begin;
  const int end = of.first + of.count;
  for (int k = of.first; k < end; k += kRowsInFlight) {
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

// --- rows of units (group_codec.cuh) ---

constexpr int kPart = kWarp * kUnit;  // columns

/// A unit as it lies in memory.
template <typename Storage>
struct RawUnit {
  uint4 words[kUnit * sizeof(Storage) / sizeof(uint4)];
};
template <typename Storage>
__device__ __forceinline__ RawUnit<Storage> load_raw(const Storage* from) {
  return *reinterpret_cast<const RawUnit<Storage>*>(from);
}
/// sum += the unit.
template <typename Storage>
__device__ __forceinline__ void add_raw(const RawUnit<Storage>& raw, float (&sum)[kUnit]) {
  const std::uint32_t* const words = &raw.words[0].x;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    if constexpr (std::is_same_v<Storage, float>) {
      sum[i] += __uint_as_float(words[i]);
    } else {
      sum[i] += __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000u);
    }
  }
}
/// sum = 0 + the unit, which is the unit but for the sign of zeros.
template <typename Storage>
__device__ __forceinline__ void begin_sum(const RawUnit<Storage>& raw, float (&sum)[kUnit]) {
  const std::uint32_t* const words = &raw.words[0].x;
  if constexpr (std::is_same_v<Storage, float>) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) sum[i] = 0.0f + __uint_as_float(words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kUnit / 2; ++i) {
      std::uint32_t pair;
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(words[i]), "r"(0x3F803F80u), "r"(0u));
      sum[2 * i] = __uint_as_float(pair << 16);
      sum[2 * i + 1] = __uint_as_float(pair & 0xFFFF0000u);
    }
  }
}

constexpr int kPartWarps = 4, kPartThreads = kPartWarps * kWarp;  // of a block
constexpr int kItems = 2;                                         // positions of a warp
constexpr int kResidentBlocks = 10;                               // per multiprocessor
constexpr int kLongRun = 32;  // occurrences of a token that are added by whole blocks
constexpr int kRing = 5;      // rounds of rows that a block has under way then
constexpr int kRoundRows = 16, kRoundElements = kRoundRows * kPartThreads;
static_assert(kLongRun >= kPartWarps * kPart / kPartThreads && kLongRun <= kWarp + 1);

/// Whether a warp adds all of the token's positions when it comes to this one.
__device__ __forceinline__ bool is_added_by_warp(const Occurrence& of) {
  return of.count > 0 && of.count < kLongRun && of.rank == 0;
}

/// What a warp has under way from memory for one position.
template <typename Storage>
struct Item {
  static constexpr int kPieces = sizeof(RawUnit<Storage>) / sizeof(uint4);  // of 16 bytes, of a unit

  uint4 dout[kPieces * kWarp];  // piece i at place_of(i)
  uint4 codes[kWarp];
  float scales[kWarp];

  /// Lanes copy neighbouring pieces, and read those of their unit: neither meets in a bank.
  static __device__ __forceinline__ int place_of(int piece) {
    return piece ^ (piece >> 3 & (kPieces - 1));
  }
  __device__ __forceinline__ RawUnit<Storage> unit() const {
    RawUnit<Storage> raw;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) raw.words[i] = dout[place_of(lane_index() * kPieces + i)];
    return raw;
  }
};

/// A block's shared memory.
template <typename Storage>
union BlockMemory {
  Item<Storage> items[kPartWarps][kItems];
  // Of a long run: rows, in rounds, and what comes of them.
  uint4 ring[kRing][kRoundElements * sizeof(Storage) / sizeof(uint4)];
  float sums[kPart];
};

template <int groups>
__device__ __forceinline__ void wait_for_all_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}
__device__ __forceinline__ void end_group_of_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ std::uint32_t shared_address(const void* place) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(place));
}
/// Copies 16 bytes that are read once to shared memory, or zeros.
__device__ __forceinline__ void copy_once_or_zeros(const void* from, void* to, bool copies) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(copies ? 16 : 0)
               : "memory");
}
/// Where a lane's units are in the rows of dout and of the table: a part's, of up to 512 columns.
template <typename Storage>
struct Columns {
  const Storage* part;  // of dout, row 0
  const Storage* dout;  // the lane's
  std::uint8_t* codes;
  float* scales;
  std::uint32_t width, scales_per_row;
  int left;      // columns from the part's first on
  int lanes;     // of a block
  bool present;  // not behind the row's end
  bool leads;    // the block's first lane

  /// Of at most `most` columns from `first` on.
  __device__ __forceinline__ Columns(const Storage* all, std::uint8_t* all_codes, float* all_scales,
                                     std::uint32_t row_length, int block_shift, int first,
                                     int most = kPart) {
    const std::uint32_t column = static_cast<std::uint32_t>(first + lane_index() * kUnit);
    part = all + first;
    left = min(static_cast<int>(row_length) - first, most);
    dout = all + column;
    codes = all_codes + column;
    scales = all_scales + (column >> block_shift);
    width = row_length;
    scales_per_row = row_length >> block_shift;
    lanes = (1 << block_shift) / kUnit;
    present = lane_index() * kUnit < left;
    leads = (lane_index() & (lanes - 1)) == 0;
  }
  __device__ __forceinline__ const Storage* row(std::uint32_t position) const {
    return dout + std::uint64_t{position} * width;
  }
  __device__ __forceinline__ uint4* codes_of(std::uint32_t token) const {
    return reinterpret_cast<uint4*>(codes + std::uint64_t{token} * width);
  }
  __device__ __forceinline__ float* scale_of(std::uint32_t token) const {
    return scales + std::uint64_t{token} * scales_per_row;
  }
  /// The token's row += sum; `old` and `scale` are what it holds, zeros in lanes that are not present.
  __device__ __forceinline__ void accumulate(std::uint32_t token, const uint4& old, float scale,
                                             float (&sum)[kUnit], LaneCounts& counts) const {
    decode_e4m3_unit<true>(old, scale, sum);
    const uint4 encoded = encode_e4m3(sum, lanes, scale, counts);
    if (!present) return;
    *codes_of(token) = encoded;
    if (leads) *scale_of(token) = scale;
  }
};

/// Adds the rows positions[0, count) of dout, in the `columns`, kColumns * kPartThreads at most, to the
/// token's row of the table: by a whole block, of which a thread adds kColumns columns.
template <int kColumns, typename Storage>
__device__ __forceinline__ void add_long_run(const Columns<Storage>& columns, const int* positions,
                                             int count, std::uint32_t token,
                                             BlockMemory<Storage>& memory, LaneCounts& counts) {
  constexpr int kRows = kRoundRows / kColumns;                       // of a round
  constexpr int kPieceElements = sizeof(uint4) / sizeof(Storage);    // a piece: 16 bytes
  constexpr int kPieces = kColumns * kPartThreads / kPieceElements;  // of a row
  constexpr int kCopies = kRows * kPieces / kPartThreads;            // of a thread, in a round
  const int thread = static_cast<int>(threadIdx.x);
  const bool accumulates = thread < kWarp;
  uint4 old{};
  float scale = 0.0f;
  if (accumulates && columns.present) old = *columns.codes_of(token), scale = *columns.scale_of(token);
  std::uint32_t next[kCopies];  // positions that the next round copies
  const auto load_positions = [&](int round) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = round * kRows + (i * kPartThreads + thread) / kPieces;
      next[i] = row < count ? static_cast<std::uint32_t>(positions[row]) : 0;
    }
  };
  const auto start = [&](int round) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = i * kPartThreads + thread, piece = at % kPieces;
      const bool copies = round * kRows + at / kPieces < count && piece * kPieceElements < columns.left;
      const Storage* const row = columns.part + std::uint64_t{next[i]} * columns.width;
      copy_once_or_zeros(reinterpret_cast<const uint4*>(row) + piece, &memory.ring[round % kRing][at],
                         copies);
    }
    end_group_of_copies();
    load_positions(round + 1);
  };
  load_positions(0);
#pragma unroll 1
  for (int round = 0; round < kRing - 1; ++round) start(round);
  float sum[kColumns] = {};
  const int rounds = (count + kRows - 1) / kRows;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    wait_for_all_copies_but<kRing - 2>();
    __syncthreads();
    start(round + kRing - 1);
    const auto* const from =
        reinterpret_cast<const Storage*>(memory.ring[round % kRing]) + thread * kColumns;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {  // of zeros, behind the end, no change
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum[i] += load(from[row * kColumns * kPartThreads + i]);
    }
  }
  wait_for_copies();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) memory.sums[thread * kColumns + i] = sum[i];
  __syncthreads();
  if (accumulates) {
    float of_unit[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i)
      of_unit[i] = columns.present ? memory.sums[lane_index() * kUnit + i] : 0.0f;
    columns.accumulate(token, old, scale, of_unit, counts);
  }
  __syncthreads();
}

template <typename Storage>
__global__ void __launch_bounds__(kPartThreads, kResidentBlocks)
    flat_backward_kernel(const std::int32_t* tokens, int total, const std::int32_t* positions,
                         const Occurrence* occurrences, const Storage* dout, int part_shift,
                         unsigned part_groups, unsigned early_blocks, std::uint32_t width,
                         std::uint8_t* codes, float* scales, int block_shift, std::uint32_t vocabulary,
                         std::int64_t* counters) {
  extern __shared__ __align__(16) std::byte shared_bytes[];
  __shared__ int long_runs[kPartWarps][kItems];  // positions, of the first part's warps
  auto& memory = *reinterpret_cast<BlockMemory<Storage>*>(shared_bytes);
  const int warp = static_cast<int>(threadIdx.x / kWarp), lane = lane_index();
  Item<Storage>* const items = memory.items[warp];
  const unsigned block = blockIdx.x / part_groups;
  const int range = static_cast<int>(block) * (kPartWarps >> part_shift) + (warp >> part_shift);
  const int first_part = static_cast<int>(blockIdx.x - block * part_groups) * kPartWarps;
  const Columns<Storage> columns(dout, codes, scales, width, block_shift,
                                 (first_part + (warp & ((1 << part_shift) - 1))) * kPart);
  const int begin = range * kItems, count = min(kItems, total - begin);
  LaneCounts counts;

  // Before the positions are sorted a block may read what was there before the sort, which has awaited
  // its predecessors.
  const bool early = blockIdx.x < early_blocks;
  if (!early) await_predecessors();
  std::uint32_t token = ~0u;
  Occurrence of{};
  if (lane < count) {
    token = static_cast<std::uint32_t>(tokens[begin + lane]);
    if (!early) of = Occurrence::load(occurrences + begin + lane);
  }
  const std::uint32_t copied =
      __ballot_sync(kWholeWarp, early ? token < vocabulary : is_added_by_warp(of));
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const std::uint32_t of_item = __shfl_sync(kWholeWarp, token, k);
    if (copied >> k & 1) {
      Item<Storage>& item = items[k];
      constexpr int kPieces = Item<Storage>::kPieces;
      const auto* const row =
          reinterpret_cast<const uint4*>(columns.part + std::int64_t{begin + k} * width);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int piece = i * kWarp + lane;
        copy_once_or_zeros(row + piece, item.dout + Item<Storage>::place_of(piece),
                           piece * (kUnit / kPieces) < columns.left);
      }
      copy_once_or_zeros(columns.codes_of(of_item), item.codes + lane, columns.present);
      if (columns.leads && columns.present)
        copy_async<4>(columns.scale_of(of_item), shared_address(item.scales + lane));
    }
    end_group_of_copies();
  }
  if (early) {
    await_predecessors();
    if (lane < count) of = Occurrence::load(occurrences + begin + lane);
  }
  // A long run is divided among the blocks of its first occurrences.
  const bool is_long = of.count >= kLongRun && of.rank < kPartWarps * kPart / kPartThreads;
  if ((warp & ((1 << part_shift) - 1)) == 0 && lane < kItems)
    long_runs[warp][lane] = is_long ? begin + lane : -1;
  // Those that this warp is to add.
  const std::uint32_t own = __ballot_sync(kWholeWarp, is_added_by_warp(of));
  const std::uint32_t alone = __ballot_sync(kWholeWarp, of.count == 1);
#pragma unroll 1
  for (int k = 0; k < kItems; ++k) {
    if (k == 0) {
      wait_for_all_copies_but<kItems - 1>();
    } else {
      wait_for_copies();
    }
    __syncwarp();
    if ((own >> k & 1) == 0) continue;
    const Item<Storage>& item = items[k];
    float sum[kUnit];
    begin_sum(item.unit(), sum);
    if ((alone >> k & 1) == 0) {  // read again: held over the loop it would spill, which takes 7 us
      const Occurrence here = Occurrence::load(occurrences + begin + k);
      const int more = here.count - 1;
      const int position = lane < more ? positions[here.first + 1 + lane] : 0;
      constexpr int kRows = 64 / static_cast<int>(sizeof(RawUnit<Storage>));
      for (int row = 0; row < more; row += kRows) {
        RawUnit<Storage> raw[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int at = __shfl_sync(kWholeWarp, position, row + i);
          raw[i] = row + i < more && columns.present ? load_raw(columns.row(at)) : RawUnit<Storage>{};
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) add_raw(raw[i], sum);  // of zeros, behind the end, no change
      }
    }
    columns.accumulate(__shfl_sync(kWholeWarp, token, k), item.codes[lane],
                       columns.present ? item.scales[lane & ~(columns.lanes - 1)] : 0.0f, sum, counts);
  }

  const bool some_are_long = __syncthreads_or(is_long) != 0;
  for (int entry = 0; some_are_long && entry < kPartWarps * kItems; ++entry) {
    const int owner = entry / kItems;
    if ((owner & ((1 << part_shift) - 1)) != 0) continue;
    const int n = long_runs[owner][entry % kItems];
    if (n < 0) continue;  // the whole block
    const Occurrence here = Occurrence::load(occurrences + n);
    const bool narrow = 1 << block_shift <= kPartThreads;
    const int share = narrow ? kPartThreads : kPart;  // columns
    const int first = first_part * kPart + here.rank * share;
    if (here.rank * share >= kPartWarps * kPart || static_cast<std::uint32_t>(first) >= width) continue;
    const Columns<Storage> of_share(dout, codes, scales, width, block_shift, first, share);
    const auto run_token = static_cast<std::uint32_t>(tokens[n]);
    if (narrow) {
      add_long_run<1>(of_share, positions + here.first, here.count, run_token, memory, counts);
    } else {
      add_long_run<kPart / kPartThreads>(of_share, positions + here.first, here.count, run_token, memory,
                                         counts);
    }
  }
  counts.add_to(counters);
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
  check(positions < (std::int64_t{1} << 31) - 4 * kSortThreads,
        "embedding_backward: {} tokens are more than an int32 counts: choose a smaller micro-batch",
        positions);
  check(dtable.rows() < std::int64_t{1} << 31,
        "embedding_backward: {} rows are more than an int32 counts", dtable.rows());
  const auto vocabulary = static_cast<std::int32_t>(dtable.rows());
  const Arena::Scope scope(context.workspace);
  const Tensor sorted = context.workspace.take(ElementType::kInt32, Shape{positions});
  const Tensor sorted_into = context.workspace.take(ElementType::kInt32, Shape{positions, 4});
  if (context.workspace.is_measuring() || dout.count() == 0) return;

  const cudaStream_t stream = stream_of(context.stream);
  const int count = static_cast<int>(positions);
  const auto* const ids = tokens.as<std::int32_t>();
  auto* const order = sorted.as<std::int32_t>();
  auto* const occurrences = reinterpret_cast<Occurrence*>(sorted_into.data);
  expect_success(cudaFuncSetAttribute(sort_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(sizeof(SortShared))),
                 "embedding_backward");
  Launch{static_cast<unsigned>(vocabulary) / kDigits + 1, kSortThreads, sizeof(SortShared), stream}(
      sort_kernel, ids, static_cast<std::uint32_t>(vocabulary), count, order, occurrences, dout.data,
      reinterpret_cast<std::uintptr_t>(dout.data) % 16 != 0
          ? 0
          : std::min(kBytesAhead, static_cast<std::int64_t>(dout.bytes()) / 16 * 16));

  const QuantView view = view_of(dtable);
  const std::int64_t blocks = positions * view.groups_per_row();
  check(blocks < std::int64_t{1} << 31, "embedding_backward: {} tokens of width {} are too many",
        positions, dtable.width());
  for_storage("embedding_backward", dout.type, [&]<typename Storage>() {
    if (has_flat_units(view) && vector_aligned<Storage>(dout.data, view.row_length)) {
      const auto parts = static_cast<int>((view.row_length + kPart - 1) / kPart);
      int part_shift = 0;
      while (1 << part_shift < std::min(parts, kPartWarps)) ++part_shift;
      const int range = kItems * (kPartWarps >> part_shift);
      constexpr int kBytes = static_cast<int>(sizeof(BlockMemory<Storage>));
      expect_success(cudaFuncSetAttribute(flat_backward_kernel<Storage>,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                     "embedding_backward");
      const auto part_groups = static_cast<unsigned>((parts + kPartWarps - 1) / kPartWarps);
      const unsigned blocks = static_cast<unsigned>((positions + range - 1) / range) * part_groups;
      Launch{blocks, kPartThreads, kBytes, stream}(
          flat_backward_kernel<Storage>, ids, count, order, occurrences, dout.as<Storage>(), part_shift,
          part_groups, static_cast<unsigned>(kResidentBlocks * device().multiprocessors),
          static_cast<std::uint32_t>(view.row_length), reinterpret_cast<std::uint8_t*>(view.codes),
          reinterpret_cast<float*>(view.scales), view.block_shift,
          static_cast<std::uint32_t>(vocabulary), counters ? counters.as<std::int64_t>() : nullptr);
      return;
    }
    const auto run = [&]<Code code>() {
      Launch{static_cast<unsigned>(blocks), kRowThreads, 0, stream}(
          backward_kernel<code, Storage>, ids, order, occurrences, dout.as<Storage>(),
          vector_aligned<Storage>(dout.data, view.segment_length), view, mixed_key(key),
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

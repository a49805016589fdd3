// How fast the memory-bound operations are, against a plain copy on the same device and, on a GPU whose
// instructions are counted (instruction_counts.h), against what its multiprocessors can issue.
//
// Sizes are those of a LLaMA3-8B layer. `bytes` counts each byte of an operation's operands once per
// read and once per write, computed from their sizes: traffic beyond that counts against the operation.
// Operands are random (zeros draw less power and run faster) and rotate among sets larger together than
// any cache.
//
// A GPU at its power limit, or warm, runs slower, the copy too. So the copy that an operation is held
// against is timed in turn with it, and what ran before either has the same part in both.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/instruction_counts.h"
#include "backend/instruction_meter.h"

namespace agoq {

struct KernelSizes {
  std::int64_t tokens = 16384;
  std::int64_t hidden = 4096;
  std::int64_t feed_forward = 14336;
  std::int64_t vocabulary = 128256;
  std::int64_t segments = 16;  // of a row of feed_forward columns, as ModelConfig has them
  AttentionShape attention{32, 8, 128};

  /// The parameter that gradient and optimizer operations work on: the down projection at 16,384 tokens.
  BlockGrid parameter() const { return {tokens < 4 ? 1 : tokens / 4, feed_forward, segments}; }
  /// The matrices of a layer, whose gradients the norm of a step reads: QKV, attention's output, gate
  /// and up, down; of fewer rows where there are fewer tokens.
  std::vector<BlockGrid> parameters_of_layer() const {
    const auto rows = [&](std::int64_t all) {
      return std::min(all, std::max<std::int64_t>(2 * tokens, 1));
    };
    return {{rows(attention.qkv_width()), hidden, 1},
            {rows(hidden), hidden, 1},
            {rows(2 * feed_forward), hidden, 1},
            {rows(hidden), feed_forward, segments}};
  }
  /// Tokens whose logits exist at once.
  std::int64_t loss_rows() const { return tokens < 8 ? 1 : tokens / 8; }
};

struct KernelTime {
  std::string name;
  std::string operands;  // for people: "x [16384, 4096] bf16, saved nf4/32/two-level"
  std::int64_t bytes = 0;
  std::int64_t sets = 0;  // of operands, which calls take in turn
  double seconds = 0;
  double clock = 0;  // cycles per second of a multiprocessor meanwhile; 0 where it is not known
  std::optional<InstructionBound> instructions;  // at that clock
  double copy_bytes_per_second = 0;              // of the plain copy, timed in turn with the operation

  double bytes_per_second() const { return static_cast<double>(bytes) / seconds; }
};

/// The time below which an operation cannot be: that of its bytes at the speed of the copy, or that of
/// its instructions if it is longer.
double bound_seconds(const KernelTime& kernel);

/// Times of all operations; the first is the plain copy. Each is the median of `repeats` timings after a
/// warm-up, up to 20 ms long, between each two of which the copy is timed for as long; the copy's
/// speed is its median there. Memory is taken from the backend's allocator, as much as the largest
/// operation needs beside the copy. meter: of the backend's GPU, or null. `only`: the name of an
/// operation, measured alone beside the copy; a profiler sees one call of each set of its operands.
std::vector<KernelTime> measure_kernels(Backend& backend, const KernelSizes& sizes, int repeats = 9,
                                        InstructionMeter* meter = nullptr, const std::string& only = "");

}  // namespace agoq

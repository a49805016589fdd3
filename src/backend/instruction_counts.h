// How many instructions the memory-bound operations execute on a Hopper GPU (sm_90a): what their
// instruction bound is computed from.
//
// A multiprocessor has four schedulers. Each issues one instruction of a warp per cycle; a pipe takes
// one every few cycles, its width being less than a warp's 32 lanes; and the multiprocessor's one memory
// pipe moves one wavefront, up to 128 bytes that lie in different banks, per cycle. An operation is not
// done before its schedulers have issued what it executes, nor before the busiest of these has taken its
// part:
//
//   seconds = max over the resources of (count * cycles) / (schedulers * multiprocessors * clock)
//
// The counts are those of the kernels as they are, measured by benchmarks/kernel_instructions.py, which
// prints this table; they are to be measured again when a kernel changes. What is not an element's own
// arithmetic (addresses, reductions, stores) is in them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace agoq {

/// Warp instructions of one call, all its kernels together; `bytes`: of its operands, as the kernel
/// benchmark counts them. Both grow alike with the number of elements.
struct InstructionCounts {
  std::string_view operation;
  std::int64_t bytes;
  double issued;
  double alu;         // logic, comparisons, integer additions, byte permutations: 16 lanes
  double fma_heavy;   // integer products, and half of FP32's arithmetic: 16 lanes
  double fma_lite;    // the other half: 16 lanes
  double xu;          // exponentials, reciprocals, roots, conversions: 4 lanes
  double wavefronts;  // of shared memory and the L1 cache: one per multiprocessor
};

struct InstructionBound {
  double seconds;
  std::string_view by;  // "issue", "alu", "fma", "xu" or "shared memory"
};

/// For an operation on `bytes` of operands; nothing where it is not known.
std::optional<InstructionBound> instruction_bound(std::string_view operation, std::int64_t bytes,
                                                  int multiprocessors, double clock);

}  // namespace agoq

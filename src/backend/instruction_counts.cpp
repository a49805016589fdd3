#include "backend/instruction_counts.h"

namespace agoq {
namespace {

constexpr InstructionCounts kHopper[] = {
    // clang-format off
    // clang-format on
    {"", 1, 0, 0, 0, 0, 0, 0},
};

}  // namespace

std::optional<InstructionBound> instruction_bound(std::string_view operation, std::int64_t bytes,
                                                  int multiprocessors, double clock) {
  constexpr double kSchedulers = 4;  // of a multiprocessor
  for (const InstructionCounts& counts : kHopper) {
    if (counts.operation != operation) continue;
    const double per_second = kSchedulers * multiprocessors * clock;
    const double scale = static_cast<double>(bytes) / static_cast<double>(counts.bytes) / per_second;
    // A warp has 32 lanes: cycles for which an instruction occupies what takes it.
    const InstructionBound bounds[] = {
        {counts.issued * scale, "issue"},       {2 * counts.alu * scale, "alu"},
        {2 * counts.fma_heavy * scale, "fma"},  {2 * counts.fma_lite * scale, "fma"},
        {8 * counts.xu * scale, "xu"},          {kSchedulers * counts.wavefronts * scale, "shared memory"},
    };
    InstructionBound largest = bounds[0];
    for (const InstructionBound& bound : bounds) {
      if (bound.seconds > largest.seconds) largest = bound;
    }
    return largest;
  }
  return std::nullopt;
}

}  // namespace agoq

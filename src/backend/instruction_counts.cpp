#include "backend/instruction_counts.h"

namespace agoq {
namespace {

// One H200, CUDA 13.0, 16,384 tokens.
constexpr InstructionCounts kHopper[] = {
    {"residual_norm_forward", 572727296, 5.643e+07, 2.084e+07, 1.781e+07, 1.168e+07, 3.932e+05,
     1.127e+07},
    {"norm_forward_saved", 170008576, 2.536e+07, 9.896e+06, 3.411e+06, 6.485e+06, 2.621e+05, 6.139e+06},
    {"norm_backward_saved", 438476800, 5.926e+07, 2.01e+07, 1.07e+07, 1.636e+07, 7.187e+04, 1.513e+07},
    {"swiglu_forward_save", 1659895808, 3.392e+08, 1.219e+08, 9.316e+07, 6.911e+07, 1.783e+07, 4.24e+07},
    {"swiglu_backward_saved", 2129657856, 2.517e+08, 7.725e+07, 4.957e+07, 6.528e+07, 1.839e+07,
     4.845e+07},
    {"quantize", 170000384, 3.083e+07, 1.337e+07, 8.527e+06, 4.754e+06, 1.311e+05, 4.344e+06},
    {"dequantize", 170000384, 1.547e+07, 6.16e+06, 2.263e+06, 1.8e+06, 0, 4.911e+06},
    {"accumulate", 355991552, 3.624e+07, 1.594e+07, 8.327e+06, 5.206e+06, 2.294e+05, 6.378e+06},
    {"adamw_update", 769392640, 1.539e+08, 3.171e+07, 4.822e+07, 3.764e+07, 4.253e+06, 3.151e+07},
    {"adamw_update_pieces", 1193279488, 2.438e+08, 6.311e+07, 6.506e+07, 5.968e+07, 4.253e+06,
     3.905e+07},
    {"sums_of_squares", 224919584, 3.569e+07, 1.231e+07, 8.859e+06, 6.173e+06, 8.52e+05, 3.95e+06},
    {"add_pieces", 544997376, 9.219e+07, 2.755e+07, 3.66e+07, 1.858e+07, 1.147e+05, 6.484e+06},
    {"pieces_sums_of_squares", 484442120, 8.478e+07, 2.888e+07, 2.429e+07, 2.146e+07, 1.835e+06,
     5.321e+06},
    {"rope", 343998464, 1.897e+07, 7.799e+06, 3.898e+06, 5.146e+06, 9.83e+04, 5.175e+06},
    {"embedding_forward", 260308992, 2.179e+06, 7.7e+05, 4.751e+05, 0, 0, 2.356e+06},
    {"embedding_backward", 264247296, 5.244e+07, 1.855e+07, 1.43e+07, 5.087e+06, 3.528e+05, 5.363e+06},
    {"embedding_backward_log_uniform", 192194304, 4.083e+07, 1.346e+07, 1.112e+07, 3.438e+06, 2.684e+05,
     5.25e+06},
    {"cross_entropy", 1576034304, 1.977e+08, 4.441e+07, 4.413e+07, 3.437e+07, 1.686e+07, 3.654e+07},
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
        {counts.issued * scale, "issue"},
        {2 * counts.alu * scale, "alu"},
        {2 * counts.fma_heavy * scale, "fma"},
        {2 * counts.fma_lite * scale, "fma"},
        {8 * counts.xu * scale, "xu"},
        {kSchedulers * counts.wavefronts * scale, "shared memory"},
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

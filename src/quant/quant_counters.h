// What quantisation counts, so that numeric trouble is never silent.
#pragma once

#include <cstdint>
#include <string>

namespace agoq {

/// One row of int64 per counted tensor, in this order, in backend memory.
enum class QuantCounter : int {
  kNonFinite,      // NaN or Inf in the input: NaN is stored as zero, Inf as the block's largest value
  kSaturated,      // |x| above 1.07 times the largest value its block can decode to
  kFlushedBlocks,  // blocks with a non-zero element whose scale came out as zero
  kCount,
};

inline constexpr int kQuantCounters = static_cast<int>(QuantCounter::kCount);

struct QuantCounts {
  std::int64_t non_finite = 0;
  std::int64_t saturated = 0;
  std::int64_t flushed_blocks = 0;
  bool any() const { return non_finite != 0 || saturated != 0 || flushed_blocks != 0; }
};

/// What a report says of one counted tensor: "layer 3 gate_up", "layers.3.down".
struct NamedCounts {
  std::string name;
  QuantCounts counts;
};

}  // namespace agoq

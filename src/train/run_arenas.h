// RunArenas: one arena per class of memory that a training run holds. Made either to measure what a
// run takes (run_plan.h) or, from that plan, to own it.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>
#include <utility>

#include "core/memory.h"

namespace agoq {

enum class MemoryClass : int {
  kWeights,
  kMasters,    // master weights beside BF16 weights
  kGradients,  // main gradients
  kMoments,
  kActivations,    // saved from forward to backward, over all micro-batches in flight
  kWorkspace,      // scratch of operations and layers; the loss chunk shares it
  kTables,         // RoPE
  kBatch,          // token ids, targets, losses of one micro-batch
  kCommunication,  // staging of the gradients' buckets on their way between ranks
};
inline constexpr int kMemoryClasses = 9;
std::string_view name_of(MemoryClass memory);

using BytesPerClass = std::array<std::size_t, kMemoryClasses>;

class RunArenas {
 public:
  static RunArenas measuring();
  RunArenas(Allocator& allocator, const BytesPerClass& bytes);

  Arena& operator[](MemoryClass memory) { return arenas_[static_cast<std::size_t>(memory)]; }
  BytesPerClass high_water() const;

 private:
  explicit RunArenas(std::array<Arena, kMemoryClasses> arenas) : arenas_(std::move(arenas)) {}
  std::array<Arena, kMemoryClasses> arenas_;
};

}  // namespace agoq

#include "train/peak_memory.h"

#include "core/quantity.h"
#include "train/memory_probe.h"

namespace agoq {

std::int64_t PeakMemory::bytes(std::size_t arena_bytes) const {
  if (!at_start_) return memory_use().peak;
  const std::int64_t fall = static_cast<std::int64_t>(at_start_->free) -
                            static_cast<std::int64_t>(backend_.device_memory()->free);
  return fall < static_cast<std::int64_t>(arena_bytes) ? 0 : fall;
}

std::string format_peak(std::int64_t bytes) { return bytes == 0 ? "not known" : format_bytes(bytes); }

}  // namespace agoq

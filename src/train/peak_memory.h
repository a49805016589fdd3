// The highest use of the memory that a run's arenas lie in, beside the plan's prediction.
//
// The host's is counted (memory_probe.h). A device's is the fall of its free memory since the run began:
// the driver's tables and the libraries' modules are in it, which no allocator sees, but not the
// process's context, which asking takes. So is whatever other programs take or give there meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "backend/backend.h"

namespace agoq {

class PeakMemory {
 public:
  /// Begins here. The backend outlives this.
  explicit PeakMemory(Backend& backend) : backend_(backend), at_start_(backend.device_memory()) {}

  /// Bytes until now, while the arenas are still held. 0 where they are not known: on a host whose
  /// memory this program does not count, and on a device whose free memory fell by less than
  /// `arena_bytes`, of which another program gave some back.
  std::int64_t bytes(std::size_t arena_bytes) const;

 private:
  Backend& backend_;
  std::optional<DeviceMemory> at_start_;
};

/// What people read of PeakMemory::bytes: "77.6 GiB", or "not known" for 0.
std::string format_peak(std::int64_t bytes);

}  // namespace agoq

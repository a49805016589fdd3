// The outside measurement of memory, which the plan's prediction is held against.
//
// memory_use() counts what the whole process, libraries included, has from malloc and its kin (usable
// sizes) and from anonymous mmap. The functions that count stand in front of the C library's only in a
// program that links agoq_memory_hooks (memory_hooks/memory_hooks.cpp): the agoq program and one test.
// Elsewhere, and under sanitizers, which bring their own allocator, memory_probe_available() is false
// and all counts stay 0. resident_memory() is the kernel's view and works everywhere.
#pragma once

#include <cstdint>

namespace agoq {

/// Whether this program counts.
bool memory_probe_available();

struct MemoryUse {
  std::int64_t current = 0;            // bytes
  std::int64_t peak = 0;               // bytes; the most since the last mark
  std::int64_t large_allocations = 0;  // allocations of kLargeAllocation bytes or more since the mark
};

inline constexpr std::int64_t kLargeAllocation = 4096;

MemoryUse memory_use();
/// Starts anew: peak becomes what is in use now, large_allocations 0.
void mark_memory();

struct ResidentMemory {
  std::int64_t current = 0;  // bytes (VmRSS)
  std::int64_t peak = 0;     // bytes since the process started (VmHWM)
};

/// From /proc/self/status, without allocating; zeros where there is no such file.
ResidentMemory resident_memory();

}  // namespace agoq

// What the hooks write and memory_probe.cpp reads. The counters live in the library, so that the hooks
// depend on it and never the other way round: a program without hooks links, and counts nothing.
#pragma once

#include <atomic>
#include <cstdint>

namespace agoq {

// Constant-initialised: malloc is called before any constructor has run.
struct MemoryCounters {
  std::atomic<bool> installed{false};
  std::atomic<std::int64_t> current{0};
  std::atomic<std::int64_t> peak{0};
  std::atomic<std::int64_t> large_allocations{0};

  void raise_peak(std::int64_t bytes) {
    std::int64_t seen = peak.load(std::memory_order_relaxed);
    while (bytes > seen && !peak.compare_exchange_weak(seen, bytes, std::memory_order_relaxed)) {
    }
  }
  void add(std::int64_t bytes) {
    raise_peak(current.fetch_add(bytes, std::memory_order_relaxed) + bytes);
  }
  void subtract(std::int64_t bytes) { current.fetch_sub(bytes, std::memory_order_relaxed); }
};

extern constinit MemoryCounters memory_counters;

}  // namespace agoq

// The host's memory as the kernel tells it: what there is, and what a process can still have.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace agoq {

struct HostMemory {
  std::size_t total = 0;
  std::size_t available = 0;  // can be had without swapping; less than the free memory plus caches
  std::size_t swap_free = 0;
};

/// Of /proc/meminfo; nothing where that does not say. `root` stands before the paths that are read.
std::optional<HostMemory> host_memory(const std::string& root = "");

/// Memory out of which a process is killed when it has taken all.
struct MemoryLimit {
  bool of_group = false;  // of this process's control group, or one above it; else of the machine
  std::size_t total = 0;
  std::size_t free = 0;  // swap included
};

/// The one of which the least is free for this process; nothing where the kernel does not say. What
/// the kernel keeps of files in a control group's memory is free: it is given up before a process is
/// killed.
std::optional<MemoryLimit> memory_limit(const std::string& root = "");

}  // namespace agoq

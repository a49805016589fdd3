#include "train/memory_probe.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "train/memory_hooks/memory_counters.h"

namespace agoq {

constinit MemoryCounters memory_counters;

bool memory_probe_available() { return memory_counters.installed.load(std::memory_order_relaxed); }

MemoryUse memory_use() {
  return {memory_counters.current.load(std::memory_order_relaxed),
          memory_counters.peak.load(std::memory_order_relaxed),
          memory_counters.large_allocations.load(std::memory_order_relaxed)};
}

void mark_memory() {
  memory_counters.large_allocations.store(0, std::memory_order_relaxed);
  memory_counters.peak.store(memory_counters.current.load(std::memory_order_relaxed),
                             std::memory_order_relaxed);
}

namespace {

// The number after "name:" in kilobytes, as bytes.
std::int64_t kilobytes_after(const char* text, const char* name) {
  const char* field = std::strstr(text, name);
  return field == nullptr ? 0 : std::strtoll(field + std::strlen(name), nullptr, 10) * 1024;
}

}  // namespace

ResidentMemory resident_memory() {
  const int file = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  char text[8192];
  std::size_t length = 0;
  while (length < sizeof(text) - 1) {
    const ssize_t count = read(file, text + length, sizeof(text) - 1 - length);
    if (count <= 0) break;
    length += static_cast<std::size_t>(count);
  }
  close(file);
  text[length] = '\0';
  return {kilobytes_after(text, "\nVmRSS:"), kilobytes_after(text, "\nVmHWM:")};
}

}  // namespace agoq

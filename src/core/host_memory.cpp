#include "core/host_memory.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <string_view>

namespace agoq {
namespace {

/// The number at the start of `text`, after blanks; nothing where there is none, as in "max".
std::optional<std::size_t> number_in(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return std::nullopt;
  std::size_t number = 0;
  const auto parsed = std::from_chars(text.data() + begin, text.data() + text.size(), number);
  return parsed.ec == std::errc() ? std::optional(number) : std::nullopt;
}

/// The number in a line of the file that begins with `name`.
std::optional<std::size_t> number_after(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name)) return number_in(std::string_view(line).substr(name.size()));
  }
  return std::nullopt;
}

std::optional<std::size_t> number_of(const std::string& path) { return number_after(path, ""); }

/// What a version of control groups calls its files, in the folder of a group.
struct GroupFiles {
  const char* limit;
  const char* used;
  std::array<const char*, 3> reclaimable;  // lines of memory.stat
  const char* swap_limit;                  // of swap alone; null: what the machine has
  const char* swap_used;
};
constexpr GroupFiles kVersion1{"/memory.limit_in_bytes",
                               "/memory.usage_in_bytes",
                               {"total_inactive_file ", "total_active_file ", "total_slab_reclaimable "},
                               nullptr,
                               nullptr};
constexpr GroupFiles kVersion2{"/memory.max",
                               "/memory.current",
                               {"inactive_file ", "active_file ", "slab_reclaimable "},
                               "/memory.swap.max",
                               "/memory.swap.current"};

std::size_t difference(std::size_t a, std::size_t b) { return a - std::min(a, b); }

/// Of the group of this folder; nothing where it has no limit.
std::optional<MemoryLimit> limit_of(const std::string& folder, const GroupFiles& files,
                                    std::size_t swap_free) {
  const std::optional<std::size_t> limit = number_of(folder + files.limit);
  const std::optional<std::size_t> used = number_of(folder + files.used);
  if (!limit || !used) return std::nullopt;
  std::size_t cached = 0;
  for (const char* name : files.reclaimable) {
    cached += number_after(folder + "/memory.stat", name).value_or(0);
  }
  std::size_t swap = swap_free;
  if (files.swap_limit != nullptr) {
    if (const std::optional<std::size_t> most = number_of(folder + files.swap_limit)) {
      swap = std::min(swap, difference(*most, number_of(folder + files.swap_used).value_or(0)));
    }
  }
  return MemoryLimit{true, *limit, difference(*limit, difference(*used, cached)) + swap};
}

/// Calls `visit` with the folder of the group `path` under `mount`, and of those above it. In a
/// container the path may be the one outside it, of which only the mount itself is there.
template <typename Visit>
void for_each_group(const std::string& mount, std::string path, Visit visit) {
  while (!path.empty() && path != "/") {
    visit(mount + path);
    path.erase(path.rfind('/'));
  }
  visit(mount);
}

}  // namespace

std::optional<HostMemory> host_memory(const std::string& root) {
  const std::string path = root + "/proc/meminfo";
  const std::optional<std::size_t> total = number_after(path, "MemTotal:");
  const std::optional<std::size_t> available = number_after(path, "MemAvailable:");
  if (!total || !available) return std::nullopt;
  return HostMemory{*total * 1024, *available * 1024,
                    number_after(path, "SwapFree:").value_or(0) * 1024};
}

std::optional<MemoryLimit> memory_limit(const std::string& root) {
  const std::optional<HostMemory> host = host_memory(root);
  if (!host) return std::nullopt;
  MemoryLimit least{false, host->total, host->available + host->swap_free};
  const auto visit = [&](const GroupFiles& files) {
    return [&](const std::string& folder) {
      const std::optional<MemoryLimit> limit = limit_of(folder, files, host->swap_free);
      // Version 1 writes no limit as one beyond any machine.
      if (limit && limit->total < host->total && limit->free < least.free) least = *limit;
    };
  };
  // Lines of "number:controllers:/path"; version 2 has one, without controllers.
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    std::string controllers(1, ',');
    controllers.append(line, first + 1, second - first);
    controllers.back() = ',';
    const std::string path = line.substr(second + 1);
    if (!path.starts_with('/')) continue;
    if (controllers == ",,") {
      for_each_group(root + "/sys/fs/cgroup", path, visit(kVersion2));
    } else if (controllers.find(",memory,") != std::string::npos) {
      for_each_group(root + "/sys/fs/cgroup/memory", path, visit(kVersion1));
    }
  }
  return least;
}

}  // namespace agoq

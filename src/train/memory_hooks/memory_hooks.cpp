// malloc, its kin and mmap of a program that measures itself: each calls the C library's own and
// counts. A definition in the executable comes before the C library's for every shared library, so
// oneDNN's, OpenMP's and operator new's memory is seen too.
//
// What is counted: usable sizes of heap blocks (malloc_usable_size), and readable or writable
// anonymous mappings in whole pages. What is not: the heap's own headers and free lists, mappings
// that malloc makes for itself (its blocks are counted), reserved pages (PROT_NONE), stacks. The copy
// that a moving realloc holds for a moment is not seen.
//
// Invariant: a block is added after it was given out and subtracted before it is given back, so
// `current` never counts a byte twice and never falls below zero.
#include "train/memory_hooks/memory_counters.h"

#ifndef AGOQ_SANITIZED

#include <malloc.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdint>

#include "train/memory_probe.h"

extern "C" {
// glibc's names for its own functions, exported for this purpose.
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* block, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);
void __libc_free(void* block);
}

namespace agoq {
namespace {

struct Installer {
  Installer() { memory_counters.installed.store(true, std::memory_order_relaxed); }
};
Installer installer;

void count_large(std::int64_t bytes) {
  if (bytes >= kLargeAllocation)
    memory_counters.large_allocations.fetch_add(1, std::memory_order_relaxed);
}

std::int64_t size_of_block(void* block) { return static_cast<std::int64_t>(malloc_usable_size(block)); }

void* counted(void* block) {
  if (block != nullptr) {
    memory_counters.add(size_of_block(block));
    count_large(size_of_block(block));
  }
  return block;
}

void* aligned(std::size_t alignment, std::size_t size) {
  return counted(__libc_memalign(alignment, size));
}

bool is_power_of_two(std::size_t number) { return number != 0 && (number & (number - 1)) == 0; }

// --- anonymous mappings ---
// munmap may cut a mapping anywhere, so the counted ranges are kept: disjoint, in a table that cannot
// itself allocate. Mappings are rare and a spin lock is enough. A range that finds the table full is
// not counted.
constexpr std::size_t kRanges = 1024;
struct MappedRange {
  std::uintptr_t begin;
  std::uintptr_t end;
};
constinit MappedRange ranges[kRanges]{};
constinit std::size_t range_count = 0;
constinit std::atomic_flag ranges_lock;

class RangesLock {
 public:
  RangesLock() {
    while (ranges_lock.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~RangesLock() { ranges_lock.clear(std::memory_order_release); }
  RangesLock(const RangesLock&) = delete;
  RangesLock& operator=(const RangesLock&) = delete;
};

std::uintptr_t address(void* memory) { return reinterpret_cast<std::uintptr_t>(memory); }

std::size_t whole_pages(std::size_t bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

void add_range(std::uintptr_t begin, std::size_t bytes) {
  const RangesLock lock;
  if (range_count == kRanges) return;
  ranges[range_count++] = {begin, begin + bytes};
  memory_counters.add(static_cast<std::int64_t>(bytes));
}

// Takes [begin, begin + bytes) out of the counted ranges; returns the bytes of it that were counted.
std::size_t remove_range(std::uintptr_t begin, std::size_t bytes) {
  const RangesLock lock;
  const std::uintptr_t end = begin + bytes;
  std::size_t removed = 0;
  for (std::size_t i = 0; i < range_count;) {
    MappedRange& range = ranges[i];
    const std::uintptr_t cut_begin = std::max(begin, range.begin);
    const std::uintptr_t cut_end = std::min(end, range.end);
    if (cut_begin >= cut_end) {
      ++i;
      continue;
    }
    removed += cut_end - cut_begin;
    const MappedRange above{cut_end, range.end};
    range.end = cut_begin;
    if (above.begin < above.end) {
      if (range.begin == range.end) {
        range = above;
      } else if (range_count < kRanges) {
        ranges[range_count++] = above;
      } else {
        removed += above.end - above.begin;
      }
    }
    if (range.begin == range.end) {
      range = ranges[--range_count];
    } else {
      ++i;
    }
  }
  memory_counters.subtract(static_cast<std::int64_t>(removed));
  return removed;
}

void* map(void* wanted, std::size_t bytes, int protection, int flags, int file, off_t offset) {
  auto* memory = std::bit_cast<void*>(syscall(SYS_mmap, wanted, bytes, protection, flags, file, offset));
  if (memory == MAP_FAILED) return memory;
  const std::size_t size = whole_pages(bytes);
  if ((flags & MAP_FIXED) != 0) remove_range(address(memory), size);
  if ((flags & MAP_ANONYMOUS) != 0 && protection != PROT_NONE) {
    add_range(address(memory), size);
    count_large(static_cast<std::int64_t>(size));
  }
  return memory;
}

}  // namespace
}  // namespace agoq

extern "C" {

void* malloc(std::size_t size) noexcept { return agoq::counted(__libc_malloc(size)); }

void* calloc(std::size_t count, std::size_t size) noexcept {
  return agoq::counted(__libc_calloc(count, size));
}

void* realloc(void* block, std::size_t size) noexcept {
  const std::int64_t before = block == nullptr ? 0 : agoq::size_of_block(block);
  void* moved = __libc_realloc(block, size);
  // A failed realloc leaves the block as it is, except that size 0 frees it.
  if (moved == nullptr && size != 0) return nullptr;
  agoq::memory_counters.subtract(before);
  return agoq::counted(moved);
}

void free(void* block) noexcept {
  if (block == nullptr) return;
  agoq::memory_counters.subtract(agoq::size_of_block(block));
  __libc_free(block);
}

void* memalign(std::size_t alignment, std::size_t size) noexcept {
  return agoq::aligned(alignment, size);
}

void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
  return agoq::aligned(alignment, size);
}

int posix_memalign(void** block, std::size_t alignment, std::size_t size) noexcept {
  if (!agoq::is_power_of_two(alignment) || alignment % sizeof(void*) != 0) return EINVAL;
  const int saved_errno = errno;  // reports through its result only
  void* memory = agoq::aligned(alignment, size);
  errno = saved_errno;
  if (memory == nullptr) return ENOMEM;
  *block = memory;
  return 0;
}

void* valloc(std::size_t size) noexcept { return agoq::aligned(agoq::whole_pages(1), size); }

void* pvalloc(std::size_t size) noexcept {
  return agoq::aligned(agoq::whole_pages(1), agoq::whole_pages(size));
}

void* mmap(void* wanted, std::size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
  return agoq::map(wanted, bytes, protection, flags, file, offset);
}

void* mmap64(void* wanted, std::size_t bytes, int protection, int flags, int file,
             off64_t offset) noexcept {
  return agoq::map(wanted, bytes, protection, flags, file, offset);
}

int munmap(void* memory, std::size_t bytes) noexcept {
  // Before the call: afterwards another thread may be given the same addresses.
  const std::size_t size = agoq::whole_pages(bytes);
  const std::size_t removed = agoq::remove_range(agoq::address(memory), size);
  const auto result = static_cast<int>(syscall(SYS_munmap, memory, bytes));
  if (result != 0 && removed != 0) agoq::add_range(agoq::address(memory), removed);
  return result;
}

void* mremap(void* memory, std::size_t bytes, std::size_t new_bytes, int flags, ...) noexcept {
  void* wanted = nullptr;
  if ((flags & MREMAP_FIXED) != 0) {
    std::va_list arguments;
    va_start(arguments, flags);
    wanted = va_arg(arguments, void*);
    va_end(arguments);
  }
  const std::size_t removed = agoq::remove_range(agoq::address(memory), agoq::whole_pages(bytes));
  auto* moved = std::bit_cast<void*>(syscall(SYS_mremap, memory, bytes, new_bytes, flags, wanted));
  if (removed != 0) {
    if (moved == MAP_FAILED) {
      agoq::add_range(agoq::address(memory), removed);
    } else {
      agoq::add_range(agoq::address(moved), agoq::whole_pages(new_bytes));
    }
  }
  return moved;
}

}  // extern "C"

#endif  // AGOQ_SANITIZED

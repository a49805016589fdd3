// The hooks see every way of taking memory, and the peak is right.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "core/error.h"
#include "train/memory_probe.h"

namespace agoq {
namespace {

constexpr std::int64_t kMebibyte = 1 << 20;
// Room for what the heap adds to a block, and for what the test itself takes.
constexpr std::int64_t kSlack = 16 << 10;

// Writes, so that no compiler may leave an allocation out.
void touch(void* memory, std::size_t bytes) {
  auto* volatile kept = static_cast<char*>(memory);
  std::memset(kept, 1, bytes);
}

// realloc; should there be no memory, the test ends before the block is lost.
void* resized(void* block, std::size_t bytes) {
  void* moved = std::realloc(block, bytes);
  check(moved != nullptr, "{} bytes are not there", bytes);
  return moved;
}

class MemoryHooks : public testing::Test {
 protected:
  void SetUp() override {
    if (!memory_probe_available()) GTEST_SKIP() << "sanitizers bring their own allocator";
    mark_memory();
    start_ = memory_use().current;
  }
  std::int64_t taken() const { return memory_use().current - start_; }
  void expect_taken(std::int64_t bytes) const {
    EXPECT_GE(taken(), bytes);
    EXPECT_LE(taken(), bytes + kSlack);
  }
  std::int64_t start_ = 0;
};

TEST_F(MemoryHooks, SeeMallocCallocAndRealloc) {
  void* block = std::malloc(kMebibyte);
  touch(block, kMebibyte);
  expect_taken(kMebibyte);
  block = resized(block, 3 * kMebibyte);
  touch(block, 3 * kMebibyte);
  expect_taken(3 * kMebibyte);
  block = resized(block, kMebibyte / 2);
  touch(block, kMebibyte / 2);
  expect_taken(kMebibyte / 2);
  void* cleared = std::calloc(1024, 2048);
  EXPECT_EQ(static_cast<char*>(cleared)[kMebibyte], 0);
  expect_taken(kMebibyte / 2 + 2 * kMebibyte);
  std::free(cleared);
  std::free(block);
  expect_taken(0);
}

TEST_F(MemoryHooks, SeeGrowthOfASmallBlockByRealloc) {
  void* block = nullptr;  // realloc of null is malloc
  for (std::size_t bytes = 16; bytes <= 4 * kMebibyte; bytes *= 2) {
    block = resized(block, bytes);
    touch(block, bytes);
    expect_taken(static_cast<std::int64_t>(bytes));
  }
  std::free(block);
  expect_taken(0);
}

TEST_F(MemoryHooks, SeeAlignedAllocation) {
  void* first = nullptr;
  ASSERT_EQ(posix_memalign(&first, 4096, kMebibyte), 0);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % 4096, 0u);
  void* second = std::aligned_alloc(64, kMebibyte);
  void* third = memalign(256, kMebibyte);
  for (void* block : {first, second, third}) touch(block, kMebibyte);
  expect_taken(3 * kMebibyte);
  for (void* block : {first, second, third}) std::free(block);
  expect_taken(0);
  EXPECT_EQ(posix_memalign(&first, 24, 64), EINVAL);
}

TEST_F(MemoryHooks, SeeOperatorNewOfTheStandardLibrary) {
  {
    const std::vector<char> values(2 * kMebibyte, 1);
    expect_taken(2 * kMebibyte);
  }
  struct alignas(128) Wide {
    char bytes[128];
  };
  {
    const auto wide = std::make_unique<Wide[]>(8192);
    touch(wide.get(), 128);
    expect_taken(kMebibyte);
  }
  expect_taken(0);
}

TEST_F(MemoryHooks, SeeAnonymousMappingsCutAnywhere) {
  void* mapped =
      mmap(nullptr, 16 * kMebibyte, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  expect_taken(16 * kMebibyte);
  // A hole in the middle, then across the hole.
  ASSERT_EQ(munmap(static_cast<char*>(mapped) + 4 * kMebibyte, 4 * kMebibyte), 0);
  expect_taken(12 * kMebibyte);
  ASSERT_EQ(munmap(static_cast<char*>(mapped) + 2 * kMebibyte, 8 * kMebibyte), 0);
  expect_taken(8 * kMebibyte);
  ASSERT_EQ(munmap(mapped, 16 * kMebibyte), 0);
  expect_taken(0);
}

TEST_F(MemoryHooks, FollowMremap) {
  void* mapped = mmap(nullptr, kMebibyte, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  mapped = mremap(mapped, kMebibyte, 5 * kMebibyte, MREMAP_MAYMOVE);
  ASSERT_NE(mapped, MAP_FAILED);
  touch(mapped, 5 * kMebibyte);
  expect_taken(5 * kMebibyte);
  ASSERT_EQ(munmap(mapped, 5 * kMebibyte), 0);
  expect_taken(0);
}

TEST_F(MemoryHooks, DoNotCountReservedPages) {
  void* reserved = mmap(nullptr, 64 * kMebibyte, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(reserved, MAP_FAILED);
  expect_taken(0);
  ASSERT_EQ(munmap(reserved, 64 * kMebibyte), 0);
  expect_taken(0);
}

TEST_F(MemoryHooks, KeepThePeakUntilTheNextMark) {
  void* low = std::malloc(kMebibyte);
  touch(low, kMebibyte);
  {
    void* high = std::malloc(8 * kMebibyte);
    touch(high, 8 * kMebibyte);
    std::free(high);
  }
  expect_taken(kMebibyte);
  const std::int64_t peak = memory_use().peak - start_;
  EXPECT_GE(peak, 9 * kMebibyte);
  EXPECT_LE(peak, 9 * kMebibyte + kSlack);
  mark_memory();
  EXPECT_LE(memory_use().peak - start_, kMebibyte + kSlack);
  std::free(low);
}

TEST_F(MemoryHooks, CountLargeAllocationsSinceTheMark) {
  mark_memory();
  void* small = std::malloc(kLargeAllocation / 2);
  touch(small, 1);
  EXPECT_EQ(memory_use().large_allocations, 0);
  void* large = std::malloc(kLargeAllocation);
  touch(large, 1);
  large = resized(large, 2 * kLargeAllocation);
  touch(large, 1);
  EXPECT_EQ(memory_use().large_allocations, 2);
  std::free(large);
  std::free(small);
  mark_memory();
  EXPECT_EQ(memory_use().large_allocations, 0);
}

TEST_F(MemoryHooks, AddUpOverThreads) {
  constexpr int kThreads = 4;
  {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([] {
        for (int i = 0; i < 20000; ++i) {
          void* block = std::malloc(static_cast<std::size_t>(16 + i % 5000));
          touch(block, 1);
          std::free(block);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  // What the threads took is back; the C library keeps a little per thread.
  EXPECT_GE(taken(), 0);
  EXPECT_LE(taken(), 4 * kSlack);
}

TEST(ResidentMemory, RisesWithTouchedPages) {
  const ResidentMemory before = resident_memory();
  ASSERT_GT(before.current, 0);
  {
    std::vector<char> values(64 * kMebibyte, 1);
    touch(values.data(), values.size());
    EXPECT_GE(resident_memory().current, before.current + 60 * kMebibyte);
  }
  EXPECT_GE(resident_memory().peak, before.current + 60 * kMebibyte);
}

}  // namespace
}  // namespace agoq

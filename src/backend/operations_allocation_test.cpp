// No operation allocates 4 KiB or more once its primitives are built: memory is planned. The allocation
// functions of glibc are replaced in this program, so that what oneDNN takes counts too.
#include <cerrno>
#include <cstdlib>

#include <atomic>

#include "backend/operation_testing.h"

// Sanitizers bring their own malloc.
#if defined(__GLIBC__) && !defined(AGOQ_SANITIZED)

namespace {
constexpr std::size_t kLarge = 4096;
std::atomic<bool> watching{false};
std::atomic<int> large{0};
void note(std::size_t bytes) {
  if (watching && bytes >= kLarge) ++large;
}
}  // namespace

extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);

void* malloc(std::size_t bytes) {
  note(bytes);
  return __libc_malloc(bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  note(bytes);
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
  note(bytes);
  *memory = __libc_memalign(alignment, bytes);
  return *memory == nullptr ? ENOMEM : 0;
}
}

namespace agoq {
namespace {

using namespace testing_operations;

TEST(Allocation, TheWatchSeesALargeOne) {
  watching = true;
  void* volatile memory = std::malloc(kLarge);
  watching = false;
  std::free(memory);
  EXPECT_GE(large.exchange(0), 1);
}

TEST(Allocation, MatmulTakesNothingLargeAfterItsFirstCall) {
  struct Shapes {
    std::int64_t m, n, k;
  };
  // Whole tiles, edges in both directions, single rows and columns, and the quickstart's products.
  for (const auto [m, n, k] : std::vector<Shapes>{{512, 1408, 256},
                                                  {512, 256, 704},
                                                  {256, 257, 256},
                                                  {257, 256, 256},
                                                  {130, 129, 1000},
                                                  {1, 512, 256},
                                                  {300, 1, 64},
                                                  {2, 3, 5000}}) {
    for (const ElementType type : {ElementType::kFp32, ElementType::kBf16}) {
      for (int variant = 0; variant < 8; ++variant) {
        const bool flip_a = (variant & 1) != 0, flip_b = (variant & 2) != 0;
        Bench bench;
        const Tensor a = bench.of(type, flip_a ? Shape{k, m} : Shape{m, k}, normal(m * k, 1));
        const Tensor b = bench.of(type, flip_b ? Shape{n, k} : Shape{k, n}, normal(n * k, 2));
        const Tensor c = bench.of(type, Shape{m, n}, normal(m * n, 3));
        for (const bool watched : {false, true}) {
          watching = watched;
          bench.context.backend.matmul(bench.context, a, flip_a ? Transpose::kYes : Transpose::kNo, b,
                                       flip_b ? Transpose::kYes : Transpose::kNo, c, (variant & 4) != 0);
          watching = false;
        }
        EXPECT_EQ(large.exchange(0), 0)
            << m << " x " << n << " x " << k << " " << name_of(type) << " variant " << variant;
      }
    }
  }
}

}  // namespace
}  // namespace agoq

#endif

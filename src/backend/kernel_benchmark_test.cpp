// The kernel benchmark: it runs every operation, and counts each byte once.
#include "backend/kernel_benchmark.h"

#include <gtest/gtest.h>

#include "backend/operation_testing.h"
#include "backend/profiled_backend.h"

namespace agoq {
namespace {

constexpr KernelSizes kSmall{.tokens = 32,
                             .hidden = 128,
                             .feed_forward = 192,
                             .vocabulary = 100,
                             .segments = 2,
                             .attention = {4, 2, 16}};

TEST(KernelBenchmark, TimesEveryOperation) {
  const std::vector<KernelTime> times = measure_kernels(cpu_backend(), kSmall, 3);
  std::vector<std::string> names;
  for (const KernelTime& time : times) {
    SCOPED_TRACE(time.name);
    names.push_back(time.name);
    EXPECT_GT(time.seconds, 0);
    EXPECT_LT(time.seconds, 1);
    EXPECT_GT(time.bytes, 0);
    EXPECT_FALSE(time.operands.empty());
  }
  const std::vector<std::string> expected{"copy",
                                          "residual_norm_forward",
                                          "norm_forward_saved",
                                          "norm_backward_saved",
                                          "swiglu_forward_save",
                                          "swiglu_backward_saved",
                                          "quantize",
                                          "dequantize",
                                          "accumulate",
                                          "adamw_update",
                                          "adamw_update_pieces",
                                          "sums_of_squares",
                                          "add_pieces",
                                          "pieces_sums_of_squares",
                                          "rope",
                                          "embedding_forward",
                                          "embedding_backward",
                                          "embedding_backward_log_uniform",
                                          "cross_entropy"};
  EXPECT_EQ(names, expected);
}

TEST(KernelBenchmark, CountsEachByteOnce) {
  const std::vector<KernelTime> times = measure_kernels(cpu_backend(), kSmall, 1);
  const auto bytes_of = [&](std::string_view name) {
    for (const KernelTime& time : times) {
      if (time.name == name) return time.bytes;
    }
    return std::int64_t{0};
  };
  EXPECT_EQ(bytes_of("copy"), 2 * 32 * 384 * 2);
  // nf4/32/two-level of 128 elements: 64 bytes of codes, 4 scales of one byte, one of two.
  EXPECT_EQ(bytes_of("quantize"), 32 * (128 * 2 + 70));
  // x twice, delta, y; weight; rstd; saved.
  EXPECT_EQ(bytes_of("residual_norm_forward"), 32 * (4 * 256 + 4 + 70) + 256);
  // gate and up are two segments each of 96 elements: 48 + 3 + 2 bytes.
  EXPECT_EQ(bytes_of("swiglu_backward_saved"), 32 * (2 * 384 + 2 * 384 + 4 * 53));
  // A parameter of [8, 192] in two segments a row: 96 codes and one scale of four bytes.
  EXPECT_EQ(bytes_of("accumulate"), 8 * (192 * 4 + 2 * 2 * 100));
  // Eight ranks' pieces of it, and their sum; the sum of squares is eight bytes.
  EXPECT_EQ(bytes_of("add_pieces"), 9 * 8 * 2 * 100);
  EXPECT_EQ(bytes_of("pieces_sums_of_squares"), 8 * 8 * 2 * 100 + 8);
  // q and k of four and two heads of 16, read and written; the table; positions.
  EXPECT_EQ(bytes_of("rope"), 32 * (2 * 6 * 16 * 2 + 8 * 2 * 4 + 4));
}

TEST(KernelBenchmark, TimesOneOperationBesideTheCopy) {
  const std::vector<KernelTime> times = measure_kernels(cpu_backend(), kSmall, 1, nullptr, "rope");
  ASSERT_EQ(times.size(), 2u);
  EXPECT_EQ(times[0].name, "copy");
  EXPECT_EQ(times[1].name, "rope");
  EXPECT_GT(times[1].copy_bytes_per_second, 0);
  EXPECT_THROW(measure_kernels(cpu_backend(), kSmall, 1, nullptr, "ropes"), Error);
}

TEST(KernelBenchmark, IsBoundByTheCopyWithoutInstructionCounts) {
  KernelTime kernel;
  kernel.copy_bytes_per_second = 1e9;
  kernel.bytes = 500, kernel.seconds = 2e-6;
  EXPECT_DOUBLE_EQ(bound_seconds(kernel), .5e-6);
  kernel.instructions = InstructionBound{.25e-6, "issue"};
  EXPECT_DOUBLE_EQ(bound_seconds(kernel), .5e-6);
  kernel.instructions = InstructionBound{.75e-6, "issue"};
  EXPECT_DOUBLE_EQ(bound_seconds(kernel), .75e-6);
}

TEST(InstructionBound, IsKnownForEveryOperation) {
  for (const KernelTime& time : measure_kernels(cpu_backend(), kSmall, 1)) {
    EXPECT_EQ(instruction_bound(time.name, time.bytes, 132, 1.9e9).has_value(), time.name != "copy")
        << time.name;
  }
}

TEST(InstructionBound, GrowsWithTheBytesAndFallsWithTheClock) {
  const std::int64_t bytes = 769392640;
  const auto bound = instruction_bound("adamw_update", bytes, 132, 2e9);
  ASSERT_TRUE(bound);
  // 153.9 million instructions, one per cycle from each of 528 schedulers.
  EXPECT_NEAR(bound->seconds, 153.9e6 / (528 * 2e9), 1e-9);
  EXPECT_EQ(bound->by, "issue");
  EXPECT_DOUBLE_EQ(instruction_bound("adamw_update", 2 * bytes, 132, 2e9)->seconds, 2 * bound->seconds);
  EXPECT_DOUBLE_EQ(instruction_bound("adamw_update", bytes, 132, 1e9)->seconds, 2 * bound->seconds);
  EXPECT_DOUBLE_EQ(instruction_bound("adamw_update", bytes, 66, 2e9)->seconds, 2 * bound->seconds);
}

TEST(InstructionBound, IsThatOfTheBusiestResource) {
  // 5.175 million wavefronts, one per cycle and multiprocessor, against 18.97 million instructions.
  const auto bound = instruction_bound("rope", 343998464, 132, 2e9);
  ASSERT_TRUE(bound);
  EXPECT_EQ(bound->by, "shared memory");
  EXPECT_NEAR(bound->seconds, 5.175e6 / (132 * 2e9), 1e-9);
}

// Not after minutes of drawing operands that nothing holds.
TEST(KernelBenchmark, RefusesWhatHasNoRoomBeforeItDrawsOperands) {
  struct Full : Allocator {
    std::byte* allocate(std::size_t bytes) override { fail_input("no room for {} bytes", bytes); }
    void release(std::byte*, std::size_t) override {}
  };
  struct FullBackend : ProfiledBackend {
    using ProfiledBackend::ProfiledBackend;
    Allocator& allocator() override { return full; }
    void upload(const Context&, const void*, std::byte*, std::size_t) override { drawn = true; }
    Full full;
    bool drawn = false;
  };
  FullBackend backend(cpu_backend());
  EXPECT_THROW(measure_kernels(backend, kSmall), Error);
  EXPECT_FALSE(backend.drawn);
}

TEST(KernelBenchmark, RefusesNoTokens) {
  KernelSizes sizes = kSmall;
  sizes.tokens = 0;
  EXPECT_THROW(measure_kernels(cpu_backend(), sizes), Error);
}

TEST(BackendTime, IsThatOfTheWork) {
  testing_operations::Bench bench;
  bool done = false;
  const double seconds = cpu_backend().time(bench.context, [&] { done = true; });
  EXPECT_TRUE(done);
  EXPECT_GE(seconds, 0);
  EXPECT_LT(seconds, 1);
  Arena measuring = Arena::measuring("measuring");
  done = false;
  EXPECT_EQ(cpu_backend().time({cpu_backend(), {}, measuring, {}}, [&] { done = true; }), 0);
  EXPECT_TRUE(done);
}

}  // namespace
}  // namespace agoq

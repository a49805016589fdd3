// A kernel that fails takes the CUDA context with it: the operation is named, and the process ends in
// order, with destructors that meet a dead context. Each case in a process of its own.
#include <cstdlib>

#include "backend/cuda_testing.h"

namespace agoq {
namespace {

constexpr int kNamed = 17;

/// Adds tensors at an address that no kernel may read, and ends the process as the program does.
[[noreturn]] void add_at_a_wrong_address() {
  try {
    Arena workspace("test workspace", cuda_backend().allocator(), 4096);
    const Context context{cuda_backend(), {}, workspace, {}};
    const Tensor wrong{reinterpret_cast<std::byte*>(0x1000), ElementType::kFp32, Shape{64, 64}};
    cuda_backend().add(context, wrong, wrong, wrong);
    std::byte byte{};
    cuda_backend().read(context, workspace.take(256), &byte, 1);
  } catch (const Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    std::exit(error.kind() == ErrorKind::kDevice ? kNamed : 1);
  }
  std::exit(0);
}

TEST(CudaFailureDeathTest, IsReportedByALaterOperationWhenNobodyWaits) {
  AGOQ_NEEDS_GPU();
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(add_at_a_wrong_address(), testing::ExitedWithCode(kNamed),
              "or an operation queued before it: CUDA reports .*CUDA_LAUNCH_BLOCKING=1");
}

// The environment of the process that CUDA starts in decides.
TEST(CudaFailureDeathTest, IsReportedByTheOperationItselfUnderLaunchBlocking) {
  AGOQ_NEEDS_GPU();
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  EXPECT_EXIT(add_at_a_wrong_address(), testing::ExitedWithCode(kNamed), "^add: CUDA reports ");
  unsetenv("CUDA_LAUNCH_BLOCKING");
}

}  // namespace
}  // namespace agoq

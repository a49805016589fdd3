// Runs the tests on every rank. Rank 0 prints what GoogleTest prints; the others print failures only.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <thread>

#include "backend/backend.h"
#include "comm/launch.h"
#include "core/error.h"
#include "ranks/ranks.h"

namespace agoq {
namespace {

// A test whose ranks have lost step with each other ends soon.
constexpr double kTimeoutSeconds = 30;

std::unique_ptr<Communicator> all_ranks;

/// Prints the failures of ranks that print nothing else, and ends the program behind a test that failed.
class RankListener : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed() || ranks().rank() == 0) return;
    std::fprintf(stderr, "rank %d of %d: %s:%d: %s\n", ranks().rank(), ranks().size(),
                 result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
                 result.message());
  }
  void OnTestEnd(const testing::TestInfo& test) override {
    if (!test.result()->Failed() || ranks().size() == 1) return;
    std::fprintf(stderr, "rank %d of %d: %s.%s failed; no further test is run\n", ranks().rank(),
                 ranks().size(), test.test_suite_name(), test.name());
    std::fflush(nullptr);
    // When the first rank has ended, mpirun ends the others: let them print their failures as well.
    std::this_thread::sleep_for(std::chrono::seconds(1));
    std::_Exit(1);
  }
};

}  // namespace

Communicator& ranks() { return *all_ranks; }

BackendKind rank_device() {
  const char* device = std::getenv("AGOQ_TEST_DEVICE");
  if (device == nullptr || std::string_view(device) == "cpu") return BackendKind::kCpu;
  check_input(std::string_view(device) == "cuda", "AGOQ_TEST_DEVICE is cpu or cuda; '{}' was given",
              device);
  return BackendKind::kCuda;
}

Backend& rank_backend() { return backend_of(rank_device()); }

const Context& rank_context() {
  static Arena workspace("workspace", rank_backend().allocator(), std::size_t{64} << 20);
  static const Context context{rank_backend(), {}, workspace, {}};
  return context;
}

std::string bytes_of(const std::byte* memory, std::size_t bytes) {
  std::string text(bytes, '\0');
  rank_backend().read(rank_context(), memory, text.data(), bytes);
  return text;
}

}  // namespace agoq

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const agoq::Launch launch = agoq::launch_from_environment();
  agoq::Backend& backend = agoq::rank_backend();
  backend.use_device(launch.local_rank);
  backend.set_deterministic(true);
  agoq::all_ranks = agoq::world(launch, backend, {.timeout_seconds = agoq::kTimeoutSeconds});
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  if (agoq::ranks().rank() != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new agoq::RankListener);
  int status = RUN_ALL_TESTS();
  if (testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
    // CMakeLists.txt runs some by their names.
    if (agoq::ranks().rank() == 0) std::fprintf(stderr, "no test has the name that was asked for\n");
    status = 1;
  }
  agoq::all_ranks.reset();
  agoq::leave_world(launch);
  return status;
}

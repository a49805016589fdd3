#include "comm/deadline.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>

#include "comm/together.h"
#include "core/stop_signals.h"

namespace agoq {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kTick{0.1};
// From one tick to the next: longer than a thread waits for a busy processor.
constexpr Seconds kHalt{2};

}  // namespace

Deadline::Deadline(const Launch& launch, double seconds, const std::string& what,
                   const std::string& advice) {
  if (launch.size == 1) return;
  const std::string line = fmt::format(
      "agoq: rank {} of {} has waited {:g} s for all others to {}, and not all of them have: one has "
      "ended before or hangs; {}\n",
      launch.rank, launch.size, seconds, what, advice);
  thread_ = std::thread(
      [this, seconds, turn = turn_seconds(launch.rank), line] { wait(seconds, turn, line); });
}

Deadline::~Deadline() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    is_met_ = true;
  }
  condition_.notify_one();
  thread_.join();
}

void Deadline::wait(double seconds, double turn, const std::string& line) {
  std::unique_lock lock(mutex_);
  auto start = std::chrono::steady_clock::now();
  auto tick = start;
  double waited = 0;
  while (waited < seconds + turn) {
    // By a launcher, which ends all where one that was before this one has spoken.
    if (waited >= seconds && turn > 0 && StopSignals::any()) ::_exit(1);
    if (condition_.wait_for(lock, kTick, [this] { return is_met_; })) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - tick > kHalt) start = now;
    tick = now;
    waited = Seconds(tick - start).count();
  }
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
  ::_exit(1);
}

}  // namespace agoq

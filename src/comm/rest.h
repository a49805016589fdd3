// Rest: what a thread does between two looks at something that it polls.
#pragma once

#include <chrono>
#include <thread>

namespace agoq {

/// Rests briefly while an answer may come soon, then longer. From construction on; rest = {} begins
/// anew.
class Rest {
 public:
  /// Seconds since the beginning.
  double operator()() {
    const double waited = std::chrono::duration<double>(Clock::now() - start_).count();
    if (waited < kSoonSeconds) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return waited;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr double kSoonSeconds = 0.002;

  Clock::time_point start_ = Clock::now();
};

}  // namespace agoq

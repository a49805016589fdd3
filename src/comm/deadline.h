// Deadline: the end of a wait for other ranks that nothing else gets back from.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "comm/launch.h"

namespace agoq {

/// While it lives, this rank waits for the others outside of what RankWatch sees (comm/rank_watch.h):
/// before all have met, while they look for their devices, at their end. Where it still waits after
/// `seconds`, and a turn of its own (turn_seconds(), comm/together.h), the process ends with exit status
/// 1 and a line that says "all others to `what`", and `advice`. One that has to leave others their turn
/// and was asked to stop (core/stop_signals.h) ends without a line.
///
/// Time in which the process was halted does not count, and the seconds begin anew behind it: the others
/// have waited for this one then, and not all of them may have gone on. One process waits for nobody.
class Deadline {
 public:
  Deadline(const Launch& launch, double seconds, const std::string& what, const std::string& advice);
  ~Deadline();
  Deadline(const Deadline&) = delete;
  Deadline& operator=(const Deadline&) = delete;

 private:
  void wait(double seconds, double turn, const std::string& line);

  std::mutex mutex_;
  std::condition_variable condition_;
  bool is_met_ = false;
  std::thread thread_;
};

}  // namespace agoq

// StopSignals: SIGTERM, SIGINT, SIGUSR1 and SIGHUP as requests to stop a run.
#pragma once

#include <csignal>

namespace agoq {

/// While one lives, these signals ask the run under way to stop, after its step or the micro-batch of a
/// validation, and end nothing by themselves. A SIGHUP that was ignored, as nohup has it, stays so.
///
/// They nest: what comes while the outermost lives is known until it dies.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// Whether one has come.
  static bool any();

 private:
  struct sigaction old_term_ {};
  struct sigaction old_int_ {};
  struct sigaction old_usr1_ {};
  struct sigaction old_hup_ {};
};

}  // namespace agoq

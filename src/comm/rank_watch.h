// RankWatch: notices a rank that has died, stands still or has failed, and ends all ranks within a set
// time with one line that names it.
//
// A thread of every rank sends a sign of life over TCP, to rank 0 and from rank 0 to everyone: ten in
// each timeout, and one per second at least. It carries what the rank is doing.
//
//   what happens to a rank               noticed by                   after
//   killed, crashed, exited              its connection closes        at once
//   stopped, machine or network down     no sign of life              0.8 of the timeout
//   fails by an Error                    it says so (run)             at once
//   fails by an Error that all throw     all say so                   at once
//   lives, and does not come             ranks that wait (LateError)  the timeout
//   ends regularly                       it says goodbye: no failure, the others go on
//
// Rank 0 watches the others and tells them to end. Rank 0 is watched by all others, of which one, the
// deputy, has connections to the rest and tells them to end; where both are lost at once the others
// take turns, 1.5 s each, so that the launcher ends the rest when one has said so. A process that is
// told to end leaves by _exit: whatever the main thread waits in (MPI, NCCL, a disk) cannot hold it. A
// long computation or a long save is no failure, since the thread goes on; a rank that lives but does
// not come to an exchange is noticed by the communicator's own deadline. A failure is reported when it
// has stood for .3 s, since a rank that is lost makes others fail.
//
// Invariant: the thread calls nothing but the kernel, and asks the communicator for a number. It uses
// neither MPI nor NCCL.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "core/error.h"

namespace agoq {

struct RankWatchOptions {
  double timeout_seconds = 60;  // from a failure to the end of all ranks; kShortest- to kLongestTimeout
  /// What the user is told to do; ends the line.
  std::string advice = "go on from the last checkpoint with --resume";
  std::string setting = "parallel.timeout_seconds";  // where the timeout is set
};

class RankWatch {
 public:
  /// Connects the ranks of `group`, which has to live as long. Collective. Throws Error (kInput) for a
  /// timeout that is too short or too long, and AgreedError (kFailure, comm/together.h) when a rank
  /// cannot reach rank 0 or the deputy, saying which. In a group of one there is nothing to watch: no
  /// thread, no socket.
  RankWatch(Communicator& group, const RankWatchOptions& options);
  /// Says goodbye; on rank 0, waits for the goodbyes of the others. When an exception unwinds the stack,
  /// the other ranks are told that this one has failed.
  ~RankWatch();
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  /// What this rank does from now on, for the line about it: "forward of step 12". Cheap: it takes an
  /// uncontended lock and allocates nothing. Cut after 95 characters.
  template <typename... Args>
  void doing(fmt::format_string<Args...> text, Args&&... args) {
    if (thread_ == nullptr) return;
    char activity[kLongestActivity + 1];
    const auto end = fmt::format_to_n(activity, kLongestActivity, text, std::forward<Args>(args)...);
    *end.out = '\0';
    set_activity(activity);
  }

  /// Runs `work`. What it throws ends all ranks with the error's exit status and one line: that of rank
  /// 0 for an AgreedError (comm/together.h) and what is not finite, which all ranks throw alike; the
  /// ranks that did not come for a LateError; and this rank with its text for anything else. In a group
  /// of one it is thrown on.
  void run(const std::function<void()>& work);

 private:
  static constexpr std::size_t kLongestActivity = 95;
  class Thread;

  void set_activity(const char* activity);

  std::unique_ptr<Thread> thread_;
  int exceptions_;  // in flight when this was made
};

}  // namespace agoq

// This process's place among the ranks that were launched with it, for commands that run on several.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "comm/communicator.h"
#include "comm/launch.h"
#include "comm/rank_watch.h"
#include "core/error.h"
#include "train/rank_agreement.h"
#include "train/run_config.h"

namespace agoq {

/// The settings of `config` that a communicator of its ranks is made with.
WorldOptions world_options(const RunConfig& config, const std::string& rendezvous_directory);

class ProcessRanks {
 public:
  /// Learns this process's place. Where its launcher's variables say none (launch_from_environment()),
  /// the process is alone, and together() refuses.
  ProcessRanks();

  int size() const { return launch_.size; }
  /// Rank 0 prints.
  bool leads() const { return launch_.rank == 0; }
  /// Whether the ranks can tell each other what is wrong before join(): MPI launched them, or there is
  /// one.
  bool can_speak() const { return launch_.launcher == Launcher::kMpi || launch_.size == 1; }
  /// For what works in one process: whether this is the one. Where there are several it is rank 0, which
  /// says so on stderr; `what` is the command.
  bool works_alone(const std::string& what) const;

  /// The command that this process runs, which has to be that of all of them, and those of its options
  /// that have to be the same on all and are no settings of a run (facts_of_run() compares these).
  void set_command(const std::string& command, std::vector<RankFact> options = {}) {
    command_ = command;
    options_ = std::move(options);
  }
  /// How long together(), join() and leave() wait for a rank that does not come, if it is longer than
  /// what ranks on a busy machine need to start: then this process ends with a line (comm/deadline.h).
  /// GPUs have two minutes more.
  void set_timeout(double seconds);
  /// Runs `work`, which may refuse what the ranks were given; the first time, meets the others. Where
  /// MPI launched them, it fails on all when it fails on one, with one line (comm/together.h); elsewhere
  /// one rank of a machine speaks for all to whom the same is wrong. Collective; before join().
  void together(const std::function<void()>& work);

  /// Takes the rank's device, the same kind on all, and its share of the machine's processors
  /// (`threads`, unless 0), and makes the ranks' communicator. Collective, behind a together(). Throws
  /// Error (kInput) where the ranks run different commands, or the same one with other devices or
  /// options, or this one has no such device.
  Backend& join(BackendKind device, const WorldOptions& options, std::int64_t threads);

  /// After join().
  Communicator& all() { return *ranks_; }
  /// Runs `work`, which all ranks do together after join(), and watches them meanwhile
  /// (comm/rank_watch.h): one that is lost, is late or fails ends all with one line. `doing` is what
  /// they do.
  void watched(const RankWatchOptions& options, const std::string& doing,
               const std::function<void()>& work);
  /// At the regular end of the command, when its output is printed, instead of the destructor alone: the
  /// others are waited for.
  void leave();

 private:
  /// `work` as together() runs it, when the others are met.
  void alike(const std::function<void()>& work);

  Launch launch_;
  std::optional<Error> unknown_;  // why launch_ is not known
  std::string command_;
  std::vector<RankFact> options_;
  double meeting_seconds_;
  std::unique_ptr<Communicator> hosts_;  // from the first together() to join()
  std::unique_ptr<Communicator> ranks_;
};

}  // namespace agoq

// This process's place among the ranks that were launched with it, for commands that run on several.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "comm/communicator.h"
#include "comm/launch.h"
#include "train/run_config.h"

namespace agoq {

/// The settings of `config` that a communicator of its ranks is made with.
WorldOptions world_options(const RunConfig& config, const std::string& rendezvous_directory);

class ProcessRanks {
 public:
  /// Learns this process's place and, where MPI launched it, meets the other ranks. Collective.
  ProcessRanks();

  /// Runs `work`, which may refuse what the ranks were given. Where MPI launched them, it fails on all
  /// when it fails on one, with one line (comm/together.h). Collective; before join().
  void together(const std::function<void()>& work);

  /// Takes the rank's device, the same kind on all, and its share of the machine's processors
  /// (`threads`, unless 0), and makes the ranks' communicator. Collective. Throws Error (kInput) where
  /// the ranks were told of different devices, or this one has none.
  Backend& join(BackendKind device, const WorldOptions& options, std::int64_t threads);

  /// After join().
  Communicator& all() { return *ranks_; }
  /// Rank 0 prints.
  bool leads() const { return launch_.rank == 0; }
  /// At the regular end of the command, instead of the destructor alone: the others are waited for.
  void leave();

 private:
  Launch launch_;
  std::unique_ptr<Communicator> hosts_;  // until the devices' communicator is there
  std::unique_ptr<Communicator> ranks_;
};

}  // namespace agoq

// This process's place among the ranks that were launched with it, for commands that run on several.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"
#include "comm/communicator.h"
#include "comm/launch.h"

namespace agoq {

class ProcessRanks {
 public:
  /// Takes the rank's device and its share of the machine's processors (`threads`, unless 0), and meets
  /// the other ranks. Collective. `directory`: one that all ranks see; it and `multiprocessors` are
  /// those of WorldOptions.
  ProcessRanks(Backend& backend, const std::string& directory, double timeout_seconds,
               std::int64_t threads, int multiprocessors = 0);

  Communicator& all() { return *ranks_; }
  /// Rank 0 prints.
  bool leads() const { return launch_.rank == 0; }
  /// At the regular end of the command, instead of the destructor alone: the others are waited for.
  void leave();

 private:
  Launch launch_;
  std::unique_ptr<Communicator> ranks_;
};

}  // namespace agoq

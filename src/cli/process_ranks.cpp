#include "cli/process_ranks.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>

namespace agoq {

ProcessRanks::ProcessRanks(Backend& backend, const std::string& directory, double timeout_seconds,
                           std::int64_t threads, int multiprocessors)
    : launch_(launch_from_environment()) {
  if (threads > 0) {
    omp_set_num_threads(static_cast<int>(threads));
  } else if (launch_.local_size > 1 && std::getenv("OMP_NUM_THREADS") == nullptr) {
    // Ranks of one machine share its processors.
    omp_set_num_threads(std::max(1, omp_get_num_procs() / launch_.local_size));
  }
  backend.use_device(launch_.local_rank);
  ranks_ = world(launch_, backend, {directory, timeout_seconds, multiprocessors});
}

void ProcessRanks::leave() {
  ranks_.reset();
  leave_world(launch_);
}

}  // namespace agoq

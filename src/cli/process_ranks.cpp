#include "cli/process_ranks.h"

#include <omp.h>

#include <algorithm>
#include <cstdlib>

#include "comm/together.h"
#include "train/rank_agreement.h"

namespace agoq {

WorldOptions world_options(const RunConfig& config, const std::string& rendezvous_directory) {
  return {rendezvous_directory, config.parallel.timeout_seconds, config.parallel.nccl_max_ctas,
          config.parallel.peer_copies};
}

ProcessRanks::ProcessRanks() : launch_(launch_from_environment()), hosts_(meet(launch_)) {}

void ProcessRanks::together(const std::function<void()>& work) { agoq::together(*hosts_, work); }

Backend& ProcessRanks::join(BackendKind device, const WorldOptions& options, std::int64_t threads) {
  // One communicator carries the data of one kind of device: ranks with another would wait for it.
  expect_agreement(*hosts_, {{"the device", device == BackendKind::kCpu ? "cpu" : "cuda"}});
  if (threads > 0) {
    omp_set_num_threads(static_cast<int>(threads));
  } else if (launch_.local_size > 1 && std::getenv("OMP_NUM_THREADS") == nullptr) {
    // Ranks of one machine share its processors.
    omp_set_num_threads(std::max(1, omp_get_num_procs() / launch_.local_size));
  }
  Backend* backend = nullptr;
  together([&] {
    backend = &backend_of(device);
    backend->use_device(launch_.local_rank);
  });
  ranks_ = world(launch_, *backend, options);
  hosts_.reset();
  return *backend;
}

void ProcessRanks::leave() {
  ranks_.reset();
  leave_world(launch_);
}

}  // namespace agoq

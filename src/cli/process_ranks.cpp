#include "cli/process_ranks.h"

#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "cli/build_info.h"
#include "comm/deadline.h"
#include "comm/together.h"
#include "train/progress.h"
#include "train/rank_agreement.h"

namespace agoq {

namespace {

// What ranks on a busy machine need to start.
constexpr double kShortestMeeting = 10;
// What drivers and libraries of GPUs may take to start, beyond that.
constexpr double kDeviceSeconds = 120;
constexpr const char* kAdvice = "look at what it printed, and start all again";

/// Which agoq this is, for the other ranks.
std::string program() { return fmt::format("{} {}", build_info().version, build_info().commit); }

}  // namespace

WorldOptions world_options(const RunConfig& config, const std::string& rendezvous_directory) {
  return {.rendezvous_directory = rendezvous_directory,
          .timeout_seconds = config.parallel.timeout_seconds,
          .nccl_max_ctas = config.parallel.nccl_max_ctas,
          .peer_copies = config.parallel.peer_copies};
}

ProcessRanks::ProcessRanks() : meeting_seconds_(WorldOptions{}.timeout_seconds) {
  try {
    launch_ = launch_from_environment();
  } catch (const Error& error) {
    unknown_ = error;
  }
}

bool ProcessRanks::works_alone(const std::string& what) const {
  if (launch_.size > 1 && leads()) {
    print_notice(fmt::format("{} works in one process: rank 0 of {} does, the others do nothing", what,
                             launch_.size));
  }
  return leads();
}

void ProcessRanks::set_timeout(double seconds) {
  meeting_seconds_ = std::max(seconds, kShortestMeeting);
}

void ProcessRanks::together(const std::function<void()>& work) {
  std::optional<Error> failure;
  try {
    work();
  } catch (const Error& error) {
    failure = error;
  }
  const auto fail = [&] {
    if (failure) throw Error(*failure);
  };
  if (hosts_ == nullptr) {
    try {
      if (unknown_) alike_on_a_machine(launch_, [&] { throw Error(*unknown_); });
      hosts_ = meet(launch_, program(), meeting_seconds_);
    } catch (const AgreedError&) {
      throw;
    } catch (const Error&) {
      fail();  // what was wrong first
      throw;
    }
  }
  const Deadline deadline(launch_, meeting_seconds_, "read what they were given", kAdvice);
  alike(fail);
}

void ProcessRanks::alike(const std::function<void()>& work) {
  can_speak() ? agoq::together(*hosts_, work) : alike_on_a_machine(launch_, work);
}

Backend& ProcessRanks::join(BackendKind device, const WorldOptions& options, std::int64_t threads) {
  // Ranks that do something else would exchange something else, and one communicator carries the data of
  // one kind of device: ranks with another would wait for it.
  {
    const Deadline deadline(launch_, meeting_seconds_, "say what they do", kAdvice);
    expect_agreement(*hosts_, {{"the command", command_},
                               {"the device", device == BackendKind::kCpu ? "cpu" : "cuda"}});
    // By themselves: another command has other ones.
    expect_agreement(*hosts_, options_, "start all of them with the same options");
  }
  if (threads > 0) {
    omp_set_num_threads(static_cast<int>(threads));
  } else if (launch_.local_size > 1 && std::getenv("OMP_NUM_THREADS") == nullptr) {
    // Ranks of one machine share its processors.
    omp_set_num_threads(std::max(1, omp_get_num_procs() / launch_.local_size));
  }
  const double device_seconds = device == BackendKind::kCuda ? kDeviceSeconds : 0;
  const Deadline deadline(launch_, meeting_seconds_ + device_seconds, "take their devices", kAdvice);
  Backend* backend = nullptr;
  alike([&] {
    backend = &backend_of(device);
    backend->use_device(launch_.local_rank);
  });
  WorldOptions of_program = options;
  of_program.program = program();
  ranks_ = world(launch_, *backend, of_program);
  hosts_.reset();
  return *backend;
}

void ProcessRanks::watched(const RankWatchOptions& options, const std::string& doing,
                           const std::function<void()>& work) {
  RankWatch watch(*ranks_, options);
  watch.doing("{}", doing);
  watch.run(work);
}

void ProcessRanks::leave() {
  // What the deadline would not.
  std::fflush(nullptr);
  const Deadline deadline(launch_, meeting_seconds_, "end", "what was saved and printed is complete");
  ranks_.reset();
  leave_world(launch_);
}

}  // namespace agoq

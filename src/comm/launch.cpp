#include "comm/launch.h"

#include <charconv>
#include <cstdlib>
#include <optional>

#include "comm/nccl_id_file.h"
#include "comm/transports.h"
#include "core/error.h"

namespace agoq {
namespace {

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

int number(const char* name) {
  const std::optional<std::string> text = variable(name);
  check_input(text.has_value(), "the launcher set no {}: start the ranks with mpirun, srun or torchrun",
              name);
  int value = -1;
  const char* const end = text->data() + text->size();
  const auto [stopped, failure] = std::from_chars(text->data(), end, value);
  check_input(failure == std::errc() && stopped == end && value >= 0,
              "{} must be a number of ranks; it is '{}': start the ranks with mpirun, srun or torchrun",
              name, *text);
  return value;
}

/// The variables in which a launcher tells a process its place.
struct Variables {
  Launcher launcher;
  const char* name;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
  const char* job;
};
// In this order: under mpirun within a Slurm job the variables of both are set, and srun sets those of
// the job step only for processes that it started.
constexpr Variables kLaunchers[] = {
    {Launcher::kMpi, "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_ess_base_jobid"},
    {Launcher::kEnvironment, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
     "TORCHELASTIC_RUN_ID"},
    {Launcher::kEnvironment, "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
     "SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID"},
};

/// All ranks, by MPI. One that does not understand the launcher leaves each process alone, and all of
/// them would train the same.
std::unique_ptr<Communicator> mpi_world(const Launch& launch, double timeout_seconds) {
  std::unique_ptr<Communicator> ranks = mpi_transport().world(timeout_seconds);
  check_input(ranks->size() == launch.size,
              "{} started {} ranks and {} finds {}: they do not work together; start the ranks with the "
              "mpirun of this MPI, or with srun --mpi=pmix where both were built for it",
              launch.name, launch.size, ranks->description(), ranks->size());
  return ranks;
}

}  // namespace

Launch launch_from_environment() {
  for (const Variables& of : kLaunchers) {
    if (!variable(of.size)) continue;
    Launch launch;
    launch.launcher = of.launcher;
    launch.name = of.name;
    launch.rank = number(of.rank);
    launch.size = number(of.size);
    launch.local_rank = number(of.local_rank);
    if (variable(of.local_size)) launch.local_size = number(of.local_size);
    launch.job = variable(of.job).value_or("");
    check_input(
        launch.size >= 1 && launch.rank < launch.size,
        "{} is {} and {} is {}: a rank is below the number of ranks; start the ranks with mpirun, "
        "srun or torchrun, or unset both",
        of.rank, launch.rank, of.size, launch.size);
    // srun --mpi=pmix: Open MPI finds its ranks there.
    if (of.launcher == Launcher::kEnvironment && variable("PMIX_RANK")) {
      launch.launcher = Launcher::kMpi;
      launch.name = "srun";
    }
    return launch;
  }
  return {};
}

std::unique_ptr<Communicator> meet(const Launch& launch) {
  if (launch.launcher != Launcher::kMpi) return single_rank();
  return mpi_world(launch, WorldOptions{}.timeout_seconds);
}

std::unique_ptr<Communicator> world(const Launch& launch, Backend& backend,
                                    const WorldOptions& options) {
  if (launch.launcher == Launcher::kNone) return single_rank();
  const bool on_gpus = backend.device_memory().has_value();
  const NcclOptions nccl_options{options.timeout_seconds, options.nccl_max_ctas, options.peer_copies};
  check_input(on_gpus || launch.launcher == Launcher::kMpi || launch.size == 1,
              "{} started {} ranks on CPUs, whose data go by MPI: start them with mpirun or srun "
              "--mpi=pmix, or set run.device=cuda",
              launch.name, launch.size);
  if (launch.launcher == Launcher::kMpi) {
    std::unique_ptr<Communicator> ranks = mpi_world(launch, options.timeout_seconds);
    if (!on_gpus) return ranks;
    NcclTransport& nccl = nccl_transport();
    const NcclId id = ranks->gather_values(ranks->rank() == 0 ? nccl.new_id() : NcclId{}).front();
    return nccl.join(id, ranks->rank(), ranks->size(), backend, nccl_options);
  }
  if (launch.size == 1) return single_rank();
  NcclTransport& nccl = nccl_transport();
  const NcclIdFile file(options.rendezvous_directory, launch, options.timeout_seconds);
  const NcclId id = launch.rank == 0 ? file.publish(nccl.new_id()) : file.wait();
  return nccl.join(id, launch.rank, launch.size, backend, nccl_options);
}

void leave_world(const Launch& launch) {
  if (launch.launcher == Launcher::kMpi) mpi_transport().leave();
}

}  // namespace agoq

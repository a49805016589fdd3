#include "comm/launch.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <optional>
#include <thread>

#include "comm/deadline.h"
#include "comm/greeting.h"
#include "comm/nccl_id_file.h"
#include "comm/together.h"
#include "comm/transports.h"
#include "core/checksum.h"
#include "core/error.h"

namespace agoq {
namespace {

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

/// The integer from `least` that the variable `name` holds, which a launcher sets with `other`.
int number(const char* name, const char* other, int least) {
  const std::optional<std::string> text = variable(name);
  check_input(text.has_value(),
              "{} is set and {} is not: a launcher sets both; start the ranks with mpirun, srun or "
              "torchrun, or unset {} for one process",
              other, name, other);
  int value = -1;
  const char* const end = text->data() + text->size();
  const auto [stopped, failure] = std::from_chars(text->data(), end, value);
  check_input(failure == std::errc() && stopped == end && value >= least,
              "{} must be an integer from {}; it is '{}': start the ranks with mpirun, srun or torchrun",
              name, least, *text);
  return value;
}

/// The rank on its machine: what runs processes by hand may well have set the other two alone.
int local_rank_of(const char* local_rank, const char* rank, const char* size) {
  check_input(variable(local_rank).has_value(),
              "{} and {} are set and {} is not: a launcher sets all three; start the ranks with mpirun, "
              "srun or torchrun, or set {} too, or unset {} and {} for one process",
              rank, size, local_rank, local_rank, rank, size);
  return number(local_rank, size, 0);
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
  /// Its batch scripts are process 0 of no number of ranks: what they start is one process. And
  /// local_size is what they were given, whatever a step of theirs has.
  bool has_batch_scripts = false;
};
constexpr Variables kMpirun{
    .launcher = Launcher::kMpi,
    .name = "mpirun",
    .rank = "OMPI_COMM_WORLD_RANK",
    .size = "OMPI_COMM_WORLD_SIZE",
    .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
    .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE",
    .job = "OMPI_MCA_ess_base_jobid",
};
constexpr Variables kTorchrun{
    .launcher = Launcher::kEnvironment,
    .name = "torchrun",
    .rank = "RANK",
    .size = "WORLD_SIZE",
    .local_rank = "LOCAL_RANK",
    .local_size = "LOCAL_WORLD_SIZE",
    .job = "TORCHELASTIC_RUN_ID",
};
constexpr Variables kSlurm{
    .launcher = Launcher::kEnvironment,
    .name = "Slurm",
    .rank = "SLURM_PROCID",
    .size = "SLURM_STEP_NUM_TASKS",
    .local_rank = "SLURM_LOCALID",
    .local_size = "SLURM_NTASKS_PER_NODE",
    .job = "SLURM_JOB_ID",
    .has_batch_scripts = true,
};
// In this order: under mpirun within a Slurm job the variables of both are set, and srun sets those of
// the job step only for processes that it started.
constexpr Variables kLaunchers[] = {kMpirun, kTorchrun, kSlurm};

/// Rank and number of ranks as the launchers of other MPIs say them: of MPICH and Intel MPI, and of
/// MVAPICH. What they start with one rank is one process.
struct OtherMpi {
  const char* rank;
  const char* size;
};
constexpr OtherMpi kOtherMpis[] = {{"PMI_RANK", "PMI_SIZE"},
                                   {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"}};

/// One of its variables is enough: a process that has a rank and does not know of how many would train
/// by itself what the others train too.
bool is_started_by(const Variables& of) {
  if (variable(of.size)) return true;
  const std::optional<std::string> rank = variable(of.rank);
  return rank && !(of.has_batch_scripts && *rank == "0");
}

/// What the first of the processes that one launcher has started on this machine says, when it says it:
/// a name (of Linux's abstract sockets, which leave no file) that it holds until its end and for a
/// second at least, in which those that come to the same text find it taken.
class FirstToSay {
 public:
  FirstToSay(const Launch& launch, const std::string& text) {
    const std::string name = fmt::format("agoq {} {} {} {:08x}", ::getuid(), ::getppid(),
                                         launch.job.substr(0, 40), checksum(text.data(), text.size()));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
    socket_ = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    // Where it cannot be known, twice is better than never.
    is_first_ = socket_ < 0 ||
                ::bind(socket_, reinterpret_cast<const sockaddr*>(&address), length) == 0 ||
                errno != EADDRINUSE;
  }
  ~FirstToSay() {
    if (is_first_) std::this_thread::sleep_until(start_ + std::chrono::seconds(1));
    if (socket_ >= 0) ::close(socket_);
  }
  FirstToSay(const FirstToSay&) = delete;
  FirstToSay& operator=(const FirstToSay&) = delete;
  bool is_first() const { return is_first_; }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  int socket_ = -1;
  bool is_first_ = true;
};

/// All ranks, by MPI. One that does not understand the launcher leaves each process alone, and all of
/// them would train the same.
std::unique_ptr<Communicator> mpi_world(const Launch& launch, double timeout_seconds) {
  MpiTransport* mpi = nullptr;
  alike_on_a_machine(launch, [&] { mpi = &mpi_transport(); });
  std::unique_ptr<Communicator> ranks = mpi->world(timeout_seconds);
  alike_on_a_machine(launch, [&] {
    check_input(
        ranks->size() == launch.size,
        "{} started {} ranks and {} finds {}: they do not work together; start the ranks with the "
        "mpirun of this MPI, or with srun --mpi=pmix where both were built for it",
        launch.name, launch.size, ranks->description(), ranks->size());
  });
  return ranks;
}

}  // namespace

bool launcher_forwards_output() { return variable(kMpirun.size).has_value(); }

Launch launch_from_environment() {
  for (const Variables& of : kLaunchers) {
    if (!is_started_by(of)) continue;
    Launch launch;
    launch.launcher = of.launcher;
    launch.name = of.name;
    launch.size = number(of.size, of.rank, 1);
    launch.rank = number(of.rank, of.size, 0);
    launch.local_rank = local_rank_of(of.local_rank, of.rank, of.size);
    if (variable(of.local_size)) {
      launch.local_size = number(of.local_size, of.size, 1);
      check_input(of.has_batch_scripts || launch.local_rank < launch.local_size,
                  "{} is {} and {} is {}: a rank is below the number of ranks; start the ranks with "
                  "mpirun, srun or torchrun, or unset {}",
                  of.local_rank, launch.local_rank, of.local_size, launch.local_size, of.local_size);
    }
    launch.job = variable(of.job).value_or("");
    check_input(
        launch.rank < launch.size,
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
  for (const auto& [rank, size] : kOtherMpis) {
    if (!variable(rank) && !variable(size)) continue;
    const std::string ranks = variable(size).value_or("an unknown number of");
    check_input(
        ranks == "1",
        "{} processes were started by the launcher of another MPI ({} is set, and no variable of "
        "Open MPI's is): start the ranks with Open MPI's mpirun, or unset {} for one process",
        ranks, variable(size) ? size : rank, variable(size) ? size : rank);
  }
  check_input(!variable("PMIX_RANK"),
              "PMIX_RANK is set, and no variable says of how many ranks: start the ranks with mpirun or "
              "srun --mpi=pmix, or unset PMIX_RANK for one process");
  return {};
}

void alike_on_a_machine(const Launch& launch, const std::function<void()>& work) {
  try {
    work();
  } catch (const AgreedError&) {
    throw;
  } catch (const Error& error) {
    // Until the process ends, and with it what it prints.
    static std::optional<FirstToSay> said;
    said.emplace(launch, error.what());
    if (said->is_first()) throw;
    throw AgreedError(error.kind(), "");
  }
}

std::unique_ptr<Communicator> meet(const Launch& launch, const std::string& program, double seconds) {
  if (launch.launcher != Launcher::kMpi) return single_rank();
  const Deadline deadline(launch, seconds, "come", "look at what it printed, and start all again");
  std::unique_ptr<Communicator> ranks = mpi_world(launch, WorldOptions{}.timeout_seconds);
  const Patience patience(*ranks);  // the deadline is that of all of it
  greet(*ranks, program);
  return ranks;
}

std::unique_ptr<Communicator> world(const Launch& launch, Backend& backend,
                                    const WorldOptions& options) {
  if (launch.launcher == Launcher::kNone) return single_rank();
  const bool on_gpus = backend.device_memory().has_value();
  const NcclOptions nccl_options{options.timeout_seconds, options.nccl_max_ctas, options.peer_copies};
  alike_on_a_machine(launch, [&] {
    check_input(on_gpus || launch.launcher == Launcher::kMpi || launch.size == 1,
                "{} started {} ranks on CPUs, whose data go by MPI: start them with mpirun or srun "
                "--mpi=pmix, or set run.device=cuda",
                launch.name, launch.size);
  });
  if (launch.launcher == Launcher::kMpi) {
    std::unique_ptr<Communicator> ranks = mpi_world(launch, options.timeout_seconds);
    if (!on_gpus) return ranks;
    NcclTransport* nccl = nullptr;
    NcclId id{};
    together(*ranks, [&] {
      nccl = &nccl_transport();
      if (ranks->rank() == 0) id = nccl->new_id();
    });
    return nccl->join(ranks->gather_values(id).front(), ranks->rank(), ranks->size(), backend,
                      nccl_options);
  }
  if (launch.size == 1) return single_rank();
  NcclTransport* nccl = nullptr;
  alike_on_a_machine(launch, [&] { nccl = &nccl_transport(); });
  const NcclIdFile file(options.rendezvous_directory, launch, options.program, options.timeout_seconds);
  const NcclId id = launch.rank == 0 ? file.publish(nccl->new_id()) : file.wait();
  return nccl->join(id, launch.rank, launch.size, backend, nccl_options);
}

void leave_world(const Launch& launch) {
  if (launch.launcher == Launcher::kMpi) mpi_transport().leave();
}

}  // namespace agoq

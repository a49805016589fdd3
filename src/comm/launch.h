// How this process was started among its ranks, and the communicator of all of them.
//
//   mpirun, srun --mpi=pmix    MPI: it carries the CPU ranks' data, and hands out NCCL's unique id
//   torchrun, srun             ranks in environment variables: GPU runs only; NCCL's unique id goes
//                              through a file in the shared run directory
//   neither                    one rank
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "comm/communicator.h"

namespace agoq {

enum class Launcher : std::uint8_t { kNone, kMpi, kEnvironment };

struct Launch {
  Launcher launcher = Launcher::kNone;
  std::string name = "one process";  // "mpirun", "torchrun", "Slurm"
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // among the ranks of this machine: the GPU it takes
  int local_size = 1;  // ranks of this machine, as far as the launcher says
  /// Tells this launch from an earlier one in the same directory: the launcher's job id.
  std::string job;
};

/// From the environment of this process. Throws Error (kInput) when its variables contradict each other,
/// or when only some of a launcher's are set.
Launch launch_from_environment();

/// Whether what this process prints goes through its launcher: mpirun gives every rank a terminal of its
/// own, wherever their lines end up.
bool launcher_forwards_output();

/// The ranks of `launch` before they have devices, for what they agree on first: all of them where MPI
/// launched them, elsewhere this one alone. Collective. Throws Error (kInput) where this build has no
/// MPI, or where not all of them run `program`, which names version and commit. Where one does not come
/// within `seconds`, since it has ended before or hangs, this process ends in here with a line that says
/// so, and exit status 1: MPI waits for it without end.
std::unique_ptr<Communicator> meet(const Launch& launch, const std::string& program, double seconds);

/// Runs `work` where ranks cannot speak with each other, and what is wrong may be wrong for many of
/// them: when it throws Error, the first process of a launch on this machine that comes to its text
/// throws it, and lives for a second from then; the others throw an AgreedError (comm/together.h)
/// without text.
void alike_on_a_machine(const Launch& launch, const std::function<void()>& work);

/// Of WorldOptions::timeout_seconds, the least: ranks on a busy machine are not held to be lost.
inline constexpr double kShortestTimeout = 1;
/// And the most, 11 days: what waits for a time counts it in nanoseconds, and a run that is lost has to
/// end.
inline constexpr double kLongestTimeout = 1e6;

/// Of WorldOptions::nccl_max_ctas: NCCL has at most so many channels.
inline constexpr int kMostCtas = 64;

struct WorldOptions {
  /// Where NCCL's unique id goes from rank to rank without MPI: a directory that all of them see.
  std::string rendezvous_directory = {};
  /// As for meet(), which ranks without MPI do through files.
  std::string program = {};
  double timeout_seconds = 60;  // of one exchange
  /// NCCL's maxCTAs: thread blocks of one of its kernels at most, each of which takes a multiprocessor
  /// of the GPU from the backward pass beside it. 0: as many as NCCL chooses.
  int nccl_max_ctas = 0;
  /// GPUs of one machine exchange through their copy engines, where each reaches the others' memory.
  bool peer_copies = true;
};

/// The communicator of all ranks of `launch`, for data in `backend`'s memory. Collective. Throws Error
/// (kInput) where this build, or this machine, lacks what the launch needs, with a text on one rank
/// alone, or one of each machine.
std::unique_ptr<Communicator> world(const Launch& launch, Backend& backend, const WorldOptions& options);

/// At the regular end of a process that had a world, when its communicators are gone. Collective. A
/// process that fails ends without it: the launcher then ends the other ranks.
void leave_world(const Launch& launch);

}  // namespace agoq

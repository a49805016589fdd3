#include "comm/launch.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <thread>

#include "comm/deadline.h"
#include "core/error.h"
#include "core/stop_signals.h"
#include "core/temporary_folder.h"

namespace agoq {
namespace {

using Variables = std::map<std::string, std::string>;

/// What this process learns where these variables alone are set, of those that launchers set.
class Environment {
 public:
  explicit Environment(const Variables& variables) {
    for (const char* name : {"OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "OMPI_MCA_ess_base_jobid",
                             "RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "LOCAL_WORLD_SIZE",
                             "TORCHELASTIC_RUN_ID",
                             "SLURM_PROCID",
                             "SLURM_STEP_NUM_TASKS",
                             "SLURM_LOCALID",
                             "SLURM_NTASKS_PER_NODE",
                             "SLURM_JOB_ID",
                             "PMIX_RANK",
                             "PMI_RANK",
                             "PMI_SIZE",
                             "MV2_COMM_WORLD_RANK",
                             "MV2_COMM_WORLD_SIZE"}) {
      const char* const value = std::getenv(name);
      if (value != nullptr) before_[name] = value;
      unsetenv(name);
    }
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
    variables_ = variables;
  }
  ~Environment() {
    for (const auto& [name, value] : variables_) unsetenv(name.c_str());
    for (const auto& [name, value] : before_) setenv(name.c_str(), value.c_str(), 1);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  Variables variables_, before_;
};

void expect_refused(const Variables& variables, const std::string& text) {
  const Environment environment(variables);
  try {
    const Launch launch = launch_from_environment();
    ADD_FAILURE() << "taken for rank " << launch.rank << " of " << launch.size << ", by " << launch.name;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
  }
}

TEST(Launch, OneProcessHasNoLauncher) {
  const Environment environment(Variables{});
  const Launch launch = launch_from_environment();
  EXPECT_EQ(launch.launcher, Launcher::kNone);
  EXPECT_EQ(launch.size, 1);
  EXPECT_FALSE(launcher_forwards_output());
}

TEST(Launch, TakesWhatEachLauncherSets) {
  const auto expect_launch = [](const Variables& variables, Launcher launcher, const std::string& name,
                                bool forwards) {
    const Environment environment(variables);
    const Launch launch = launch_from_environment();
    EXPECT_EQ(launch.launcher, launcher) << name;
    EXPECT_EQ(launch.name, name);
    EXPECT_EQ(launch.rank, 5) << name;
    EXPECT_EQ(launch.size, 8) << name;
    EXPECT_EQ(launch.local_rank, 1) << name;
    EXPECT_EQ(launch.local_size, 4) << name;
    EXPECT_EQ(launcher_forwards_output(), forwards) << name;
  };
  expect_launch({{"OMPI_COMM_WORLD_RANK", "5"},
                 {"OMPI_COMM_WORLD_SIZE", "8"},
                 {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                 {"SLURM_PROCID", "0"}},  // within a Slurm job
                Launcher::kMpi, "mpirun", true);
  expect_launch({{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}},
                Launcher::kEnvironment, "torchrun", false);
  const Variables slurm{{"SLURM_PROCID", "5"},
                        {"SLURM_STEP_NUM_TASKS", "8"},
                        {"SLURM_LOCALID", "1"},
                        {"SLURM_NTASKS_PER_NODE", "4"}};
  expect_launch(slurm, Launcher::kEnvironment, "Slurm", false);
  Variables pmix = slurm;
  pmix["PMIX_RANK"] = "5";
  expect_launch(pmix, Launcher::kMpi, "srun", false);
}

// It would train alone, and so would all the others.
TEST(Launch, RefusesAHalfSetEnvironment) {
  expect_refused({{"RANK", "0"}}, "RANK is set and WORLD_SIZE is not");
  expect_refused({{"WORLD_SIZE", "2"}}, "WORLD_SIZE is set and RANK is not");
  expect_refused(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}},
      "RANK and WORLD_SIZE are set and LOCAL_RANK is not: a launcher sets all three; start the "
      "ranks with mpirun, srun or torchrun, or set LOCAL_RANK too, or unset RANK and WORLD_SIZE "
      "for one process");
  expect_refused({{"PMIX_RANK", "0"}}, "PMIX_RANK is set, and no variable says of how many ranks");
  expect_refused({{"OMPI_COMM_WORLD_RANK", "1"}},
                 "OMPI_COMM_WORLD_RANK is set and OMPI_COMM_WORLD_SIZE is not");
  expect_refused({{"OMPI_COMM_WORLD_SIZE", "2"}},
                 "OMPI_COMM_WORLD_SIZE is set and OMPI_COMM_WORLD_RANK is not");
  expect_refused({{"SLURM_STEP_NUM_TASKS", "2"}}, "SLURM_STEP_NUM_TASKS is set and SLURM_PROCID is not");
  expect_refused({{"SLURM_PROCID", "1"}}, "SLURM_PROCID is set and SLURM_STEP_NUM_TASKS is not");
}

TEST(Launch, ASlurmBatchScriptIsOneProcess) {
  const Environment environment({{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_JOB_ID", "7"}});
  EXPECT_EQ(launch_from_environment().launcher, Launcher::kNone);
}

TEST(Launch, RefusesNumbersThatAreNone) {
  expect_refused({{"RANK", "one"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}},
                 "RANK must be an integer from 0; it is 'one'");
  expect_refused({{"RANK", "-1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}},
                 "RANK must be an integer from 0; it is '-1'");
  expect_refused({{"RANK", "0"}, {"WORLD_SIZE", "0"}, {"LOCAL_RANK", "0"}},
                 "WORLD_SIZE must be an integer from 1; it is '0'");
  expect_refused({{"RANK", "2"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "0"}},
                 "RANK is 2 and WORLD_SIZE is 2: a rank is below the number of ranks");
  expect_refused({{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "2"}, {"LOCAL_WORLD_SIZE", "2"}},
                 "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE is 2: a rank is below the number of ranks");
  // A job of one task per node, and a step that has them all on one.
  const Environment step({{"SLURM_PROCID", "2"},
                          {"SLURM_STEP_NUM_TASKS", "4"},
                          {"SLURM_LOCALID", "2"},
                          {"SLURM_NTASKS_PER_NODE", "1"}});
  EXPECT_EQ(launch_from_environment().local_rank, 2);
}

// MPICH, Intel MPI and MVAPICH: agoq's ranks meet by Open MPI, which would leave each process alone.
TEST(Launch, RefusesTheLauncherOfAnotherMpi) {
  for (const std::string mpi : {"PMI", "MV2_COMM_WORLD"}) {
    SCOPED_TRACE(mpi);
    expect_refused({{mpi + "_RANK", "0"}, {mpi + "_SIZE", "2"}}, "2 processes were started by the ");
    expect_refused({{mpi + "_SIZE", "2"}}, mpi + "_SIZE is set");
    expect_refused({{mpi + "_RANK", "0"}}, "of another MPI (" + mpi + "_RANK is set");
    const Environment one(Variables{{mpi + "_RANK", "0"}, {mpi + "_SIZE", "1"}});
    EXPECT_EQ(launch_from_environment().launcher, Launcher::kNone);
  }
}

/// What the ranks of a machine print that come to these texts, each in a process of its own, begun a
/// tenth of a second after the one before it.
std::string printed_by_ranks(const std::vector<std::string>& texts) {
  const TemporaryFolder folder;
  for (std::size_t r = 0; r < texts.size(); ++r) {
    if (fork() != 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      continue;
    }
    Launch launch;
    launch.launcher = Launcher::kEnvironment;
    launch.size = static_cast<int>(texts.size());
    launch.rank = launch.local_rank = static_cast<int>(r);
    try {
      alike_on_a_machine(launch, [&] {
        if (!texts[r].empty()) fail_input("{}", texts[r]);
      });
    } catch (const Error& error) {
      std::ofstream(folder.path("printed"), std::ios::app)
          << error.what() << (*error.what() ? "\n" : "");
      std::exit(error.kind() == ErrorKind::kInput ? 2 : 1);
    }
    std::exit(0);
  }
  for (const std::string& text : texts) {
    int status = 0;
    wait(&status);
    EXPECT_TRUE(WIFEXITED(status)) << text;
  }
  std::ifstream file(folder.path("printed"));
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Ranks of torchrun or srun, which cannot speak with each other yet: one line of each machine, whichever
// ranks of it have come to the error.
TEST(Launch, WhatIsWrongForRanksOfAMachineIsSaidOnce) {
  EXPECT_EQ(printed_by_ranks({"unknown key", "unknown key", "unknown key"}), "unknown key\n");
  EXPECT_EQ(printed_by_ranks({"", "no such file", ""}), "no such file\n");
  EXPECT_EQ(printed_by_ranks({"no GPU 0", "no GPU 1", "no GPU 0"}), "no GPU 0\nno GPU 1\n");
  // What was said is forgotten with those who said it.
  EXPECT_EQ(printed_by_ranks({"unknown key", "unknown key"}), "unknown key\n");
  EXPECT_EQ(printed_by_ranks({"", ""}), "");
}

// The others may have been halted with it, or have ended because of it: what it would say is not so.
TEST(Deadline, BeginsAnewBehindAHalt) {
  const TemporaryFolder folder;
  const pid_t pid = fork();
  if (pid == 0) {
    [[maybe_unused]] FILE* const stream = freopen(folder.path("stderr").c_str(), "a", stderr);
    Launch launch;
    launch.size = 2;
    const Deadline deadline(launch, 3, "come", "start again");
    for (;;) ::pause();
  }
  const auto sleep = [](double seconds) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  };
  int status = 0;
  sleep(0.5);
  kill(pid, SIGSTOP);
  sleep(4);
  kill(pid, SIGCONT);
  sleep(1.5);
  EXPECT_EQ(waitpid(pid, &status, WNOHANG), 0) << "it has spoken for a time in which it was halted";
  sleep(2.5);
  const pid_t ended = waitpid(pid, &status, WNOHANG);
  if (ended == 0) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  ASSERT_EQ(ended, pid) << "it waits without end";
  EXPECT_EQ(WEXITSTATUS(status), 1);
  std::ifstream file(folder.path("stderr"));
  const std::string printed{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  EXPECT_EQ(printed,
            "agoq: rank 0 of 2 has waited 3 s for all others to come, and not all of them have: one has "
            "ended before or hangs; start again\n");
}

// A launcher ends the ranks behind one that has spoken, and may leave them longer than their turn is.
TEST(Deadline, SaysNothingWhereARankBeforeItHasAndTheLauncherAsksItToStop) {
  for (const int rank : {0, 1}) {
    const TemporaryFolder folder;
    const pid_t pid = fork();
    if (pid == 0) {
      [[maybe_unused]] FILE* const stream = freopen(folder.path("stderr").c_str(), "a", stderr);
      const StopSignals signals;
      Launch launch;
      launch.size = 2;
      launch.rank = rank;
      const Deadline deadline(launch, 1, "come", "start again");
      std::ofstream(folder.path("waits")).close();
      for (;;) ::pause();
    }
    while (!std::filesystem::exists(folder.path("waits"))) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    kill(pid, SIGTERM);
    int status = 0;
    waitpid(pid, &status, 0);
    EXPECT_EQ(WEXITSTATUS(status), 1);
    std::ifstream file(folder.path("stderr"));
    const std::string printed{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    EXPECT_EQ(printed.empty(), rank == 1) << printed;
  }
}

}  // namespace
}  // namespace agoq

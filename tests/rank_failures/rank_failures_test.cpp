// The program on several ranks, of which one is killed, stopped or started otherwise than the rest: all
// end in time and say why, and the run goes on from its last checkpoint as if nothing had been.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "core/temporary_folder.h"

namespace {

namespace fs = std::filesystem;
using agoq::TemporaryFolder;
using Clock = std::chrono::steady_clock;

constexpr double kTimeout = 3;  // parallel.timeout_seconds
// mpirun waits a second before it kills what does not end, and the machine may be busy.
constexpr double kMargin = 4;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}
void sleep_a_little() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

struct RankGroup {
  int ranks;
  std::string arguments;
  std::string program = AGOQ_PROGRAM;
  std::string directory = {};  // that its ranks start in; not given: this process's
};

/// mpirun with the ranks that it starts.
class RankProcesses {
 public:
  explicit RankProcesses(const std::vector<RankGroup>& groups, const std::string& options = "") {
    std::string command = "exec " AGOQ_MPIRUN " --oversubscribe " + options;
    std::string separator;
    for (const RankGroup& group : groups) {
      command += fmt::format("{} -np {} ", separator, group.ranks);
      if (!group.directory.empty()) command += fmt::format("--wdir {} ", group.directory);
      command += fmt::format("{} {}", group.program, group.arguments);
      separator = " :";
    }
    mpirun_ = fork();
    if (mpirun_ == 0) {
      for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
                               "OMPI_MCA_mpi_yield_when_idle"}) {
        setenv(name, "1", 1);
      }
      setenv("HWLOC_COMPONENTS", "-gl", 1);  // or it may start seconds later (docs/ranks.md)
      [[maybe_unused]] FILE* streams[] = {freopen(folder_.path("out").c_str(), "w", stdout),
                                          freopen(folder_.path("error").c_str(), "w", stderr)};
      execl("/bin/sh", "sh", "-c", command.c_str(), static_cast<char*>(nullptr));
      _exit(127);
    }
  }
  ~RankProcesses() {
    if (mpirun_ == 0) return;
    for (const auto& [rank, pid] : ranks()) kill(pid, SIGKILL);
    kill(mpirun_, SIGKILL);
    waitpid(mpirun_, nullptr, 0);
  }
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  /// The exit status, -1 after a signal; nothing if it has not ended within `seconds`.
  std::optional<int> wait(double seconds) {
    const Clock::time_point start = Clock::now();
    do {
      int status = 0;
      if (waitpid(mpirun_, &status, WNOHANG) == mpirun_) {
        mpirun_ = 0;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      }
      sleep_a_little();
    } while (seconds_since(start) < seconds);
    return std::nullopt;
  }

  /// The ranks that mpirun has as children, by their number.
  std::vector<std::pair<int, pid_t>> ranks() const {
    std::vector<std::pair<int, pid_t>> found;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const std::string name = entry.path().filename();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      const std::string stat = read_file(entry.path() / "stat");
      const std::size_t end = stat.rfind(')');
      int parent = 0;
      if (end == std::string::npos || sscanf(stat.c_str() + end + 1, " %*c %d", &parent) != 1) continue;
      if (parent != mpirun_) continue;
      const std::string environment = read_file(entry.path() / "environ");
      const std::string key = "OMPI_COMM_WORLD_RANK=";
      const std::size_t at = environment.find(key);
      if (at == std::string::npos) continue;
      found.emplace_back(std::stoi(environment.substr(at + key.size())), std::stoi(name));
    }
    return found;
  }
  pid_t pid(int rank) const {
    for (const auto& [number, pid] : ranks()) {
      if (number == rank) return pid;
    }
    return 0;
  }

  /// To mpirun itself.
  void signal(int number) const { kill(mpirun_, number); }

  std::string out() const { return read_file(folder_.path("out")); }
  std::string error() const { return read_file(folder_.path("error")); }
  /// The lines that agoq has written to stderr.
  std::vector<std::string> lines() const {
    std::vector<std::string> found;
    std::ifstream file(folder_.path("error"));
    for (std::string line; std::getline(file, line);) {
      if (line.rfind("agoq: ", 0) == 0) found.push_back(line);
    }
    return found;
  }

 private:
  TemporaryFolder folder_;
  pid_t mpirun_ = 0;
};

/// The program, whose process lives and comes to no end of that call (hanging_mpi.cpp).
std::string hanging_in(const std::string& call, const std::string& more = "") {
  return fmt::format("env AGOQ_MPI_MODULE={} AGOQ_TEST_HANG='{}' {} {}", AGOQ_HANGING_MPI, call, more,
                     AGOQ_PROGRAM);
}

/// When a rank gets a signal.
struct Moment {
  std::string activity;  // of the rank, as a regular expression
  std::function<bool(const fs::path& run)> has_come = {};
  /// Or in a call of MPI's, the first behind which the run directory holds `when`.
  std::string call = {};
  std::string when = {};
};

struct StepMetrics {
  int step = 0;
  double loss = 0;
  long valid_tokens = 0;
};

class RankFailures : public testing::Test {
 protected:
  static constexpr int kSteps = 30;

  void SetUp() override {
    std::string text;
    for (int i = 0; i < 3000; ++i) text += fmt::format("{} squared is {}. ", i, i * i);
    for (int d = 0; d < 10; ++d)
      folder_.write(fmt::format("text/{}.txt", d), text.substr(997 * d, 9000));
  }

  std::string arguments(const std::string& run, const std::string& more = "") const {
    std::string all = fmt::format("train {} --json", AGOQ_CONFIG);
    const std::vector<std::string> settings{"data.paths=" + folder_.path("text"),
                                            "data.extensions=.txt",
                                            "data.holdout_every=5",
                                            "data.holdout_index=2",
                                            "run.directory=" + folder_.path(run),
                                            "run.threads=1",
                                            fmt::format("train.steps={}", kSteps),
                                            "optimizer.warmup_steps=2",
                                            "train.micro_batches=6",
                                            "train.micro_batch=2",
                                            "train.sequence=64",
                                            "train.validate_every=0",
                                            "train.validation_batches=1",
                                            "model.layers=2",
                                            "model.hidden=128",
                                            "model.heads=2",
                                            "model.kv_heads=1",
                                            "model.feed_forward=352",
                                            "checkpoint.every=2",
                                            "checkpoint.keep=2",
                                            fmt::format("parallel.timeout_seconds={}", kTimeout)};
    for (const std::string& setting : settings) all += " --set " + setting;
    return all + " " + more;
  }
  std::string last_state(const std::string& run) const {
    const fs::path directory =
        fs::path(folder_.path(run)) / "checkpoints" / fmt::format("step-{}", kSteps);
    return read_file(directory / "manifest.json") + read_file(directory / "model.safetensors") +
           read_file(directory / "state.safetensors");
  }

  /// Of every step that the run's metrics.jsonl holds, in its order.
  std::vector<StepMetrics> metrics_of(const std::string& run) const {
    std::vector<StepMetrics> found;
    std::ifstream file(folder_.path(run) + "/metrics.jsonl");
    const std::regex step("\\{\"step\":([0-9]+),\"loss\":([^,]+),.*\"valid_tokens\":([0-9]+),.*");
    std::smatch match;
    for (std::string line; std::getline(file, line);) {
      if (!std::regex_match(line, match, step)) continue;  // a validation
      found.push_back({std::stoi(match[1]), std::stod(match[2]), std::stol(match[3])});
    }
    return found;
  }

  /// Sends rank `rank` of three a signal at that moment; then all end, a line names it, and the run
  /// resumes to what an uninterrupted one comes to.
  void expect_survived(int rank, int signal, const Moment& moment) {
    SCOPED_TRACE(fmt::format("rank {} gets signal {} in {}", rank, signal, moment.activity));
    const fs::path run = folder_.path("run"), hangs = folder_.path("hangs");
    fs::remove_all(run);
    fs::remove(hangs);
    std::string program = AGOQ_PROGRAM;
    if (!moment.call.empty()) {
      program = hanging_in(moment.call, fmt::format("AGOQ_TEST_HANG_WHEN={}/{} AGOQ_TEST_HANGS={}",
                                                    run.string(), moment.when, hangs.string()));
    }
    {
      std::vector<RankGroup> groups;
      for (int r = 0; r < 3; ++r) {
        groups.push_back({1, arguments("run"), r == rank ? program : AGOQ_PROGRAM});
      }
      RankProcesses processes(groups);
      const Clock::time_point start = Clock::now();
      const auto has_come = [&] {
        return moment.call.empty() ? moment.has_come(run) : fs::exists(hangs);
      };
      while (!has_come() && seconds_since(start) < 60) sleep_a_little();
      const pid_t pid = processes.pid(rank);
      ASSERT_NE(pid, 0) << processes.error();
      // The others have heard what it does.
      if (!moment.call.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(500));
      ASSERT_EQ(kill(pid, signal), 0);
      const Clock::time_point sent = Clock::now();
      const std::optional<int> status = processes.wait(kTimeout + kMargin);
      ASSERT_TRUE(status.has_value()) << "the ranks have not ended: " << processes.error();
      EXPECT_NE(*status, 0);
      EXPECT_LT(seconds_since(sent), kTimeout + kMargin);
      const std::string error = processes.error();
      const std::regex line(
          fmt::format("(^|\n)agoq: rank {} of 3 \\(host [^ ]+, pid {}\\) [^\n]*(is gone|no sign of "
                      "life)[^\n]*, last in {}; all ranks end: [^\n]*--resume",
                      rank, pid, moment.activity));
      EXPECT_TRUE(std::regex_search(error, line)) << error;
      EXPECT_EQ(processes.lines().size(), 1u) << error;
    }
    RankProcesses resumed({{3, arguments("run", "--resume")}});
    EXPECT_EQ(resumed.wait(120), 0) << resumed.error();
    EXPECT_EQ(resumed.lines(), std::vector<std::string>{});
    EXPECT_TRUE(last_state("run") == last_state("straight"));
  }
  void run_straight() {
    RankProcesses straight({{3, arguments("straight")}});
    ASSERT_EQ(straight.wait(120), 0) << straight.error();
    ASSERT_GT(last_state("straight").size(), 1000u);
  }

  TemporaryFolder folder_;
};

/// Somewhere in a step.
const Moment kInAStep{"[^\n]*", [](const fs::path& run) {
                        const std::string metrics = read_file(run / "metrics.jsonl");
                        return std::count(metrics.begin(), metrics.end(), '\n') >= 9;
                      }};
/// While the others have sent their pieces of the gradients and wait for this rank's.
const Moment kInTheAllToAll{"(forward and backward|the exchange of gradients and the update) of step 9",
                            {},
                            "MPI_Isend",
                            "checkpoints/step-8"};
/// While the others have written their parts, or are about to.
const Moment kInASave{"saving step 10", {}, "MPI_Iallgather", "checkpoints/.step-10.tmp"};

TEST_F(RankFailures, AKilledRankEndsAll) {
  run_straight();
  expect_survived(0, SIGKILL, kInAStep);
  expect_survived(1, SIGKILL, kInTheAllToAll);
  expect_survived(2, SIGKILL, kInASave);
}

TEST_F(RankFailures, AStoppedRankEndsAll) {
  run_straight();
  expect_survived(0, SIGSTOP, kInAStep);
  expect_survived(2, SIGSTOP, kInTheAllToAll);
  expect_survived(1, SIGSTOP, kInASave);
}

// With nothing quantised it is the order of sums alone that the number of ranks changes, and that of
// sequences to a micro-batch; and the learning rate is the same whatever train.steps is.
TEST_F(RankFailures, AnotherNumberOfRanksGoesOn) {
  std::string settings;
  for (const char* setting :
       {"model.dtype=fp32", "activations.policy=keep", "gradients.format=fp32", "optimizer.master=none",
        "optimizer.moments_8bit=false", "optimizer.final_fraction=1"}) {
    settings += fmt::format("--set {} ", setting);
  }
  const auto cut = [&](int micro_batches, int sequences) {
    return fmt::format("{} --set train.micro_batches={} --set train.micro_batch={}", settings,
                       micro_batches, sequences);
  };
  RankProcesses straight({{3, arguments("straight", cut(5, 2))}});
  ASSERT_EQ(straight.wait(120), 0) << straight.error();
  settings = cut(10, 1);
  // The state after 6 steps of three ranks, read and written by two, one and four: the optimizer's share
  // changes hands.
  settings += " --set parallel.shard_optimizer=true ";
  for (const auto& [ranks, steps] : {std::pair{3, 6}, {2, 10}, {1, 12}, {4, kSteps}}) {
    RankProcesses others({{ranks, arguments("run", fmt::format("{} {} --set train.steps={}", settings,
                                                               ranks == 3 ? "" : "--resume", steps))}});
    ASSERT_EQ(others.wait(60), 0) << others.error();
  }
  const std::vector<StepMetrics> expected = metrics_of("straight"), found = metrics_of("run");
  ASSERT_EQ(expected.size(), std::size_t{kSteps});
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    SCOPED_TRACE(fmt::format("step {}", i + 1));
    EXPECT_EQ(found[i].step, expected[i].step);
    EXPECT_EQ(found[i].valid_tokens, expected[i].valid_tokens);
    EXPECT_NEAR(found[i].loss, expected[i].loss, 1e-6 * expected[i].loss);
  }
}

TEST_F(RankFailures, RanksThatDifferAreToldSoBeforeTheyStart) {
  const auto expect_refused = [&](const std::string& second, const std::string& text) {
    RankProcesses processes({{1, arguments("run")}, {2, arguments("run", second)}});
    EXPECT_EQ(processes.wait(20), 2) << processes.error();
    ASSERT_EQ(processes.lines().size(), 1u) << processes.error();
    EXPECT_NE(processes.lines().front().find(text), std::string::npos) << processes.error();
    EXPECT_FALSE(fs::exists(folder_.path("run") + "/config.toml"));
    EXPECT_FALSE(fs::exists(folder_.path("run") + "/metrics.jsonl"));
  };
  expect_refused("--set train.steps=17",
                 fmt::format("train.steps is {} on rank 0 and 17 on ranks 1 and 2", kSteps));
  expect_refused("--resume", "how the run starts is no option on rank 0 and --resume on ranks 1 and 2");
  expect_refused("--set run.directory=" + folder_.path("other"), "run.directory is ");
  expect_refused("--set data.paths=" + folder_.path("absent"), "data.paths is ");
}

// As on machines with a disk each: the path is the same, and what lies there is not.
TEST_F(RankFailures, RanksWithDifferentTextsAreToldSo) {
  for (const char* machine : {"a", "b"}) {
    fs::create_directories(folder_.path(machine));
    fs::copy(folder_.path("text"), folder_.path(fmt::format("{}/text", machine)));
  }
  const std::string settings = arguments("run", "--set data.paths=text --set train.steps=2");
  const auto start = [&] {
    return std::vector<RankGroup>{{1, settings, AGOQ_PROGRAM, folder_.path("a")},
                                  {2, settings, AGOQ_PROGRAM, folder_.path("b")}};
  };
  // Of the same size.
  std::string text = read_file(folder_.path("b/text/3.txt"));
  text[500] ^= 1;
  folder_.write("b/text/3.txt", text);
  {
    RankProcesses processes(start());
    EXPECT_EQ(processes.wait(20), 2) << processes.error();
    ASSERT_EQ(processes.lines().size(), 1u) << processes.error();
    const std::regex line(
        "agoq: the ranks do not agree: the text at data.paths is ([0-9]+ documents of [0-9]+ bytes) "
        "with "
        "the CRC-32 [^ ]+ on rank 0 and \\1 with the CRC-32 [^ ]+ on ranks 1 and 2; [^;]*");
    EXPECT_TRUE(std::regex_match(processes.lines().front(), line)) << processes.error();
    EXPECT_FALSE(fs::exists(folder_.path("run") + "/config.toml"));
    EXPECT_FALSE(fs::exists(folder_.path("run") + "/metrics.jsonl"));
  }
  text[500] ^= 1;
  folder_.write("b/text/3.txt", text);
  RankProcesses same(start());
  EXPECT_EQ(same.wait(60), 0) << same.error();
}

// Before the ranks have a communicator of their devices, which a GPU's would wait for until it is late.
TEST_F(RankFailures, RanksWithDifferentDevicesAreToldSo) {
  for (const auto& [first, second] : {std::pair{"cpu", "cuda"}, std::pair{"cuda", "cpu"}}) {
    RankProcesses processes({{1, arguments("run", fmt::format("--set run.device={}", first))},
                             {2, arguments("run", fmt::format("--set run.device={}", second))}});
    EXPECT_EQ(processes.wait(20), 2) << processes.error();
    ASSERT_EQ(processes.lines().size(), 1u) << processes.error();
    const std::string text =
        fmt::format("the device is {} on rank 0 and {} on ranks 1 and 2", first, second);
    EXPECT_NE(processes.lines().front().find(text), std::string::npos) << processes.error();
    EXPECT_FALSE(fs::exists(folder_.path("run") + "/config.toml"));
  }
}

TEST_F(RankFailures, BadInputOfAllRanksIsOneLine) {
  folder_.write("broken.toml", "[model]\nhidden = = 3\n");
  folder_.write("unknown.toml", "[model]\nhiden = 128\n");
  const auto expect_line = [&](const std::string& command, const std::string& text) {
    RankProcesses processes({{4, command}});
    EXPECT_EQ(processes.wait(20), 2) << processes.error();
    ASSERT_EQ(processes.lines().size(), 1u) << processes.error();
    EXPECT_NE(processes.lines().front().find(text), std::string::npos) << processes.error();
  };
  expect_line("trian", "unknown command 'trian'; did you mean train?");
  expect_line("train", "CONFIG is required");
  expect_line("eval --frob", "eval: ");
  expect_line("fidelity", "RUN is required");
  expect_line("fidelity " + folder_.path("absent"), "absent holds no run");
  expect_line("eval " + folder_.path("absent"), "absent");
  expect_line("bench stop", "'agoq bench stop' was given");
  expect_line("bench comm --elements 5", "--elements is a multiple of 4096");
  expect_line("bench comm --timeout 0", "--timeout is from 1 to 1000000 s; 0 was given");
  expect_line("bench comm --timeout 1e10", "--timeout is from 1 to 1000000 s; 10000000000 was given");
  expect_line("bench comm --device gpu", "--device is cpu or cuda");
  expect_line(std::string("bench step ") + AGOQ_CONFIG + " --set parallel.ranks=2",
              "parallel.ranks is 2 and 4 ranks were launched: launch 2");
  expect_line(std::string("bench step ") + AGOQ_CONFIG + " --steps 0", "--steps is from 1 to");
  expect_line(arguments("run", "--set parallel.ranks=1"),
              "agoq: parallel.ranks is 1 and 4 ranks were launched: launch 1");
  expect_line(arguments("run", "--set parallel.timeout_seconds=0.5"),
              "parallel.timeout_seconds must be a number from 1 to 1000000, not 0.5");
  expect_line(arguments("run", "--set parallel.timeout_seconds=1e300"),
              "parallel.timeout_seconds must be a number from 1 to 1000000, not 1e+300");
  expect_line("train " + folder_.path("broken.toml"), "broken.toml");
  expect_line("train " + folder_.path("unknown.toml"), "unknown key model.hiden; did you mean hidden?");
  expect_line("train " + folder_.path("absent.toml"), "absent.toml");
  expect_line("bench step " + folder_.path("unknown.toml"),
              "unknown key model.hiden; did you mean hidden?");
  expect_line(arguments("run", "--set parallel.nccl_max_ctas=65"),
              "parallel.nccl_max_ctas must be an integer from 0 to 64");
  expect_line(arguments("run", "--resume --overwrite"), "give one of them");
}

// The others have read theirs, and are waiting.
TEST_F(RankFailures, BadInputOfOneRankEndsAllAndNamesIt) {
  RankProcesses processes(
      {{2, arguments("run")}, {1, arguments("run", "--set model.hiden=128")}, {1, arguments("run")}});
  EXPECT_EQ(processes.wait(20), 2) << processes.error();
  ASSERT_EQ(processes.lines().size(), 1u) << processes.error();
  EXPECT_EQ(processes.lines().front().find("agoq: rank 2: "), 0u) << processes.error();
  EXPECT_FALSE(fs::exists(folder_.path("run") + "/config.toml"));
}

// One rank's command line, which the others know nothing of; and commands that exchange other things.
TEST_F(RankFailures, CommandLinesThatDifferAreToldSo) {
  const auto expect_line = [&](const std::string& second, const std::string& text) {
    RankProcesses processes({{1, arguments("run")}, {1, second}});
    EXPECT_EQ(processes.wait(20), 2) << processes.error();
    ASSERT_EQ(processes.lines().size(), 1u) << processes.error();
    EXPECT_NE(processes.lines().front().find(text), std::string::npos) << processes.error();
  };
  expect_line("train --frob x", "agoq: rank 1: train: ");
  expect_line("bench comm --timeout 3", "the command is train on rank 0 and bench comm on rank 1");
  expect_line(std::string("bench step ") + AGOQ_CONFIG,
              "the command is train on rank 0 and bench step on rank 1");
}

// Ranks that measure other things would wait for exchanges that do not come, or exchange other sizes.
TEST_F(RankFailures, MeasurementsThatDifferAreToldSo) {
  const auto expect_line = [&](const std::string& first, const std::string& second,
                               const std::string& difference) {
    RankProcesses processes({{1, first}, {2, second}});
    EXPECT_EQ(processes.wait(20), 2) << processes.error();
    ASSERT_EQ(processes.lines().size(), 1u) << processes.error();
    EXPECT_EQ(processes.lines().front(),
              "agoq: the ranks do not agree: " + difference + "; start all of them with the same " +
                  (difference.rfind("--", 0) == 0 ? "options" : "program, configuration and data"));
    EXPECT_EQ(processes.out(), "");
  };
  const std::string comm = "bench comm --elements 16384 --repetitions 1";
  const auto expect_option = [&](const std::string& bench, const std::string& option,
                                 const std::string& first, const std::string& second) {
    expect_line(fmt::format("{} {} {}", bench, option, first),
                fmt::format("{} {} {}", bench, option, second),
                fmt::format("{} is {} on rank 0 and {} on ranks 1 and 2", option, first, second));
  };
  expect_option("bench comm --repetitions 1", "--elements", "16384", "32768");
  expect_option("bench comm --elements 16384", "--repetitions", "1", "2");
  expect_option(comm, "--bucket", "4096", "8192");
  expect_option(comm, "--timeout", "3", "4.5");
  expect_option(comm, "--nccl-max-ctas", "0", "8");
  expect_line(comm, comm + " --no-peer-copies",
              "--no-peer-copies is not given on rank 0 and given on ranks 1 and 2");
  expect_line(comm + " --timeout 3", "bench comm --elements 32768 --repetitions 2 --timeout 3",
              "--elements is 16384 on rank 0 and 32768 on ranks 1 and 2, and 1 more difference");
  std::string step = arguments("run");
  step.replace(0, std::string("train").size(), "bench step");
  expect_option(step, "--steps", "2", "3");
  expect_option(step, "--warmup", "0", "1");
  expect_line(comm, step, "the command is bench comm on rank 0 and bench step on ranks 1 and 2");
  expect_line(step, step + " --set train.micro_batches=7",
              "train.micro_batches is 6 on rank 0 and 7 on ranks 1 and 2");
}

TEST_F(RankFailures, RanksOfAnotherVersionAreToldSo) {
  RankProcesses processes(
      {{1, arguments("run")}, {2, "'0.2.0 def'", AGOQ_OTHER_VERSION}, {1, arguments("run")}});
  EXPECT_EQ(processes.wait(20), 2) << processes.error();
  ASSERT_EQ(processes.lines().size(), 1u) << processes.error();
  const std::regex line(
      "agoq: the ranks run different programs: agoq [^ ]+( [^ ,]+)?, protocol [0-9]+ on ranks 0 and 3, "
      "agoq 0\\.2\\.0 def, protocol [0-9]+ on ranks 1 and 2; start all of them with the same one");
  EXPECT_TRUE(std::regex_match(processes.lines().front(), line)) << processes.error();
}

// MPI would wait for it for ever. So it does for one that ends before any has come, which mpirun notices
// afterwards only.
TEST_F(RankFailures, ARankThatDoesNotMeetTheOthersIsNotWaitedForWithoutEnd) {
  for (const bool first : {true, false}) {
    std::vector<RankGroup> groups{{3, arguments("run")}};
    groups.insert(first ? groups.begin() : groups.end(), {1, "100", "sleep"});
    RankProcesses processes(groups);
    // 10 s at least, and a turn of rank 1 where rank 0 is not there.
    EXPECT_EQ(processes.wait(10 + 1.5 + kMargin), 1) << processes.error();
    ASSERT_EQ(processes.lines().size(), 1u) << processes.error();
    EXPECT_EQ(processes.lines().front().find(fmt::format(
                  "agoq: rank {} of 4 has waited 10 s for all others to come, and not all of them have",
                  first ? 1 : 0)),
              0u)
        << processes.error();
  }
}

// Nothing watches the ranks yet: while they tell of bad input, and of what they do, and take their
// devices, for which GPUs have two minutes more.
TEST_F(RankFailures, ARankThatHangsBeforeTheRunIsNotWaitedForWithoutEnd) {
  for (const auto& [call, what] : {std::pair{"MPI_Iallgather 1", "come"},
                                   {"MPI_Iallgather 2", "read what they were given"},
                                   {"MPI_Iallgather 3", "say what they do"},
                                   {"MPI_Comm_dup 2", "take their devices"}}) {
    SCOPED_TRACE(call);
    RankProcesses processes({{2, arguments("run")}, {1, arguments("run"), hanging_in(call)}});
    EXPECT_EQ(processes.wait(10 + kMargin), 1) << processes.error();
    ASSERT_EQ(processes.lines().size(), 1u) << processes.error();
    EXPECT_EQ(
        processes.lines().front().find(fmt::format(
            "agoq: rank 0 of 3 has waited 10 s for all others to {}, and not all of them have", what)),
        0u)
        << processes.error();
  }
}

// Nothing watches the ranks any more. All that they were started for is there.
TEST_F(RankFailures, ARankThatHangsAtItsEndIsNotWaitedForWithoutEnd) {
  const std::string train = arguments("run", "--set train.steps=2");
  for (const std::string& command :
       {train, std::string("bench comm --elements 8192 --json --timeout 3")}) {
    RankProcesses processes({{1, command}, {1, command, hanging_in("MPI_Finalize 1")}});
    EXPECT_EQ(processes.wait(30 + kMargin), 1) << processes.error();
    ASSERT_EQ(processes.lines().size(), 1u) << processes.error();
    EXPECT_EQ(processes.lines().front().find(
                  "agoq: rank 0 of 2 has waited 10 s for all others to end, and not all of them have"),
              0u)
        << processes.error();
    EXPECT_EQ(processes.out().find('{'), 0u) << processes.out();
    EXPECT_EQ(processes.out().rfind("}\n"), processes.out().size() - 2) << processes.out();
  }
}

// Its process lives, and so does the thread that gives signs of life.
TEST_F(RankFailures, ARankThatDoesNotComeIsNamedFirst) {
  RankProcesses processes({{3, arguments("run", "--set train.steps=100000")}});
  const Clock::time_point start = Clock::now();
  while (!kInAStep.has_come(folder_.path("run")) && seconds_since(start) < 60) sleep_a_little();
  const pid_t pid = processes.pid(1);
  ASSERT_NE(pid, 0) << processes.error();
  // Stops the main thread alone.
  if (ptrace(PTRACE_SEIZE, pid, nullptr, nullptr) != 0) GTEST_SKIP() << "no right to trace a process";
  ASSERT_EQ(ptrace(PTRACE_INTERRUPT, pid, nullptr, nullptr), 0);
  EXPECT_EQ(processes.wait(2 * kTimeout + kMargin), 1) << processes.error();
  ASSERT_EQ(processes.lines().size(), 1u) << processes.error();
  const std::regex line(fmt::format(
      "agoq: rank 1 of 3 \\(host [^ ]+, pid {}\\), in [^;]*, did not come to [^;]* within {} "
      "s: rank [02] waited for it in [^;]*; all ranks end: go on from the last checkpoint "
      "with --resume[^;]*, and raise parallel.timeout_seconds if a rank is only slow",
      pid, kTimeout));
  EXPECT_TRUE(std::regex_match(processes.lines().front(), line)) << processes.error();
}

// What works in one process is done and printed once.
TEST_F(RankFailures, CommandsOfOneProcessAreRunByRank0) {
  const auto count = [](const std::string& text, const std::string& part) {
    int found = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
      ++found;
    return found;
  };
  const auto expect_once = [&](const std::string& command, const std::string& part, bool is_noticed) {
    RankProcesses processes({{3, command}});
    EXPECT_EQ(processes.wait(60), 0) << processes.error();
    EXPECT_EQ(count(processes.out(), part), 1) << processes.out();
    EXPECT_EQ(count(processes.error(), "works in one process: rank 0 of 3 does"), is_noticed ? 1 : 0)
        << processes.error();
  };
  expect_once("--version", "\n", false);
  expect_once("", "Start with", false);
  expect_once("train --help", "--resume", false);
  expect_once("info", "compiler", true);
  expect_once(std::string("plan ") + AGOQ_CONFIG, "\n3 ranks, quangrad: what one of them holds\n", true);
  expect_once(std::string("plan ") + AGOQ_CONFIG + " --set parallel.ranks=5", "\n5 ranks, quangrad",
              true);
}

// With all that its libraries take, MPI's memory included, which is a quarter of what a tiny run holds.
TEST_F(RankFailures, APlanForSeveralRanksHoldsToWhatTheyTake) {
  const auto value = [](const std::string& json, const std::string& name) {
    const std::size_t at = json.find("\"" + name + "\": ");
    return at == std::string::npos ? 0.0 : std::stod(json.substr(at + name.size() + 4));
  };
  for (const int ranks : {2, 4}) {
    const std::string settings = "--set train.steps=3";
    std::string plan = arguments("run", settings);
    plan.replace(0, std::string("train").size(), "plan");
    RankProcesses planned({{1, fmt::format("{} --set parallel.ranks={}", plan, ranks)}});
    ASSERT_EQ(planned.wait(60), 0) << planned.error();
    RankProcesses run({{ranks, arguments("run", settings + " --overwrite")}});
    ASSERT_EQ(run.wait(60), 0) << run.error();
    const double predicted = value(planned.out(), "peak_bytes_predicted");
    const double in_the_run = value(run.out(), "peak_bytes_predicted");
    const double measured = value(run.out(), "peak_bytes_measured");
    if (measured == 0) GTEST_SKIP() << "this program does not count its memory";
    EXPECT_NEAR(predicted / measured, 1, 0.05) << ranks;
    EXPECT_NEAR(in_the_run / measured, 1, 0.03) << ranks;
  }
}

/// Steps take longer than mpirun leaves to ranks that it ends.
std::string slow_steps() {
#ifdef AGOQ_SANITIZED
  constexpr int kSequences = 2;
#else
  constexpr int kSequences = 32;
#endif
  return fmt::format(
      "--set train.sequence=256 --set train.micro_batch={} --set train.steps=1000 --set "
      "parallel.timeout_seconds=60",
      kSequences);
}

TEST_F(RankFailures, ASignalToMpirunSavesARunOfLongSteps) {
  // SIGUSR1 it passes on. On SIGINT, Ctrl-C, it waits for its odls_base_sigkill_timeout, sends SIGTERM,
  // and waits for as long before it kills.
  for (const auto& [signal, options] :
       {std::pair{SIGUSR1, ""}, {SIGINT, "--mca odls_base_sigkill_timeout 10"}}) {
    SCOPED_TRACE(signal);
    const std::string run = fmt::format("run-{}", signal);
    RankProcesses processes({{2, arguments(run, slow_steps())}}, options);
    const Clock::time_point start = Clock::now();
    const auto lines_of_metrics = [&] {
      const std::string metrics = read_file(folder_.path(run) + "/metrics.jsonl");
      return std::count(metrics.begin(), metrics.end(), '\n');
    };
    while (lines_of_metrics() < 1 && seconds_since(start) < 60) sleep_a_little();
    sleep_a_little();
    processes.signal(signal);
    const std::optional<int> status = processes.wait(60);
    ASSERT_TRUE(status.has_value());
    if (signal == SIGUSR1) {
      EXPECT_EQ(*status, 0) << processes.error();
    }
    EXPECT_EQ(processes.lines().size(), 0u) << processes.error();
    const fs::path saved =
        fs::path(folder_.path(run)) / "checkpoints" / fmt::format("step-{}", lines_of_metrics());
    EXPECT_TRUE(fs::exists(saved / "manifest.json")) << processes.out() << processes.error();
  }
}

// While it prepares the run it is no lost rank either, nor while it looks for the others.
TEST_F(RankFailures, ASignalToARankBeforeItsFirstStepSavesTheRun) {
  const auto expect_saved = [&](const std::string& run, const auto& is_time) {
    SCOPED_TRACE(run);
    RankProcesses processes({{3, arguments(run, "--set train.steps=100000")}});
    const Clock::time_point start = Clock::now();
    while (!is_time(processes) && seconds_since(start) < 60) sleep_a_little();
    const pid_t pid = processes.pid(1);
    ASSERT_NE(pid, 0) << processes.error();
    ASSERT_EQ(kill(pid, SIGTERM), 0);
    EXPECT_EQ(processes.wait(30), 0) << processes.error();
    EXPECT_EQ(processes.lines().size(), 0u) << processes.error();
    EXPECT_NE(processes.out().find("\"stopped\": true"), std::string::npos) << processes.out();
    EXPECT_FALSE(fs::is_empty(folder_.path(run) + "/checkpoints"));
  };
  expect_saved("early", [](const RankProcesses& processes) {
    const pid_t pid = processes.pid(1);
    return pid != 0 &&
           read_file(fmt::format("/proc/{}/maps", pid)).find("libagoq_mpi") != std::string::npos;
  });
  expect_saved("late", [&](const RankProcesses&) { return fs::exists(folder_.path("late/run.lock")); });
}

// The others end theirs too, and are not late.
TEST_F(RankFailures, ASignalToARankInALongValidationSavesTheRun) {
  std::string text;
  for (int i = 0; i < 40'000; ++i) text += fmt::format("{} squared is {}. ", i, std::int64_t{i} * i);
  for (int d = 0; d < 3; ++d) folder_.write(fmt::format("long/{}.txt", d), text);
  const std::string settings =
      arguments("run", fmt::format("--overwrite --set data.paths={} --set train.steps=2 --set "
                                   "train.validation_batches=0 --set parallel.timeout_seconds=1",
                                   folder_.path("long")));
  for (const int rank : {0, 1}) {
    SCOPED_TRACE(rank);
    fs::remove_all(folder_.path("run"));
    RankProcesses processes({{2, settings}});
    const Clock::time_point start = Clock::now();
    while (metrics_of("run").size() < 2 && seconds_since(start) < 60) sleep_a_little();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    const pid_t pid = processes.pid(rank);
    ASSERT_NE(pid, 0) << processes.error();
    ASSERT_EQ(kill(pid, SIGTERM), 0);
    EXPECT_EQ(processes.wait(20), 0) << processes.error();
    EXPECT_EQ(processes.lines().size(), 0u) << processes.error();
    EXPECT_NE(processes.out().find("\"stopped\": true"), std::string::npos) << processes.out();
    EXPECT_TRUE(fs::exists(folder_.path("run") + "/checkpoints/step-2/manifest.json"));
  }
}

// Where MPI does not understand the launcher every process is alone with it, and would train by itself.
TEST_F(RankFailures, AnMpiThatKnowsOfFewerRanksThanWereLaunchedIsToldSo) {
  TemporaryFolder folder;
  const std::string command =
      fmt::format("SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 SLURM_LOCALID=0 PMIX_RANK=0 {} {} 2> {}",
                  AGOQ_PROGRAM, arguments("run"), folder.path("error"));
  const int status = std::system(command.c_str());
  EXPECT_EQ(WEXITSTATUS(status), 2);
  const std::string error = read_file(folder.path("error"));
  EXPECT_NE(error.find("agoq: srun started 2 ranks and Open MPI"), std::string::npos) << error;
  EXPECT_NE(error.find("finds 1: "), std::string::npos) << error;
  EXPECT_FALSE(fs::exists(folder_.path("run")));
}

// mpirun's ranks have a terminal, whatever their output goes to: no line is written over another there.
TEST_F(RankFailures, ProgressIsWholeLines) {
  std::string all = arguments("run", "--set train.steps=4 --set run.log_every=2");
  all.erase(all.find("--json"), 6);
  RankProcesses processes({{2, all}});
  ASSERT_EQ(processes.wait(60), 0) << processes.error();
  EXPECT_NE(processes.out().find("agoq step 4/4"), std::string::npos) << processes.out();
  const auto expect_line = [&](const std::string& line) {
    EXPECT_TRUE(std::regex_search(processes.out(), std::regex("\n" + line + "\n"))) << processes.out();
  };
  expect_line(
      "agoq step 4/4  loss [0-9.]+  [0-9]+ tokens/s  exposed [0-9.]+ ms \\([0-9.]+ %\\)  .* left");
  expect_line("ranks +2");
  expect_line("reduction of gradients +quangrad");
  expect_line("exposed communication \\(median step\\) +[0-9.]+ ms, [0-9.]+ %");
  EXPECT_EQ(processes.out().find("\x1b["), std::string::npos) << processes.out();
  EXPECT_EQ(processes.out().find("agoq step 3/4"), std::string::npos) << processes.out();
}

// On stderr as they come, so that stdout holds the table, or the JSON, alone.
TEST_F(RankFailures, BenchCommSaysWhatItHasMeasured) {
  RankProcesses processes({{2, "bench comm --elements 8192 --repetitions 1 --json"}});
  ASSERT_EQ(processes.wait(60), 0) << processes.error();
  const std::string error = processes.error();
  EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 7) << error;
  for (const char* variant : {"plain exchange, 1 byte an element", "QuanGrad all-reduce",
                              "ZeRO-1 reduce with norm", "fp32 reduce-scatter"}) {
    EXPECT_TRUE(std::regex_search(
        error, std::regex(fmt::format("(^|\n)8,192 elements, {}: [0-9.]+ ms\n", variant))))
        << error;
  }
  EXPECT_EQ(processes.out().find('{'), 0u) << processes.out();
}

TEST_F(RankFailures, RanksWithoutAMicroBatchAreNoticed) {
  const std::string line =
      "2 of 3 ranks compute nothing: a step has 1 micro-batch; raise train.micro_batches, or start "
      "fewer ranks\n";
  const std::string settings = "--set train.micro_batches=1 --set train.steps=2";
  RankProcesses processes({{3, arguments("run", settings)}});
  ASSERT_EQ(processes.wait(60), 0) << processes.error();
  EXPECT_EQ(processes.error(), line);
  RankProcesses enough({{3, arguments("enough", "--set train.steps=2")}});
  ASSERT_EQ(enough.wait(60), 0) << enough.error();
  EXPECT_EQ(enough.error(), "");
}

TEST_F(RankFailures, AnErrorOfAllRanksIsOneLine) {
  RankProcesses processes({{3, arguments("run", "--set data.paths=/nowhere")}});
  EXPECT_EQ(processes.wait(20), 2);
  ASSERT_EQ(processes.lines().size(), 1u) << processes.error();
  EXPECT_NE(processes.lines().front().find("/nowhere"), std::string::npos) << processes.error();
}

}  // namespace

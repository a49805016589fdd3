// Ranks here are processes that the test forks, kills and stops; what they print is read from a file.
#include "comm/rank_watch.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>

#include "comm/together.h"
#include "core/temporary_folder.h"

namespace agoq {
namespace {

using Clock = std::chrono::steady_clock;

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Memory that forked processes share.
struct Shared {
  static constexpr int kMostRanks = 8;
  static constexpr std::size_t kLongest = 4096;
  pthread_barrier_t barrier;
  std::byte slots[kMostRanks][kLongest];
};

/// Gathers through shared memory: all that RankWatch asks of a communicator.
class ForkedRanks : public Communicator {
 public:
  ForkedRanks(Shared& shared, int rank, int size) : shared_(shared), rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string description() const override { return "forked processes"; }
  void exchange(const Context&, std::span<const Message>, std::span<const Message>) override { none(); }
  void all_reduce(const Context&, const Tensor&) override { none(); }
  void reduce_scatter(const Context&, const Tensor&, std::span<const std::int64_t>) override { none(); }
  std::unique_ptr<Communicator> split(int, int) override { none(); }
  void gather(const void* mine, void* all, std::size_t bytes) override {
    check(bytes <= Shared::kLongest, "{} bytes are too many", bytes);
    std::memcpy(shared_.slots[rank_], mine, bytes);
    pthread_barrier_wait(&shared_.barrier);
    for (int r = 0; r < size_; ++r) {
      std::memcpy(static_cast<std::byte*>(all) + static_cast<std::size_t>(r) * bytes, shared_.slots[r],
                  bytes);
    }
    pthread_barrier_wait(&shared_.barrier);
  }

 private:
  [[noreturn]] static void none() { fail("only gather is there"); }

  Shared& shared_;
  int rank_;
  int size_;
};

/// Processes that run `body` as the ranks of a group. A body that returns ends its process with status
/// 0, one that throws with 7.
class Processes {
 public:
  template <typename Body>
  Processes(int size, Body body) {
    shared_ = static_cast<Shared*>(
        mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared_->barrier, &attributes, static_cast<unsigned>(size));
    std::fflush(nullptr);
    for (int rank = 0; rank < size; ++rank) {
      const pid_t pid = fork();
      if (pid == 0) {
        [[maybe_unused]] FILE* const stream = freopen(folder_.path("stderr").c_str(), "a", stderr);
        int status = 0;
        try {
          ForkedRanks group(*shared_, rank, size);
          body(group);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "exception: %s\n", error.what());
          status = 7;
        }
        std::fflush(nullptr);
        _exit(status);
      }
      pids_.push_back(pid);
    }
  }
  ~Processes() {
    for (const pid_t pid : pids_) {
      if (pid == 0) continue;
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    munmap(shared_, sizeof(Shared));
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  pid_t pid(int rank) const { return pids_[static_cast<std::size_t>(rank)]; }
  /// Not to one that has ended.
  void send(int rank, int signal) const {
    if (pid(rank) != 0) kill(pid(rank), signal);
  }

  /// Waits for the ranks' ends. Exit status of each; -signal if one ended it; nothing for one that has
  /// not ended within `seconds`.
  std::vector<std::optional<int>> wait(double seconds) {
    std::vector<std::optional<int>> statuses(pids_.size());
    const Clock::time_point start = Clock::now();
    for (;;) {
      bool running = false;
      for (std::size_t r = 0; r < pids_.size(); ++r) {
        if (pids_[r] == 0) continue;
        int status = 0;
        if (waitpid(pids_[r], &status, WNOHANG) == pids_[r]) {
          statuses[r] = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
          pids_[r] = 0;
        } else {
          running = true;
        }
      }
      if (!running || seconds_since(start) > seconds) return statuses;
      sleep(0.005);
    }
  }
  /// The first rank that ends with exit status 1; nothing if none has within `seconds`.
  std::optional<int> wait_for_status_1(double seconds) {
    const Clock::time_point start = Clock::now();
    do {
      const std::vector<std::optional<int>> statuses = wait(0);
      const auto found = std::find(statuses.begin(), statuses.end(), 1);
      if (found != statuses.end()) return static_cast<int>(found - statuses.begin());
      sleep(0.005);
    } while (seconds_since(start) < seconds);
    return std::nullopt;
  }
  std::string printed() const {
    std::ifstream file(folder_.path("stderr"));
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

 private:
  TemporaryFolder folder_;
  Shared* shared_ = nullptr;
  std::vector<pid_t> pids_;
};

using Statuses = std::vector<std::optional<int>>;

constexpr double kTimeout = 3;
const RankWatchOptions kWatchOptions{kTimeout, "resume"};

/// Watches, and computes without end.
void compute(Communicator& group) {
  RankWatch watch(group, kWatchOptions);
  watch.doing("forward of step {}", 10 + group.rank());
  for (;;) pause();
}

void expect_one_line(const std::string& printed, const std::vector<std::string>& parts) {
  EXPECT_EQ(printed.rfind("agoq: ", 0), 0u) << printed;
  EXPECT_EQ(printed.find('\n'), printed.size() - 1) << printed;
  for (const std::string& part : parts) EXPECT_NE(printed.find(part), std::string::npos) << printed;
}

TEST(RankWatch, LetsRanksEndAtDifferentTimes) {
  for (const int last : {0, 2}) {
    Processes processes(3, [last](Communicator& group) {
      RankWatch watch(group, {1, ""});
      // Far beyond the timeout, with the main thread busy.
      if (group.rank() == last) sleep(2.4);
    });
    EXPECT_EQ(processes.wait(20), (Statuses{0, 0, 0}));
    EXPECT_EQ(processes.printed(), "");
  }
}

TEST(RankWatch, NoticesAKilledRankAtOnce) {
  for (const int killed : {1, 3}) {
    Processes processes(4, compute);
    sleep(1);  // longer than a sign of life takes
    const pid_t pid = processes.pid(killed);
    const Clock::time_point start = Clock::now();
    processes.send(killed, SIGKILL);
    Statuses expected(4, 1);
    expected[static_cast<std::size_t>(killed)] = -SIGKILL;
    EXPECT_EQ(processes.wait(20), expected);
    EXPECT_LT(seconds_since(start), kTimeout / 2);
    expect_one_line(processes.printed(),
                    {fmt::format("rank {} of 4 (host ", killed), fmt::format("pid {})", pid), "is gone",
                     fmt::format("forward of step {}", 10 + killed), "all ranks end: resume"});
  }
}

TEST(RankWatch, NoticesAStoppedRankWithinTheTimeout) {
  Processes processes(4, compute);
  sleep(1);
  const Clock::time_point start = Clock::now();
  processes.send(2, SIGSTOP);
  Statuses expected(4, 1);
  expected[2] = std::nullopt;  // the launcher kills it
  EXPECT_EQ(processes.wait(kTimeout), expected);
  EXPECT_GT(seconds_since(start), 0.7 * kTimeout);
  expect_one_line(processes.printed(),
                  {"rank 2 of 4 (host ", "no sign of life for", "forward of step 12"});
  // Were it to go on, it would find itself alone.
  processes.send(2, SIGCONT);
  EXPECT_EQ(processes.wait(20)[2], 1);
}

TEST(RankWatch, OneRankSaysThatRank0IsGone) {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    Processes processes(5, compute);
    sleep(1);
    const Clock::time_point start = Clock::now();
    processes.send(0, signal);
    const Statuses statuses = processes.wait(kTimeout);
    EXPECT_LE(seconds_since(start), kTimeout + 0.1);
    for (std::size_t r = 1; r < 5; ++r) EXPECT_EQ(statuses[r], 1) << r;
    const std::vector<std::string> parts{"rank 0 of 5 (host ", "forward of step 10"};
    expect_one_line(processes.printed(), parts);
    // Were it to go on, as mpirun makes it, it would find that the others have ended because of it.
    processes.send(0, SIGCONT);
    EXPECT_EQ(processes.wait(20)[0], signal == SIGSTOP ? std::optional<int>(1) : std::nullopt);
    expect_one_line(processes.printed(), parts);
  }
}

TEST(RankWatch, WithoutTheDeputyOthersSayThatRank0IsGone) {
  Processes processes(5, [](Communicator& group) {
    std::signal(SIGTERM, [](int) {});  // saves and stops, were there steps
    compute(group);
  });
  sleep(1);
  processes.send(1, SIGSTOP);  // the deputy
  processes.send(0, SIGKILL);
  EXPECT_EQ(processes.wait_for_status_1(kTimeout), std::optional<int>(2));
  // As mpirun does when a rank has ended with an error.
  for (const int rank : {1, 3}) processes.send(rank, SIGCONT);
  processes.send(4, SIGTERM);
  const Statuses statuses = processes.wait(1.2);
  EXPECT_EQ(statuses[1], 1);
  EXPECT_EQ(statuses[3], 1);
  EXPECT_EQ(statuses[4], -SIGTERM);
  expect_one_line(processes.printed(), {"rank 0 of 5 (host ", "forward of step 10"});
}

TEST(RankWatch, EndsAllRanksWithTheFailureOfOne) {
  for (const int failing : {0, 2}) {
    Processes processes(3, [failing](Communicator& group) {
      RankWatch watch(group, kWatchOptions);
      watch.doing("saving step 10");
      if (group.rank() != failing) compute(group);
      sleep(0.5);
      watch.run([] { fail_input("the disk\nis full"); });
    });
    EXPECT_EQ(processes.wait(20), Statuses(3, 2));
    expect_one_line(processes.printed(), {fmt::format("rank {} of 3 (host ", failing),
                                          "in saving step 10: the disk is full"});
  }
}

TEST(RankWatch, OfSeveralFailuresOneIsPrinted) {
  Processes processes(4, [](Communicator& group) {
    RankWatch watch(group, kWatchOptions);
    watch.run([] { fail("the loss is NaN"); });
  });
  EXPECT_EQ(processes.wait(20), Statuses(4, 1));
  expect_one_line(processes.printed(), {"the loss is NaN"});
}

TEST(RankWatch, AFailureOfAllIsPrintedOnceAndAsItIs) {
  Processes processes(4, [](Communicator& group) {
    RankWatch watch(group, kWatchOptions);
    if (group.rank() == 0) sleep(0.5);  // the others are there first
    watch.run(
        [&] { throw AgreedError(ErrorKind::kInput, group.rank() == 0 ? "the text is empty" : ""); });
  });
  EXPECT_EQ(processes.wait(20), Statuses(4, 2));
  EXPECT_EQ(processes.printed(), "agoq: the text is empty\n");
}

// What a rank says that its neighbour's end has failed is no second failure.
TEST(RankWatch, ALostRankComesBeforeTheFailuresThatItCauses) {
  for (const int lost : {0, 1}) {
    Processes processes(4, [lost](Communicator& group) {
      RankWatch watch(group, kWatchOptions);
      if (group.rank() == lost) compute(group);
      sleep(1);
      if (group.rank() == (lost == 0 ? 1 : 0)) sleep(0.1);
      watch.run([] { fail("MPI: an exchange failed"); });
    });
    sleep(0.9);
    Statuses expected(4, 1);
    expected[static_cast<std::size_t>(lost)] = -SIGKILL;
    // After the first of them has failed.
    sleep(0.15);
    processes.send(lost, SIGKILL);
    EXPECT_EQ(processes.wait(20), expected);
    expect_one_line(processes.printed(), {fmt::format("rank {} of 4 (host ", lost), "is gone"});
  }
}

/// Ranks 0 and 2 of three wait for rank 1; where the transport does not know whom for, by what it does.
void wait_for_rank_1(Communicator& group, const std::vector<int>& missing) {
  RankWatch watch(group, kWatchOptions);
  watch.doing("forward of step 12");
  if (group.rank() == 1) {
    for (;;) pause();
  }
  sleep(0.5);
  watch.doing("the exchange of step 12");
  sleep(group.rank() == 0 ? 0.5 : 0.6);
  watch.run([&] { throw LateError(group, "an all-reduce", 3, missing); });
}

TEST(RankWatch, NamesARankThatDoesNotComeFirst) {
  for (const std::vector<int>& missing : {std::vector<int>{1}, std::vector<int>{}}) {
    Processes processes(3, [&](Communicator& group) { wait_for_rank_1(group, missing); });
    EXPECT_EQ(processes.wait(20), Statuses(3, 1));
    expect_one_line(processes.printed(),
                    {"agoq: rank 1 of 3 (host ",
                     "in forward of step 12, did not come to an all-reduce within 3 s: rank 0 waited "
                     "for it in the exchange of step 12; all ranks end: resume, and raise "
                     "parallel.timeout_seconds if a rank is only slow"});
  }
}

TEST(RankWatch, OfTwoRanksTheOtherIsMissing) {
  const std::unique_ptr<Communicator> two = planned_ranks(2);
  const LateError error(*two, "an all-reduce", 0.5, {});
  EXPECT_EQ(error.missing(), std::vector<int>{1});
  EXPECT_STREQ(error.what(),
               "rank 1 did not come to an all-reduce within 0.5 s: rank 0 has waited for it; look at "
               "what it printed, and start all again");
}

TEST(RankWatch, ARankThatAnExceptionUnwindsHasFailed) {
  Processes processes(3, [](Communicator& group) {
    RankWatch watch(group, kWatchOptions);
    if (group.rank() == 1) fail("a failure");
    for (;;) pause();
  });
  EXPECT_EQ(processes.wait(20), Statuses(3, 1));
  expect_one_line(processes.printed(), {"rank 1 of 3 ", "ended by an error"});
}

TEST(RankWatch, AfterAHaltOfAllRanksNobodyIsLost) {
  Processes processes(3, [](Communicator& group) {
    RankWatch watch(group, {1, ""});
    sleep(3);
  });
  sleep(0.5);
  for (const int rank : {0, 1, 2}) processes.send(rank, SIGSTOP);
  sleep(1.5);
  for (const int rank : {0, 1, 2}) processes.send(rank, SIGCONT);
  EXPECT_EQ(processes.wait(20), (Statuses{0, 0, 0}));
  EXPECT_EQ(processes.printed(), "");
}

TEST(RankWatch, AGroupOfOneNeedsNoWatch) {
  const std::unique_ptr<Communicator> one = single_rank();
  RankWatch watch(*one, {});
  watch.doing("step {}", 1);
  EXPECT_THROW(watch.run([] { fail("is thrown on"); }), Error);
}

TEST(RankWatch, RefusesTimeoutsThatNoRankCouldKeep) {
  const std::unique_ptr<Communicator> one = single_rank();
  for (const double seconds : {-1.0, 0.0, 1e-9, 0.99, 1e10, 1e300, std::nan(""), HUGE_VAL}) {
    try {
      RankWatch watch(*one, {.timeout_seconds = seconds});
      ADD_FAILURE() << seconds;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      EXPECT_NE(std::string(error.what()).find("parallel.timeout_seconds must be from 1 to 1000000 s"),
                std::string::npos)
          << error.what();
    }
  }
}

TEST(RankWatch, CutsALongActivity) {
  Processes processes(2, [](Communicator& group) {
    RankWatch watch(group, kWatchOptions);
    watch.doing("{}", std::string(300, 'x'));
    sleep(0.7);
    if (group.rank() == 1) _exit(0);  // without a goodbye
    for (;;) pause();
  });
  EXPECT_EQ(processes.wait(20), (Statuses{1, 0}));
  expect_one_line(processes.printed(), {"last in " + std::string(95, 'x') + "; all"});
}

}  // namespace
}  // namespace agoq

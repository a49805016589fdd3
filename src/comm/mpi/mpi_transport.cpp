// Ranks on CPUs over MPI: the module libagoq_mpi.so.
//
// Every operation is made of non-blocking calls that are polled until a deadline, so that a rank that
// does not answer ends the run instead of holding it. MPI counts elements in an int: longer messages and
// sums go in pieces.
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include "comm/exchange_checks.h"
#include "comm/transports.h"
#include "core/error.h"
#include "core/small_float.h"

namespace agoq {
namespace {

using Clock = std::chrono::steady_clock;

// Bytes of a message and elements of a sum that go in one call.
constexpr std::size_t kLongest = std::size_t{1} << 30;

void expect_success(int status, const char* operation) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(status, text, &length);
  fail("MPI: {} failed: {}", operation, std::string(text, static_cast<std::size_t>(length)));
}

/// target[i] = bf16(target[i] + added[i]): MPI knows no BF16.
void add_bf16(void* added, void* target, int* count, MPI_Datatype*) {
  const Bf16* const in = static_cast<const Bf16*>(added);
  Bf16* const out = static_cast<Bf16*>(target);
  for (int i = 0; i < *count; ++i) out[i] = to_bf16(to_float(in[i]) + to_float(out[i]));
}

struct Sum {
  MPI_Datatype type;
  MPI_Op operation;
};

Sum sum_of(ElementType type) {
  static const MPI_Op bf16_sum = [] {
    MPI_Op operation = MPI_OP_NULL;
    expect_success(MPI_Op_create(add_bf16, /*commute=*/1, &operation), "MPI_Op_create");
    return operation;
  }();
  switch (type) {
    case ElementType::kFp32: return {MPI_FLOAT, MPI_SUM};
    case ElementType::kFp64: return {MPI_DOUBLE, MPI_SUM};
    default: return {MPI_UINT16_T, bf16_sum};
  }
}

class MpiRanks : public Communicator {
 public:
  /// Takes `group` over.
  MpiRanks(MPI_Comm group, double timeout_seconds) : group_(group), timeout_seconds_(timeout_seconds) {
    expect_success(MPI_Comm_set_errhandler(group_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    MPI_Comm_rank(group_, &rank_);
    MPI_Comm_size(group_, &size_);
  }
  ~MpiRanks() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (finalized == 0) MPI_Comm_free(&group_);
  }
  MpiRanks(const MpiRanks&) = delete;
  MpiRanks& operator=(const MpiRanks&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string description() const override {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(text, &length);
    const std::string version(text, static_cast<std::size_t>(length));
    return version.substr(0, version.find(','));  // "Open MPI v4.1.4", and who built it
  }

  void exchange(const Context& context, std::span<const Message> sends,
                std::span<const Message> receives) override {
    expect_messages(*this, sends, receives);
    if (context.workspace.is_measuring()) return;
    begin();
    for (const Message& message : receives) {
      in_pieces(message, [&](std::byte* piece, int bytes) {
        expect_success(MPI_Irecv(piece, bytes, MPI_BYTE, message.peer, 0, group_, add(message.peer)),
                       "MPI_Irecv");
      });
    }
    for (const Message& message : sends) {
      in_pieces(message, [&](std::byte* piece, int bytes) {
        expect_success(MPI_Isend(piece, bytes, MPI_BYTE, message.peer, 0, group_, add(message.peer)),
                       "MPI_Isend");
      });
    }
    complete("an exchange of gradients or weights");
  }

  void all_reduce(const Context& context, const Tensor& x) override {
    expect_summable("all_reduce", x);
    if (context.workspace.is_measuring()) return;
    const Sum sum = sum_of(x.type);
    for (std::int64_t first = 0; first < x.count(); first += static_cast<std::int64_t>(kLongest)) {
      const std::int64_t count = std::min(x.count() - first, static_cast<std::int64_t>(kLongest));
      begin();
      expect_success(
          MPI_Iallreduce(MPI_IN_PLACE, x.data + static_cast<std::size_t>(first) * size_of(x.type),
                         static_cast<int>(count), sum.type, sum.operation, group_, add(kEveryRank)),
          "MPI_Iallreduce");
      complete("an all-reduce");
    }
  }

  void reduce_scatter(const Context& context, const Tensor& x,
                      std::span<const std::int64_t> counts) override {
    expect_parts(*this, x, counts);
    if (context.workspace.is_measuring()) return;
    const Sum sum = sum_of(x.type);
    // One reduction per part: unlike MPI_Ireduce_scatter it leaves the part at its place.
    begin();
    std::byte* part = x.data;
    for (int r = 0; r < size_; ++r) {
      const std::int64_t count = counts[static_cast<std::size_t>(r)];
      check(count <= std::numeric_limits<int>::max(),
            "reduce_scatter: parts of up to 2^31 elements go by MPI; one has {}: lower "
            "parallel.bucket_elements",
            count);
      const void* const in = r == rank_ ? MPI_IN_PLACE : part;
      void* const out = r == rank_ ? part : nullptr;
      expect_success(MPI_Ireduce(in, out, static_cast<int>(count), sum.type, sum.operation, r, group_,
                                 add(kEveryRank)),
                     "MPI_Ireduce");
      part += static_cast<std::size_t>(count) * size_of(x.type);
    }
    complete("a reduce-scatter");
  }

  void gather(const void* mine, void* all, std::size_t bytes) override {
    check(bytes <= kLongest, "gather: at most {} bytes of each rank; {} were given", kLongest, bytes);
    begin();
    expect_success(MPI_Iallgather(mine, static_cast<int>(bytes), MPI_BYTE, all, static_cast<int>(bytes),
                                  MPI_BYTE, group_, add(kEveryRank)),
                   "MPI_Iallgather");
    complete("a gathering of values");
  }

  std::uint64_t begun() const override { return begun_; }
  double set_timeout(double seconds) override { return std::exchange(timeout_seconds_, seconds); }

  std::unique_ptr<Communicator> split(int colour, int key) override {
    MPI_Comm part = MPI_COMM_NULL;
    expect_success(MPI_Comm_split(group_, colour, key, &part), "MPI_Comm_split");
    return std::make_unique<MpiRanks>(part, timeout_seconds_);
  }

 private:
  static constexpr int kEveryRank = -1;

  template <typename Call>
  static void in_pieces(const Message& message, Call call) {
    for (std::size_t first = 0; first < message.bytes; first += kLongest) {
      call(message.memory + first, static_cast<int>(std::min(message.bytes - first, kLongest)));
    }
  }

  void begin() {
    ++begun_;
    requests_.clear();
    peers_.clear();
  }
  MPI_Request* add(int peer) {
    peers_.push_back(peer);
    return &requests_.emplace_back(MPI_REQUEST_NULL);
  }

  void complete(const char* operation) {
    const Clock::time_point start = Clock::now();
    for (int polls = 0;; ++polls) {
      int done = 0;
      expect_success(
          MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE),
          operation);
      if (done != 0) return;
      // Ranks that share processors leave them to those that compute.
      if (polls > 100) std::this_thread::yield();
      if (polls > 1000) std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (std::chrono::duration<double>(Clock::now() - start).count() > timeout_seconds_) {
        fail_late(operation);
      }
    }
  }

  [[noreturn]] void fail_late(const char* operation) {
    std::vector<int> missing;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      // MPI_Testall leaves all as they are until the last is done.
      int done = 0;
      MPI_Request_get_status(requests_[i], &done, MPI_STATUS_IGNORE);
      if (done == 0 && peers_[i] != kEveryRank) missing.push_back(peers_[i]);
    }
    std::sort(missing.begin(), missing.end());
    missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
    throw LateError(*this, operation, timeout_seconds_, std::move(missing));
  }

  MPI_Comm group_;
  int rank_ = 0;
  int size_ = 1;
  double timeout_seconds_;
  std::atomic<std::uint64_t> begun_ = 0;
  // Kept from call to call: nothing is allocated inside a step.
  std::vector<MPI_Request> requests_;
  std::vector<int> peers_;
};

class OpenMpi : public MpiTransport {
 public:
  std::unique_ptr<Communicator> world(double timeout_seconds) override {
    int initialised = 0;
    MPI_Initialized(&initialised);
    if (initialised == 0) {
      // hwloc, by which MPI looks at the machine, asks X servers for their GPUs, and for that the name
      // "localhost": 10 s where there is no /etc/hosts, as in a bare container, and a name server is
      // slow. No rank is placed by what a screen hangs on.
      setenv("HWLOC_COMPONENTS", "-gl", /*overwrite=*/0);
      int provided = 0;
      expect_success(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided),
                     "MPI_Init_thread");
    }
    MPI_Comm all = MPI_COMM_NULL;
    expect_success(MPI_Comm_dup(MPI_COMM_WORLD, &all), "MPI_Comm_dup");
    return std::make_unique<MpiRanks>(all, timeout_seconds);
  }

  void leave() override {
    int initialised = 0, finalised = 0;
    MPI_Initialized(&initialised);
    MPI_Finalized(&finalised);
    if (initialised != 0 && finalised == 0) MPI_Finalize();
  }
};

}  // namespace
}  // namespace agoq

extern "C" agoq::MpiTransport* agoq_mpi_transport() {
  static agoq::OpenMpi transport;
  return &transport;
}

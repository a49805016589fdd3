// Ranks on GPUs over NCCL: the module libagoq_nccl.so. Where all GPUs of a group reach each other's
// memory its exchanges go by their copy engines instead (peer_copies.h), watched in the same way.
//
// NCCL's communicators do not block: a call returns at once and is polled until a deadline, and what is
// queued on a stream is watched by two events, one before it and one behind it. An operation that has
// begun and does not end within the timeout, or that NCCL reports as failed, aborts the communicator,
// which ends its kernels on this GPU, and throws. The time that a stream takes to come to an operation
// does not count.
//
// Nothing is allocated after construction. Values of the host go through memory that the processes of a
// machine share, or, where the ranks are on several, through a fixed piece of GPU memory.
#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <string_view>
#include <utility>

#include "backend/cuda/device.h"
#include "comm/exchange_checks.h"
#include "comm/nccl/peer_copies.h"
#include "comm/rest.h"
#include "comm/shared_host_memory.h"
#include "comm/transports.h"
#include "core/error.h"

namespace agoq {
namespace {

using Clock = std::chrono::steady_clock;
using cuda::stream_of;

// The first to split groups without blocking.
constexpr int kOldestNccl = NCCL_VERSION(2, 18, 1);
// Of host values, over all ranks, that go at a time.
constexpr std::size_t kStagingBytes = std::size_t{1} << 20;
// Operations that may be queued and not done; one more waits for the first of them.
constexpr std::size_t kMostWatched = 1024;

int version() {
  int version = 0;
  ncclGetVersion(&version);
  return version;
}

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

/// Of NCCL's variables that turn something off: the same on all ranks, as NCCL wants them.
bool is_set(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && std::string_view(value) != "0";
}

ncclDataType_t nccl_type(ElementType type) {
  switch (type) {
    case ElementType::kFp32: return ncclFloat32;
    case ElementType::kFp64: return ncclFloat64;
    default: return ncclBfloat16;
  }
}

void expect_cuda(cudaError_t status, std::string_view operation) {
  cuda::expect_success(status, operation);
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Event {
 public:
  Event() { expect_cuda(cudaEventCreateWithFlags(&handle_, cudaEventDisableTiming), "making an event"); }
  ~Event() { cudaEventDestroy(handle_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) {
    expect_cuda(cudaEventRecord(handle_, stream), "recording an event");
  }
  bool is_done() const {
    const cudaError_t status = cudaEventQuery(handle_);
    if (status == cudaErrorNotReady) return false;
    expect_cuda(status, "an operation among ranks");
    return true;
  }

 private:
  cudaEvent_t handle_ = nullptr;
};

class NcclRanks : public Communicator {
 public:
  /// The group of all ranks that give `id`.
  NcclRanks(const NcclId& id, int rank, int size, Backend& backend, const NcclOptions& options)
      : backend_(backend), rank_(rank), size_(size), options_(options) {
    ncclUniqueId nccl_id;
    std::memcpy(&nccl_id, id.data(), sizeof(nccl_id));
    ncclConfig_t config = this->config();
    const ncclResult_t begun = ncclCommInitRankConfig(&group_, size, nccl_id, rank, &config);
    try {
      complete(begun, "joining the other ranks");
    } catch (const Error& error) {
      if (std::string_view(error.what()).find("Duplicate GPU") == std::string_view::npos) throw;
      fail_input(
          "rank {}: two ranks of one machine have the same GPU: start at most as many ranks on a "
          "machine "
          "as it has GPUs, and show each rank all of them or one of its own (CUDA_VISIBLE_DEVICES)",
          rank_);
    }
    prepare();
  }
  /// Takes `group` over.
  NcclRanks(ncclComm_t group, Backend& backend, const NcclOptions& options)
      : backend_(backend), group_(group), options_(options) {
    complete(ncclInProgress, "splitting the ranks into groups");
    expect_nccl(ncclCommUserRank(group_, &rank_), "ncclCommUserRank");
    expect_nccl(ncclCommCount(group_, &size_), "ncclCommCount");
    prepare();
  }

  ~NcclRanks() override {
    leave();
    if (device_staging_ != nullptr) backend_.allocator().release(device_staging_, staging_bytes());
    cudaFreeHost(host_staging_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  NcclRanks(const NcclRanks&) = delete;
  NcclRanks& operator=(const NcclRanks&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string description() const override {
    return fmt::format("NCCL {}{}", version_text(version()),
                       peers_ ? ", exchanges by the GPUs' copy engines" : "");
  }
  bool has_peer_copies() const override { return peers_ != nullptr; }

  void exchange(const Context& context, std::span<const Message> sends,
                std::span<const Message> receives) override {
    expect_messages(*this, sends, receives);
    if (context.workspace.is_measuring() || (sends.empty() && receives.empty())) return;
    constexpr const char* kOperation = "an exchange of gradients or weights";
    if (peers_) {
      return queue(stream_of(context.stream), kOperation, [&](cudaStream_t stream) {
        peers_->exchange(stream, sends, receives, [&](int peer, double seconds) {
          look_after_operations();
          if (seconds > options_.timeout_seconds) fail_absent(kOperation, peer);
        });
        return ncclSuccess;
      });
    }
    queue(stream_of(context.stream), kOperation, [&](cudaStream_t stream) {
      expect_nccl(ncclGroupStart(), "ncclGroupStart");
      for (const Message& message : receives) {
        expect_nccl(ncclRecv(message.memory, message.bytes, ncclUint8, message.peer, group_, stream),
                    kOperation);
      }
      for (const Message& message : sends) {
        expect_nccl(ncclSend(message.memory, message.bytes, ncclUint8, message.peer, group_, stream),
                    kOperation);
      }
      return ncclGroupEnd();
    });
  }

  void all_reduce(const Context& context, const Tensor& x) override {
    expect_summable("all_reduce", x);
    if (context.workspace.is_measuring() || x.count() == 0) return;
    queue(stream_of(context.stream), "an all-reduce", [&](cudaStream_t stream) {
      return ncclAllReduce(x.data, x.data, static_cast<std::size_t>(x.count()), nccl_type(x.type),
                           ncclSum, group_, stream);
    });
  }

  void reduce_scatter(const Context& context, const Tensor& x,
                      std::span<const std::int64_t> counts) override {
    expect_parts(*this, x, counts);
    if (context.workspace.is_measuring() || x.count() == 0) return;
    const ncclDataType_t type = nccl_type(x.type);
    const bool equal = std::all_of(counts.begin(), counts.end(),
                                   [&](std::int64_t count) { return count == counts[0]; });
    constexpr const char* kOperation = "a reduce-scatter";
    queue(stream_of(context.stream), kOperation, [&](cudaStream_t stream) {
      if (equal) {
        const std::size_t bytes = static_cast<std::size_t>(counts[0]) * size_of(x.type);
        return ncclReduceScatter(x.data, x.data + static_cast<std::size_t>(rank_) * bytes,
                                 static_cast<std::size_t>(counts[0]), type, ncclSum, group_, stream);
      }
      expect_nccl(ncclGroupStart(), "ncclGroupStart");
      std::byte* part = x.data;
      for (int r = 0; r < size_; ++r) {
        const auto count = static_cast<std::size_t>(counts[static_cast<std::size_t>(r)]);
        if (count > 0) {
          expect_nccl(ncclReduce(part, part, count, type, ncclSum, r, group_, stream), kOperation);
        }
        part += count * size_of(x.type);
      }
      return ncclGroupEnd();
    });
  }

  void wait(const Context& context) override {
    if (context.workspace.is_measuring()) return;
    wait_for(stream_of(context.stream));
  }

  void gather(const void* mine, void* all, std::size_t bytes) override {
    const auto* const from = static_cast<const std::byte*>(mine);
    auto* const to = static_cast<std::byte*>(all);
    const std::size_t most = shared_ ? SharedHostMemory::kMostBytes : piece_bytes_;
    for (std::size_t first = 0; first < bytes; first += most) {
      const std::size_t piece = std::min(bytes - first, most);
      if (shared_) {
        ++begun_;
        shared_->show(from + first, piece);
      } else {
        gather_piece(from + first, piece);
      }
      for (int r = 0; r < size_; ++r) {
        const auto of_rank = static_cast<std::size_t>(r);
        const std::byte* const shown = shared_ ? await_shown(r) : host_staging_ + of_rank * piece;
        std::memcpy(to + of_rank * bytes + first, shown, piece);
      }
    }
  }

  std::uint64_t begun() const override { return begun_; }
  double set_timeout(double seconds) override {
    return std::exchange(options_.timeout_seconds, seconds);
  }

  std::unique_ptr<Communicator> split(int colour, int key) override {
    constexpr const char* kOperation = "splitting the ranks into groups";
    // A thread of NCCL's writes the group there when it has made it, which may be after the call and
    // after this group is ready again.
    std::atomic_ref<ncclComm_t> part(parts_.emplace_back(nullptr));
    ncclConfig_t config = this->config();
    expect_joined();
    complete(ncclCommSplit(group_, colour, key, &parts_.back(), &config), kOperation);
    Rest rest;
    while (part.load(std::memory_order_acquire) == nullptr) {
      if (rest() > options_.timeout_seconds) fail_late(kOperation);
      ncclResult_t state = ncclSuccess;
      expect_nccl(ncclCommGetAsyncError(group_, &state), kOperation);
      if (state != ncclInProgress) expect_nccl(state, kOperation);
    }
    return std::make_unique<NcclRanks>(part.load(), backend_, options_);
  }

 private:
  struct Watched {
    Event begun, ended;
    const char* operation = nullptr;
    bool is_under_way = false;
    Clock::time_point since;  // when it was first seen under way
  };

  /// Of this group and of those split from it.
  ncclConfig_t config() const {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    if (options_.max_ctas > 0) config.maxCTAs = options_.max_ctas;
    return config;
  }

  std::size_t staging_bytes() const { return piece_bytes_ * static_cast<std::size_t>(size_); }

  void prepare() {
    const std::size_t share = kStagingBytes / static_cast<std::size_t>(size_);
    piece_bytes_ = std::max<std::size_t>(share / kArenaAlignment, 1) * kArenaAlignment;
    device_staging_ = backend_.allocator().allocate(staging_bytes());
    void* host = nullptr;
    expect_cuda(cudaMallocHost(&host, staging_bytes()), "allocating memory for values of ranks");
    host_staging_ = static_cast<std::byte*>(host);
    expect_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
    watched_ = std::make_unique<std::array<Watched, kMostWatched>>();
    // What is turned off for NCCL is not wanted here either.
    if (is_set("NCCL_SHM_DISABLE")) return;
    std::unique_ptr<SharedHostMemory> shared = SharedHostMemory::open(*this);
    if (shared && options_.peer_copies && !is_set("NCCL_P2P_DISABLE")) {
      peers_ = PeerCopies::connect(*this, backend_, *shared);
    }
    shared_ = std::move(shared);  // until then values go by NCCL
  }

  /// Ends membership. The regular way takes all ranks; where this one has failed, they may be gone.
  void leave() {
    if (group_ == nullptr) return;
    bool regular = std::uncaught_exceptions() == 0;
    if (regular) {
      if (peers_) peers_->unmap();
      ncclResult_t state = ncclCommFinalize(group_);
      Rest rest;
      while (state == ncclInProgress && rest() < options_.timeout_seconds) {
        if (ncclCommGetAsyncError(group_, &state) != ncclSuccess) state = ncclInternalError;
      }
      regular = state == ncclSuccess;
    }
    if (regular) {
      ncclCommDestroy(group_);
    } else {
      ncclCommAbort(group_);
    }
    group_ = nullptr;
  }

  void abort() {
    if (peers_) peers_->release();
    if (group_ != nullptr) ncclCommAbort(group_);
    group_ = nullptr;
  }

  void expect_joined() const {
    check(group_ != nullptr, "rank {}: the ranks have been left after a failure: start the run again",
          rank_);
  }

  /// Throws unless a call has succeeded or is under way.
  void expect_nccl(ncclResult_t result, const char* operation) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const std::string words = ncclGetLastError(nullptr);
    abort();
    fail("rank {}: {} failed: NCCL: {}{}{}; NCCL_DEBUG=WARN shows more", rank_, operation,
         ncclGetErrorString(result), words.empty() ? "" : ": ", words.substr(0, words.find('\n')));
  }

  /// Polls a call that has returned `result` until it is done.
  void complete(ncclResult_t result, const char* operation) {
    Rest rest;
    while (result == ncclInProgress) {
      if (rest() > options_.timeout_seconds) fail_late(operation);
      ncclResult_t state = ncclSuccess;
      expect_nccl(ncclCommGetAsyncError(group_, &state), operation);
      result = state;
    }
    expect_nccl(result, operation);
  }

  [[noreturn]] void fail_late(const char* operation) {
    abort();
    throw LateError(*this, operation, options_.timeout_seconds, {});
  }

  [[noreturn]] void fail_absent(const char* operation, int peer) {
    abort();
    throw LateError(*this, operation, options_.timeout_seconds, {peer});
  }

  /// Queues what `call` calls on the stream and watches it.
  template <typename Call>
  void queue(cudaStream_t stream, const char* operation, Call call) {
    ++begun_;
    expect_joined();
    Rest rest;
    while (watched_count_ == kMostWatched) {
      look_after_operations();
      rest();
    }
    Watched& watched = (*watched_)[(first_watched_ + watched_count_) % kMostWatched];
    watched.operation = operation;
    watched.is_under_way = false;
    watched.begun.record(stream);
    complete(call(stream), operation);
    watched.ended.record(stream);
    ++watched_count_;
  }

  /// Throws where an operation has failed or is late.
  void look_after_operations() {
    expect_joined();
    ncclResult_t state = ncclSuccess;
    expect_nccl(ncclCommGetAsyncError(group_, &state), "asking for failed operations");
    while (watched_count_ > 0) {
      Watched& oldest = (*watched_)[first_watched_];
      expect_nccl(state, oldest.operation);
      if (!oldest.ended.is_done()) {
        if (!oldest.begun.is_done()) return;
        if (!oldest.is_under_way) {
          oldest.is_under_way = true;
          oldest.since = Clock::now();
        } else if (seconds_since(oldest.since) > options_.timeout_seconds) {
          fail_late(oldest.operation);
        }
        return;
      }
      first_watched_ = (first_watched_ + 1) % kMostWatched;
      --watched_count_;
    }
    expect_nccl(state, "an operation among ranks");
  }

  void wait_for(cudaStream_t stream) {
    caught_up_.record(stream);
    Rest rest;
    while (!caught_up_.is_done()) {
      look_after_operations();
      rest();
    }
    look_after_operations();
  }

  const std::byte* await_shown(int rank) {
    expect_joined();
    Rest rest;
    while (true) {
      if (const std::byte* const shown = shared_->shown_by(rank)) return shown;
      look_after_operations();
      if (rest() > options_.timeout_seconds) fail_absent("a gathering of values", rank);
    }
  }

  /// host_staging_[r * bytes ...] = what rank r gave as `mine`.
  void gather_piece(const std::byte* mine, std::size_t bytes) {
    const std::size_t own = static_cast<std::size_t>(rank_) * bytes;
    std::memcpy(host_staging_ + own, mine, bytes);
    constexpr const char* kOperation = "a gathering of values";
    expect_cuda(cudaMemcpyAsync(device_staging_ + own, host_staging_ + own, bytes,
                                cudaMemcpyHostToDevice, stream_),
                kOperation);
    queue(stream_, kOperation, [&](cudaStream_t stream) {
      return ncclAllGather(device_staging_ + own, device_staging_, bytes, ncclUint8, group_, stream);
    });
    expect_cuda(cudaMemcpyAsync(host_staging_, device_staging_, bytes * static_cast<std::size_t>(size_),
                                cudaMemcpyDeviceToHost, stream_),
                kOperation);
    wait_for(stream_);
  }

  Backend& backend_;
  ncclComm_t group_ = nullptr;
  std::deque<ncclComm_t> parts_;  // that split() has asked for; addresses that NCCL writes to stay
  int rank_ = 0;
  int size_ = 1;
  NcclOptions options_;
  std::atomic<std::uint64_t> begun_ = 0;
  // For values of the host.
  cudaStream_t stream_ = nullptr;
  std::size_t piece_bytes_ = 0;
  std::byte* device_staging_ = nullptr;
  std::byte* host_staging_ = nullptr;
  // What is queued and was not seen done, oldest first, in a ring.
  std::unique_ptr<std::array<Watched, kMostWatched>> watched_;
  std::size_t first_watched_ = 0;
  std::size_t watched_count_ = 0;
  Event caught_up_;
  std::unique_ptr<SharedHostMemory> shared_;  // where all ranks are on one machine
  std::unique_ptr<PeerCopies> peers_;         // where exchanges go by copies
};

class Nccl : public NcclTransport {
 public:
  NcclId new_id() override {
    expect_version();
    ncclUniqueId id;
    const ncclResult_t result = ncclGetUniqueId(&id);
    check(result == ncclSuccess, "NCCL: no id for the group of ranks could be made: {}: {}",
          ncclGetErrorString(result), ncclGetLastError(nullptr));
    static_assert(sizeof(id) == sizeof(NcclId));
    NcclId bytes;
    std::memcpy(bytes.data(), &id, sizeof(id));
    return bytes;
  }

  std::unique_ptr<Communicator> join(const NcclId& id, int rank, int size, Backend& backend,
                                     const NcclOptions& options) override {
    if (size == 1) return single_rank();
    expect_version();
    backend.expect_ready();  // a message about a missing GPU that is better than NCCL's
    return std::make_unique<NcclRanks>(id, rank, size, backend, options);
  }

 private:
  static void expect_version() {
    check_input(version() >= kOldestNccl, "NCCL {} or newer is needed and {} was found: update it",
                version_text(kOldestNccl), version_text(version()));
  }
};

}  // namespace
}  // namespace agoq

extern "C" agoq::NcclTransport* agoq_nccl_transport() {
  static agoq::Nccl transport;
  return &transport;
}

#include "comm/nccl/peer_copies.h"

#include <cuda.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "backend/cuda/device.h"
#include "comm/rest.h"
#include "core/error.h"

namespace agoq {
namespace {

// From one flag to the next: no two share a line of the cache.
constexpr std::size_t kFlagStride = 128;
constexpr std::size_t kFlagBytes = std::size_t{2} << 20;

constexpr const char* kOperation = "a copy to another rank's GPU";

void expect_cuda(cudaError_t status) { cuda::expect_success(status, kOperation); }

/// The driver's functions, without linking to it: the module is opened on machines that have none. Where
/// one is missing nothing is mapped, and none is called, which clang's analyzer cannot see.
struct Driver {
  decltype(&cuStreamWriteValue32) write_value = nullptr;
  decltype(&cuStreamWaitValue32) wait_value = nullptr;
  decltype(&cuMemGetAddressRange) address_range = nullptr;
  decltype(&cuPointerGetAttribute) attribute = nullptr;

  bool is_complete() const { return write_value && wait_value && address_range && attribute; }
};

template <typename Function>
void find(const char* name, Function& function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  constexpr unsigned kSince = 12000;  // of the functions' forms that cuda.h declares
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &found, kSince, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (status != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  if (result == cudaDriverEntryPointSuccess) function = reinterpret_cast<Function>(found);
}

const Driver& driver() {
  static const Driver driver = [] {
    Driver found;
    find("cuStreamWriteValue32", found.write_value);
    find("cuStreamWaitValue32", found.wait_value);
    find("cuMemGetAddressRange", found.address_range);
    find("cuPointerGetAttribute", found.attribute);
    return found;
  }();
  return driver;
}

void expect_driver(CUresult status) {
  check(status == CUDA_SUCCESS, "{}: the driver reports error {}", kOperation, static_cast<int>(status));
}

CUdeviceptr address_of(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

}  // namespace

struct PeerCopies::State {
  State(Communicator& ranks, Backend& used, SharedHostMemory& shared_memory)
      : backend(used), shared(shared_memory), rank(ranks.rank()), size(ranks.size()) {}
  ~State() {
    unmap();
    if (releasing != nullptr) cudaStreamDestroy(releasing);
    if (flags != nullptr) backend.allocator().release(flags, kFlagBytes);
  }

  static std::size_t index(int peer) { return static_cast<std::size_t>(peer); }
  /// Of `of`'s flags: that `peer` is ready to receive, and that it has sent.
  std::byte* ready_flag(std::byte* of, int peer) const { return of + index(peer) * kFlagStride; }
  std::byte* sent_flag(std::byte* of, int peer) const { return of + index(size + peer) * kFlagStride; }

  bool map_flags(Communicator& ranks);
  void unmap();
  Offer offer_of(const Message& message);
  std::byte* map(int peer, const Offer& offer);

  Backend& backend;
  SharedHostMemory& shared;
  int rank, size;
  std::byte* flags = nullptr;          // of this rank
  std::vector<std::byte*> peer_flags;  // of the others, mapped
  cudaStream_t releasing = nullptr;
  // Of this rank's allocations that were offered, by their numbers: those are never used again, where
  // addresses are.
  std::map<unsigned long long, AllocationHandle> handles;
  // By peer and handle: a driver that hands freed memory out again gives it the handle it had.
  std::map<std::pair<int, AllocationHandle>, std::byte*> mapped;
  std::vector<std::uint32_t> receiving_number, sending_number;  // per peer: exchanges so far
  std::vector<std::byte*> destinations;                         // of the sends under way
};

/// False where a GPU's memory cannot be reached.
bool PeerCopies::State::map_flags(Communicator& ranks) {
  struct Mine {
    bool can_take_part = false;
    cudaIpcMemHandle_t handle{};
  } mine;
  mine.can_take_part = driver().is_complete();
  if (mine.can_take_part) {
    flags = backend.allocator().allocate(kFlagBytes);
    expect_cuda(cudaMemset(flags, 0, kFlagBytes));
    expect_cuda(cudaDeviceSynchronize());
    expect_cuda(cudaStreamCreateWithFlags(&releasing, cudaStreamNonBlocking));
    mine.can_take_part = cudaIpcGetMemHandle(&mine.handle, flags) == cudaSuccess;
  }
  const std::vector<Mine> all = ranks.gather_values(mine);
  bool reaches_all =
      std::all_of(all.begin(), all.end(), [](const Mine& of) { return of.can_take_part; });
  peer_flags.assign(index(size), nullptr);
  for (int peer = 0; reaches_all && peer < size; ++peer) {
    if (peer == rank) continue;
    void* memory = nullptr;
    reaches_all = cudaIpcOpenMemHandle(&memory, all[index(peer)].handle,
                                       cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
    if (reaches_all) peer_flags[index(peer)] = static_cast<std::byte*>(memory);
  }
  cudaGetLastError();  // what was only asked for is no failure
  const std::vector<char> reached = ranks.gather_values(static_cast<char>(reaches_all));
  return std::count(reached.begin(), reached.end(), 1) == size;
}

void PeerCopies::State::unmap() {
  for (const auto& [key, memory] : mapped) cudaIpcCloseMemHandle(memory);
  mapped.clear();
  for (std::byte*& memory : peer_flags) {
    if (memory != nullptr) cudaIpcCloseMemHandle(memory);
    memory = nullptr;
  }
}

std::unique_ptr<PeerCopies> PeerCopies::connect(Communicator& ranks, Backend& backend,
                                                SharedHostMemory& shared) {
  auto state = std::make_unique<State>(ranks, backend, shared);
  if (!state->map_flags(ranks)) return nullptr;
  state->receiving_number.assign(State::index(state->size), 0);
  state->sending_number.assign(State::index(state->size), 0);
  return std::unique_ptr<PeerCopies>(new PeerCopies(std::move(state)));
}

PeerCopies::PeerCopies(std::unique_ptr<State> state) : state_(std::move(state)) {}
PeerCopies::~PeerCopies() = default;

Offer PeerCopies::State::offer_of(const Message& message) {
  CUdeviceptr base = 0;
  // NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage)
  expect_driver(driver().address_range(&base, nullptr, address_of(message.memory)));
  unsigned long long number = 0;
  expect_driver(driver().attribute(&number, CU_POINTER_ATTRIBUTE_BUFFER_ID, base));
  const auto [place, is_new] = handles.try_emplace(number);
  if (is_new) {
    cudaIpcMemHandle_t handle;
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's addresses are numbers
    expect_cuda(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(base)));
    static_assert(sizeof(handle) == sizeof(AllocationHandle));
    std::memcpy(place->second.data(), &handle, sizeof(handle));
  }
  return {place->second, address_of(message.memory) - base, message.bytes};
}

std::byte* PeerCopies::State::map(int peer, const Offer& offer) {
  std::byte*& memory = mapped[{peer, offer.allocation}];
  if (memory == nullptr) {
    cudaIpcMemHandle_t handle;
    std::memcpy(&handle, offer.allocation.data(), sizeof(handle));
    void* opened = nullptr;
    expect_cuda(cudaIpcOpenMemHandle(&opened, handle, cudaIpcMemLazyEnablePeerAccess));
    memory = static_cast<std::byte*>(opened);
  }
  return memory + offer.offset;
}

void PeerCopies::exchange(cudaStream_t stream, std::span<const Message> sends,
                          std::span<const Message> receives,
                          const std::function<void(int peer, double seconds)>& look_after) {
  State& state = *state_;
  const Driver& driver = agoq::driver();
  const auto receives_from = [&](int peer) {
    return std::any_of(receives.begin(), receives.end(),
                       [&](const Message& message) { return message.peer == peer; });
  };
  for (int peer = 0; peer < state.size; ++peer) {
    if (!receives_from(peer)) continue;
    const std::uint32_t number = ++state.receiving_number[State::index(peer)];
    std::byte* const flag = state.ready_flag(state.peer_flags[State::index(peer)], state.rank);
    expect_driver(driver.write_value(stream, address_of(flag), number, CU_STREAM_WRITE_VALUE_DEFAULT));
  }

  // Offers and takes in turn: two ranks that both offered more than a ring holds would wait for ever.
  state.destinations.assign(sends.size(), nullptr);
  std::size_t offered = 0, taken = 0;
  Rest rest;
  while (offered < receives.size() || taken < sends.size()) {
    bool moved = false;
    while (offered < receives.size()) {
      const Message& message = receives[offered];
      if (!state.shared.offers(state.rank, message.peer).offer(state.offer_of(message))) break;
      ++offered;
      moved = true;
    }
    while (taken < sends.size()) {
      const Message& message = sends[taken];
      Offer offer;
      if (!state.shared.offers(message.peer, state.rank).take(offer)) break;
      check(offer.bytes == message.bytes,
            "rank {} sends {} bytes to rank {}, which expects {}: the ranks do not exchange the same",
            state.rank, message.bytes, message.peer, offer.bytes);
      state.destinations[taken++] = state.map(message.peer, offer);
      moved = true;
    }
    if (moved) {
      rest = {};
    } else {
      const double seconds = rest();
      look_after(taken < sends.size() ? sends[taken].peer : receives[offered].peer, seconds);
    }
  }

  for (int distance = 1; distance < state.size; ++distance) {
    const int peer = (state.rank + distance) % state.size;
    std::uint32_t number = 0;
    for (std::size_t i = 0; i < sends.size(); ++i) {
      if (sends[i].peer != peer) continue;
      if (number == 0) {
        number = ++state.sending_number[State::index(peer)];
        // NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage)
        expect_driver(driver.wait_value(stream, address_of(state.ready_flag(state.flags, peer)), number,
                                        CU_STREAM_WAIT_VALUE_GEQ));
      }
      expect_cuda(cudaMemcpyAsync(state.destinations[i], sends[i].memory, sends[i].bytes,
                                  cudaMemcpyDeviceToDevice, stream));
    }
    if (number == 0) continue;
    std::byte* const flag = state.sent_flag(state.peer_flags[State::index(peer)], state.rank);
    expect_driver(driver.write_value(stream, address_of(flag), number, CU_STREAM_WRITE_VALUE_DEFAULT));
  }
  for (int peer = 0; peer < state.size; ++peer) {
    if (!receives_from(peer)) continue;
    expect_driver(driver.wait_value(stream, address_of(state.sent_flag(state.flags, peer)),
                                    state.receiving_number[State::index(peer)],
                                    CU_STREAM_WAIT_VALUE_GEQ));
  }
}

void PeerCopies::unmap() { state_->unmap(); }

void PeerCopies::release() {
  State& state = *state_;
  // Far ahead of any number that is waited for: they are compared as one that wraps around.
  constexpr std::uint32_t kFarAhead = std::uint32_t{1} << 30;
  for (int peer = 0; peer < state.size; ++peer) {
    // NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage)
    driver().write_value(state.releasing, address_of(state.ready_flag(state.flags, peer)),
                         state.sending_number[State::index(peer)] + kFarAhead,
                         CU_STREAM_WRITE_VALUE_DEFAULT);
    driver().write_value(state.releasing, address_of(state.sent_flag(state.flags, peer)),
                         state.receiving_number[State::index(peer)] + kFarAhead,
                         CU_STREAM_WRITE_VALUE_DEFAULT);
  }
}

}  // namespace agoq

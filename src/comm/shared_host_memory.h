// SharedHostMemory: host memory that the ranks of one machine share, and what passes through it: values
// of all ranks, and offers of memory to copy into (peer_copies.h). Lock-free; who waits polls.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/communicator.h"

namespace agoq {

/// What another process opens an allocation of device memory by (cudaIpcMemHandle_t).
using AllocationHandle = std::array<std::byte, 64>;

/// Device memory that another process may write to.
struct Offer {
  AllocationHandle allocation{};
  std::uint64_t offset = 0;  // of the memory in it
  std::uint64_t bytes = 0;
};

/// Offers of one rank to one other, in order. What either side writes lies in cache lines of its own.
class OfferRing {  // NOLINT(clang-analyzer-optin.performance.Padding)
 public:
  static constexpr std::size_t kMostOffers = 256;  // that were not taken

  /// False where the other has not taken enough of the earlier ones.
  bool offer(const Offer& offer);
  /// False where there is none.
  bool take(Offer& offer);

 private:
  std::atomic<std::uint64_t> offered_{0};
  alignas(64) std::atomic<std::uint64_t> taken_{0};
  alignas(64) std::array<Offer, kMostOffers> offers_;
};

class SharedHostMemory {
 public:
  /// Of values of one rank that are gathered at a time.
  static constexpr std::size_t kMostBytes = std::size_t{64} << 10;

  /// Null on all ranks unless all are on one machine and it has the memory. Collective.
  static std::unique_ptr<SharedHostMemory> open(Communicator& ranks);
  ~SharedHostMemory();
  SharedHostMemory(const SharedHostMemory&) = delete;
  SharedHostMemory& operator=(const SharedHostMemory&) = delete;

  OfferRing& offers(int receiver, int sender) const;

  // --- one gathering after the other, the same ones on all ranks ---
  /// Shows the other ranks `bytes` bytes, kMostBytes at most.
  void show(const void* mine, std::size_t bytes);
  /// What `rank` has shown since this rank's last show(); null while it has not.
  const std::byte* shown_by(int rank) const;

 private:
  struct Slot;
  SharedHostMemory(int rank, int size) : rank_(rank), size_(size) {}
  std::size_t bytes() const;
  bool map(const char* name, int flags);
  Slot& slot(int rank) const;

  int rank_, size_;
  std::byte* memory_ = nullptr;  // OfferRing [size, size], Slot [size]
  std::uint64_t shown_ = 0;      // gatherings so far
};

}  // namespace agoq

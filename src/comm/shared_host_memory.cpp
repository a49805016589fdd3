#include "comm/shared_host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "core/error.h"

namespace agoq {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "processes share it");

bool OfferRing::offer(const Offer& offer) {
  const std::uint64_t number = offered_.load(std::memory_order_relaxed);
  if (number - taken_.load(std::memory_order_acquire) == kMostOffers) return false;
  offers_[number % kMostOffers] = offer;
  offered_.store(number + 1, std::memory_order_release);
  return true;
}

bool OfferRing::take(Offer& offer) {
  const std::uint64_t number = taken_.load(std::memory_order_relaxed);
  if (number == offered_.load(std::memory_order_acquire)) return false;
  offer = offers_[number % kMostOffers];
  taken_.store(number + 1, std::memory_order_release);
  return true;
}

// A rank that shows for the n-th time has seen what all showed for the (n - 1)-th, and showed it after
// they had read what it showed for the (n - 2)-th: two places are enough.
struct SharedHostMemory::Slot {
  std::atomic<std::uint64_t> shown{0};
  alignas(64) std::array<std::array<std::byte, kMostBytes>, 2> places;
};

std::size_t SharedHostMemory::bytes() const {
  const auto ranks = static_cast<std::size_t>(size_);
  return ranks * ranks * sizeof(OfferRing) + ranks * sizeof(Slot);
}

/// Memory is zero where it is new: empty rings, and nothing shown.
bool SharedHostMemory::map(const char* name, int flags) {
  const int file = shm_open(name, flags, S_IRUSR | S_IWUSR);
  if (file < 0) return false;
  // Reserved and not only promised: at its first use a full /dev/shm would end the process.
  const bool creates = (flags & O_CREAT) != 0;
  if (!creates || posix_fallocate(file, 0, static_cast<off_t>(bytes())) == 0) {
    void* const mapped = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) memory_ = static_cast<std::byte*>(mapped);
  }
  close(file);
  return memory_ != nullptr;
}

std::unique_ptr<SharedHostMemory> SharedHostMemory::open(Communicator& ranks) {
  std::unique_ptr<SharedHostMemory> shared(new SharedHostMemory(ranks.rank(), ranks.size()));
  std::array<char, 64> name{};
  if (ranks.rank() == 0) {
    std::random_device random;
    const std::string text = fmt::format("/agoq-{}-{:08x}{:08x}", getpid(), random(), random());
    std::copy(text.begin(), text.end(), name.begin());
    if (!shared->map(name.data(), O_RDWR | O_CREAT | O_EXCL)) {
      shm_unlink(name.data());
      name = {};
    }
  }
  name = ranks.gather_values(name).front();
  const bool is_there = name[0] != 0;
  const bool is_mapped = is_there && (ranks.rank() == 0 || shared->map(name.data(), O_RDWR));
  const std::vector<char> mapped = ranks.gather_values(static_cast<char>(is_mapped));
  if (is_there && ranks.rank() == 0) shm_unlink(name.data());
  const bool all = std::count(mapped.begin(), mapped.end(), 1) == ranks.size();
  return all ? std::move(shared) : nullptr;
}

SharedHostMemory::~SharedHostMemory() {
  if (memory_ != nullptr) munmap(memory_, bytes());
}

OfferRing& SharedHostMemory::offers(int receiver, int sender) const {
  return reinterpret_cast<OfferRing*>(memory_)[receiver * size_ + sender];
}

SharedHostMemory::Slot& SharedHostMemory::slot(int rank) const {
  std::byte* const slots = memory_ + static_cast<std::size_t>(size_ * size_) * sizeof(OfferRing);
  return reinterpret_cast<Slot*>(slots)[rank];
}

void SharedHostMemory::show(const void* mine, std::size_t bytes) {
  ++shown_;
  std::memcpy(slot(rank_).places[shown_ % 2].data(), mine, bytes);
  slot(rank_).shown.store(shown_, std::memory_order_release);
}

const std::byte* SharedHostMemory::shown_by(int rank) const {
  Slot& of_rank = slot(rank);
  if (of_rank.shown.load(std::memory_order_acquire) < shown_) return nullptr;
  return of_rank.places[shown_ % 2].data();
}

}  // namespace agoq

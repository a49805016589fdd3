#include "core/memory.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <utility>

namespace agoq {
namespace {

class HostAllocator : public Allocator {
 public:
  std::byte* allocate(std::size_t bytes) override {
    void* memory = nullptr;
    check(posix_memalign(&memory, kArenaAlignment, std::max<std::size_t>(bytes, 1)) == 0,
          "{} bytes of host memory were needed and are not there: choose a smaller micro-batch or "
          "sequence, or more recomputation",
          bytes);
    return static_cast<std::byte*>(memory);
  }
  void release(std::byte* memory, std::size_t) override { std::free(memory); }
};

// Measuring arenas start at addresses that no process maps, so that a touch faults at once, and so far
// apart that no two of them overlap: a tensor's address tells which arena it came from, as it does in
// arenas that own memory. x86-64 and AArch64 processes end at 2^47 and 2^48.
constexpr std::size_t kMeasuringBase = std::size_t{1} << 48;
constexpr std::size_t kMeasuringCapacity = std::size_t{1} << 46;

std::byte* next_measuring_base() {
  static std::atomic<std::size_t> arenas{0};
  constexpr std::size_t kPlaces = (std::size_t{1} << 62) / kMeasuringCapacity;
  return std::bit_cast<std::byte*>(kMeasuringBase + arenas++ % kPlaces * kMeasuringCapacity);
}

std::size_t round_up(std::size_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

}  // namespace

Allocator& host_allocator() {
  static HostAllocator allocator;
  return allocator;
}

Arena::Arena(std::string name, Allocator& allocator, std::size_t capacity)
    : name_(std::move(name)),
      allocator_(&allocator),
      base_(allocator.allocate(round_up(capacity))),
      capacity_(round_up(capacity)) {}

Arena::Arena(std::string name)
    : name_(std::move(name)), base_(next_measuring_base()), capacity_(kMeasuringCapacity) {}

Arena Arena::measuring(std::string name) { return Arena(std::move(name)); }

Arena::Arena(Arena&& other) noexcept
    : name_(std::move(other.name_)),
      allocator_(std::exchange(other.allocator_, nullptr)),
      base_(std::exchange(other.base_, nullptr)),
      capacity_(std::exchange(other.capacity_, 0)),
      used_(std::exchange(other.used_, 0)),
      high_water_(other.high_water_) {}

Arena::~Arena() {
  if (allocator_ != nullptr) allocator_->release(base_, capacity_);
}

std::byte* Arena::take(std::size_t bytes) {
  const std::size_t size = round_up(bytes);
  check(size <= capacity_ - used_,
        "the arena '{}' was planned with {} bytes, {} are in use and {} more were asked for: the "
        "plan and the run disagree",
        name_, capacity_, used_, size);
  std::byte* piece = base_ + used_;
  used_ += size;
  high_water_ = std::max(high_water_, used_);
  return piece;
}

Tensor Arena::take(ElementType type, Shape shape) {
  const auto bytes = static_cast<std::size_t>(shape.count()) * size_of(type);
  return {take(bytes), type, shape};
}

}  // namespace agoq

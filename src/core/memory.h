// Memory is planned: it comes from arenas of known size, and nothing is allocated inside a step.
//
// An Arena hands out pieces of one allocation in stack order. A *measuring* arena owns nothing: it
// hands out addresses that must not be touched and records how much was in use at most. The memory
// model runs the training step itself on measuring arenas (train/run_plan.h), so what is planned
// and what is used cannot drift apart.
#pragma once

#include <cstddef>
#include <string>

#include "core/tensor.h"

namespace agoq {

/// Where an arena's memory comes from: a backend's, or one lent by a host framework.
class Allocator {
 public:
  virtual ~Allocator() = default;
  /// `bytes` bytes aligned to kArenaAlignment; throws Error when there are none.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void release(std::byte* memory, std::size_t bytes) = 0;
};

/// Host memory.
Allocator& host_allocator();

/// Every piece starts at a multiple of this many bytes and takes a multiple of it.
inline constexpr std::size_t kArenaAlignment = 256;

class Arena {
 public:
  /// Owns `capacity` bytes of `allocator`, taken now.
  Arena(std::string name, Allocator& allocator, std::size_t capacity);
  /// Owns nothing and measures.
  static Arena measuring(std::string name);

  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&&) = delete;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  /// Uninitialised memory. Throws Error naming the arena when it is full.
  std::byte* take(std::size_t bytes);
  Tensor take(ElementType type, Shape shape);

  bool is_measuring() const { return allocator_ == nullptr; }
  const std::string& name() const { return name_; }
  std::size_t capacity() const { return capacity_; }
  std::size_t used() const { return used_; }
  /// The most bytes in use at once since construction.
  std::size_t high_water() const { return high_water_; }

  /// Gives back, at its end, all that was taken during its life.
  class Scope {
   public:
    explicit Scope(Arena& arena) : arena_(arena), mark_(arena.used_) {}
    ~Scope() { arena_.used_ = mark_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arena& arena_;
    std::size_t mark_;
  };

 private:
  explicit Arena(std::string name);

  std::string name_;
  Allocator* allocator_ = nullptr;
  std::byte* base_ = nullptr;
  std::size_t capacity_ = 0;
  std::size_t used_ = 0;
  std::size_t high_water_ = 0;
};

}  // namespace agoq

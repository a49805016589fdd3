// Communicator: a group of ranks and what they exchange, over MPI (ranks on CPUs), NCCL (ranks on GPUs)
// or nothing at all (a group of one).
//
// Conventions
//   * Every rank of the group calls the same operations in the same order.
//   * Operations on tensors are queued on the context's stream, in whose order memory may be read and
//     reused; on the CPU they are done on return. gather() is on host memory and waits.
//   * On a measuring context nothing is exchanged.
//   * A group of one is an ordinary group: the same calls, nothing to send.
//   * An operation that does not complete within the timeout throws LateError; one that the transport
//     reports as failed, Error (kFailure).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "backend/context.h"
#include "core/error.h"
#include "core/tensor.h"

namespace agoq {

class Communicator;

/// Bytes to or from one rank of the group.
struct Message {
  int peer = 0;
  std::byte* memory = nullptr;  // backend memory
  std::size_t bytes = 0;
};

/// An operation that did not complete within the timeout.
class LateError : public Error {
 public:
  /// `operation` is "an all-reduce"; `missing` are the ranks that did not come to it, none where the
  /// transport does not know them.
  LateError(const Communicator& group, const std::string& operation, double seconds,
            std::vector<int> missing);

  const std::vector<int>& missing() const { return missing_; }
  /// "did not come to an all-reduce within 60 s"
  const std::string& predicate() const { return predicate_; }

 private:
  std::vector<int> missing_;
  std::string predicate_;
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;  // [0, size)
  virtual int size() const = 0;
  virtual std::string description() const = 0;  // "Open MPI 4.1.4", "NCCL 2.28.9", "one rank"
  /// True where exchanges go by copies into the others' memory, for which a transport needs none.
  virtual bool has_peer_copies() const { return false; }

  /// Sends and receives together, like one group of NCCL's. Between two ranks the n-th message sent is
  /// the n-th received, of the same size. Memory received into overlaps no other message. Not to
  /// oneself.
  virtual void exchange(const Context&, std::span<const Message> sends,
                        std::span<const Message> receives) = 0;
  /// x = the library's sum of x over the ranks, in x's element type: fp32, bf16 or fp64. The order of
  /// the sum is the library's; all ranks get the same bits.
  virtual void all_reduce(const Context&, const Tensor& x) = 0;
  /// Of x, seen as one part per rank with counts[r] elements, the rank's own part becomes the library's
  /// sum over the ranks; the others hold anything afterwards.  x fp32 or bf16.
  virtual void reduce_scatter(const Context&, const Tensor& x, std::span<const std::int64_t> counts) = 0;

  /// Returns when all that is queued on the context's stream is done. What waits for it in another way
  /// waits for ever when a rank is gone.
  virtual void wait(const Context&) {}

  /// all[r * bytes ...] = what rank r gave as `mine`, in host memory.
  virtual void gather(const void* mine, void* all, std::size_t bytes) = 0;

  /// Operations that this rank has come to, which all ranks do in the same order: one that has come to
  /// fewer is what the others wait for. May be called by any thread. 0 where nobody counts.
  virtual std::uint64_t begun() const { return 0; }

  /// Seconds that an operation may take from now on; returns what it was before. For waiting where ranks
  /// may rightly be late by any time. A transport without a deadline takes no notice.
  virtual double set_timeout(double seconds) { return seconds; }

  /// The group of the ranks that gave the same `colour`, ordered by `key`, then by rank.
  virtual std::unique_ptr<Communicator> split(int colour, int key) = 0;

  // --- made of the above ---
  /// One value of every rank, in rank order.
  template <typename Value>
  std::vector<Value> gather_values(const Value& mine) {
    static_assert(std::is_trivially_copyable_v<Value>);
    std::vector<Value> all(static_cast<std::size_t>(size()));
    gather(&mine, all.data(), sizeof(Value));
    return all;
  }
  /// One text of every rank, in rank order; lengths may differ.
  std::vector<std::string> gather_texts(const std::string& mine);
  /// Returns when every rank has called it.
  void barrier() { gather_values<char>(0); }
};

/// A group of one rank.
std::unique_ptr<Communicator> single_rank();

/// Rank 0 of a group that is not there, for plans: exchanges nothing on measuring contexts, refuses
/// others, and gathers its own values from every rank.
std::unique_ptr<Communicator> planned_ranks(int size);

}  // namespace agoq

// Ranks that are threads of one process: what tests run in place of MPI's or NCCL's.
#pragma once

#include <barrier>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "comm/exchange_checks.h"

namespace agoq::testing_comm {

/// What the ranks of a group see of each other between two barriers.
struct Board {
  explicit Board(int size) : places(static_cast<std::size_t>(size)), barrier(size) {}
  struct Place {
    std::span<const Message> sends;
    const void* value = nullptr;
  };
  std::vector<Place> places;
  std::barrier<> barrier;
};

class ThreadRank : public Communicator {
 public:
  ThreadRank(Board& board, int rank) : board_(board), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(board_.places.size()); }
  std::string description() const override { return "threads"; }

  void exchange(const Context& context, std::span<const Message> sends,
                std::span<const Message> receives) override {
    expect_messages(*this, sends, receives);
    if (context.workspace.is_measuring()) return;
    board_.places[static_cast<std::size_t>(rank_)].sends = sends;
    board_.barrier.arrive_and_wait();
    std::vector<std::size_t> next(board_.places.size(), 0);  // message from each rank
    for (const Message& message : receives) {
      const auto from = static_cast<std::size_t>(message.peer);
      const std::span<const Message> sent = board_.places[from].sends;
      std::size_t& at = next[from];
      while (at < sent.size() && sent[at].peer != rank_) ++at;
      check(at < sent.size() && sent[at].bytes == message.bytes,
            "rank {} expects {} bytes of rank {}, which does not send them", rank_, message.bytes, from);
      std::memcpy(message.memory, sent[at++].memory, message.bytes);
    }
    for (std::size_t from = 0; from < next.size(); ++from) {
      const std::span<const Message> sent = board_.places[from].sends;
      for (std::size_t at = next[from]; at < sent.size(); ++at) {
        check(sent[at].peer != rank_, "rank {} does not expect all that rank {} sends", rank_, from);
      }
    }
    board_.barrier.arrive_and_wait();
  }
  void all_reduce(const Context&, const Tensor&) override { fail("threads: all_reduce is not needed"); }
  void reduce_scatter(const Context&, const Tensor&, std::span<const std::int64_t>) override {
    fail("threads: reduce_scatter is not needed");
  }
  void gather(const void* mine, void* all, std::size_t bytes) override {
    board_.places[static_cast<std::size_t>(rank_)].value = mine;
    board_.barrier.arrive_and_wait();
    for (std::size_t from = 0; from < board_.places.size(); ++from) {
      std::memcpy(static_cast<std::byte*>(all) + from * bytes, board_.places[from].value, bytes);
    }
    board_.barrier.arrive_and_wait();
  }
  std::unique_ptr<Communicator> split(int, int) override { fail("threads: split is not needed"); }

 private:
  Board& board_;
  int rank_;
};

/// Runs `work` on `size` ranks. What it throws ends the process: the others would wait.
inline void on_ranks(int size, const std::function<void(Communicator&)>& work) {
  Board board(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&board, &work, rank] {
      ThreadRank communicator(board, rank);
      work(communicator);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace agoq::testing_comm

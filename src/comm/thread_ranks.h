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
  void all_reduce(const Context& context, const Tensor& x) override {
    expect_summable("all_reduce", x);
    if (context.workspace.is_measuring()) return;
    sum(x, 0, x.count());
  }
  void reduce_scatter(const Context& context, const Tensor& x,
                      std::span<const std::int64_t> counts) override {
    expect_parts(*this, x, counts);
    if (context.workspace.is_measuring()) return;
    std::int64_t first = 0;
    for (int r = 0; r < rank_; ++r) first += counts[static_cast<std::size_t>(r)];
    sum(x, first, first + counts[static_cast<std::size_t>(rank_)]);
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
  static double get(const Tensor& x, const std::byte* data, std::int64_t i) {
    if (x.type == ElementType::kFp64) return reinterpret_cast<const double*>(data)[i];
    if (x.type == ElementType::kFp32) return reinterpret_cast<const float*>(data)[i];
    return to_float(reinterpret_cast<const Bf16*>(data)[i]);
  }
  /// Elements [first, last) of x become their sum over the ranks.
  void sum(const Tensor& x, std::int64_t first, std::int64_t last) {
    board_.places[static_cast<std::size_t>(rank_)].value = x.data;
    board_.barrier.arrive_and_wait();
    std::vector<double> sums(static_cast<std::size_t>(last - first), 0.0);
    for (const Board::Place& place : board_.places) {
      for (std::int64_t i = first; i < last; ++i) {
        sums[static_cast<std::size_t>(i - first)] +=
            get(x, static_cast<const std::byte*>(place.value), i);
      }
    }
    board_.barrier.arrive_and_wait();
    for (std::int64_t i = first; i < last; ++i) {
      const double value = sums[static_cast<std::size_t>(i - first)];
      if (x.type == ElementType::kFp64) x.as<double>()[i] = value;
      if (x.type == ElementType::kFp32) x.as<float>()[i] = static_cast<float>(value);
      if (x.type == ElementType::kBf16) x.as<Bf16>()[i] = to_bf16(static_cast<float>(value));
    }
  }

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

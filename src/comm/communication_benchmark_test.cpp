#include "comm/communication_benchmark.h"

#include <gtest/gtest.h>

#include "backend/profiled_backend.h"
#include "comm/thread_ranks.h"

namespace agoq {
namespace {

using testing_comm::Board;
using testing_comm::on_ranks;
using testing_comm::ThreadRank;

TEST(CommunicationBenchmark, TimesEveryVariantAndCountsItsBytes) {
  // Also rows that the ranks do not divide.
  for (const int size : {2, 3}) {
    on_ranks(size, [&](Communicator& ranks) {
      const std::int64_t elements = 16 * kBenchmarkWidth;
      std::vector<double> told;
      const std::vector<CommunicationTime> times = measure_communication(
          ranks, cpu_backend(), elements,
          {.repetitions = 2, .bucket_elements = 40000, .notice = [&](const CommunicationTime& time) {
             told.push_back(time.seconds);
           }});
      ASSERT_EQ(times.size(), 7u);
      ASSERT_EQ(told.size(), times.size());
      for (std::size_t i = 0; i < told.size(); ++i) EXPECT_EQ(told[i], times[i].seconds);
      for (const CommunicationTime& time : times) {
        EXPECT_EQ(time.elements, elements);
        EXPECT_GT(time.seconds, 0) << name_of(time.variant);
        EXPECT_GT(time.wire_bytes, 0) << name_of(time.variant);
        EXPECT_LT(time.relative_error, time.variant == CommunicationVariant::kNaiveFp8 ? 0.1 : 0.05)
            << name_of(time.variant);
      }
      const auto bytes = [&](CommunicationVariant variant) {
        return times[static_cast<std::size_t>(variant)].wire_bytes;
      };
      EXPECT_EQ(bytes(CommunicationVariant::kFp32), 2 * (4 * elements / size * (size - 1)));
      // One byte and a scale of 4 bytes for each 128 in place of 4 bytes.
      if (size == 2) {
        EXPECT_EQ(bytes(CommunicationVariant::kQuanGrad), elements + elements / 32);
        EXPECT_EQ(bytes(CommunicationVariant::kSharded), (elements + elements / 32) / 2);
      }
    });
  }
}

/// Sums less than there is.
class LossyRank : public ThreadRank {
 public:
  using ThreadRank::ThreadRank;
  void exchange(const Context& context, std::span<const Message> sends,
                std::span<const Message> receives) override {
    ThreadRank::exchange(context, sends, receives);
    if (context.workspace.is_measuring()) return;
    for (const Message& message : receives) std::memset(message.memory, 0, message.bytes / 8);
  }
};

TEST(CommunicationBenchmark, RefusesASumThatIsNotTheSum) {
  Board board(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&board, rank] {
      LossyRank ranks(board, rank);
      EXPECT_THROW(measure_communication(ranks, cpu_backend(), 16 * kBenchmarkWidth, {.repetitions = 1}),
                   Error);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CommunicationBenchmark, SaysWhatToDoWhereMemoryIsShort) {
  struct Full : Allocator {
    std::byte* allocate(std::size_t) override { fail("no memory: choose a smaller micro-batch"); }
    void release(std::byte*, std::size_t) override {}
  };
  struct FullBackend : ProfiledBackend {
    using ProfiledBackend::ProfiledBackend;
    Allocator& allocator() override { return full; }
    Full full;
  };
  on_ranks(2, [](Communicator& ranks) {
    FullBackend backend(cpu_backend());
    try {
      measure_communication(ranks, backend, 16 * kBenchmarkWidth, {.repetitions = 1});
      ADD_FAILURE() << "measured in no memory";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what())
                    .find("to reduce 65,536 gradients, and are not there: choose "
                          "fewer (--elements)"),
                std::string::npos)
          << error.what();
    }
  });
}

TEST(CommunicationBenchmark, RefusesOneRankAndRowsThatAreNotWhole) {
  EXPECT_THROW(measure_communication(*single_rank(), cpu_backend(), 1 << 20, {}), Error);
  on_ranks(2, [](Communicator& ranks) {
    EXPECT_THROW(measure_communication(ranks, cpu_backend(), 4097, {}), Error);
    EXPECT_THROW(measure_communication(ranks, cpu_backend(), 4096, {}), Error);
  });
}

}  // namespace
}  // namespace agoq

#include "comm/shared_host_memory.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "comm/rest.h"
#include "comm/thread_ranks.h"

namespace agoq {
namespace {

using testing_comm::on_ranks;

/// What every rank has shown, in rank order.
std::vector<std::int64_t> gather(SharedHostMemory& shared, int size, std::int64_t mine) {
  shared.show(&mine, sizeof(mine));
  std::vector<std::int64_t> all(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r) {
    Rest rest;
    const std::byte* shown = nullptr;
    while ((shown = shared.shown_by(r)) == nullptr) rest();
    std::memcpy(&all[static_cast<std::size_t>(r)], shown, sizeof(mine));
  }
  return all;
}

TEST(SharedHostMemory, GathersInEveryRoundWhatWasShownInIt) {
  constexpr int kRanks = 3, kRounds = 2000;
  on_ranks(kRanks, [](Communicator& ranks) {
    const std::unique_ptr<SharedHostMemory> shared = SharedHostMemory::open(ranks);
    ASSERT_TRUE(shared);
    std::minstd_rand random(static_cast<unsigned>(ranks.rank()) + 1);
    for (std::int64_t round = 0; round < kRounds; ++round) {
      // Ranks come in every order: a fast one must not overwrite what a slow one has still to read.
      for (unsigned i = random() % 4; i > 0; --i) std::this_thread::yield();
      const std::vector<std::int64_t> all = gather(*shared, kRanks, 10 * round + ranks.rank());
      for (std::int64_t r = 0; r < kRanks; ++r) {
        ASSERT_EQ(all[static_cast<std::size_t>(r)], 10 * round + r) << "rank " << ranks.rank();
      }
    }
  });
}

TEST(SharedHostMemory, OffersComeInOrderAndAsManyAsThereIsRoomFor) {
  on_ranks(2, [](Communicator& ranks) {
    const std::unique_ptr<SharedHostMemory> shared = SharedHostMemory::open(ranks);
    ASSERT_TRUE(shared);
    const int other = 1 - ranks.rank();
    const auto offer_numbered = [&](std::uint64_t number) {
      return shared->offers(ranks.rank(), other).offer({{}, number, 100 + number});
    };
    std::uint64_t offered = 0, taken = 0;
    while (offer_numbered(offered)) ++offered;
    EXPECT_EQ(offered, OfferRing::kMostOffers);
    ranks.barrier();  // both are full before either takes
    constexpr std::uint64_t kAll = 3 * OfferRing::kMostOffers + 7;
    while (offered < kAll || taken < kAll) {
      if (offered < kAll && offer_numbered(offered)) ++offered;
      Offer offer;
      if (!shared->offers(other, ranks.rank()).take(offer)) continue;
      ASSERT_EQ(offer.offset, taken);
      ASSERT_EQ(offer.bytes, 100 + taken);
      ++taken;
    }
    Offer none;
    EXPECT_FALSE(shared->offers(other, ranks.rank()).take(none));
  });
}

/// Is told another name of the memory than the others are, as on another machine.
class Elsewhere : public Communicator {
 public:
  Elsewhere(Communicator& ranks, bool is_elsewhere) : ranks_(ranks), is_elsewhere_(is_elsewhere) {}
  int rank() const override { return ranks_.rank(); }
  int size() const override { return ranks_.size(); }
  std::string description() const override { return "elsewhere"; }
  void exchange(const Context&, std::span<const Message>, std::span<const Message>) override {}
  void all_reduce(const Context&, const Tensor&) override {}
  void reduce_scatter(const Context&, const Tensor&, std::span<const std::int64_t>) override {}
  std::unique_ptr<Communicator> split(int, int) override { return nullptr; }
  void gather(const void* mine, void* all, std::size_t bytes) override {
    ranks_.gather(mine, all, bytes);
    if (is_elsewhere_ && bytes > 1) static_cast<char*>(all)[1] ^= 1;
  }

 private:
  Communicator& ranks_;
  bool is_elsewhere_;
};

TEST(SharedHostMemory, IsThereForAllRanksOrForNone) {
  on_ranks(3, [](Communicator& ranks) {
    Elsewhere view(ranks, ranks.rank() == 2);
    EXPECT_FALSE(SharedHostMemory::open(view)) << "rank " << ranks.rank();
    EXPECT_TRUE(SharedHostMemory::open(ranks)) << "rank " << ranks.rank();
  });
}

}  // namespace
}  // namespace agoq

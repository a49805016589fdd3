#include "gradients/row_union.h"

#include <gtest/gtest.h>

#include "comm/thread_ranks.h"

namespace agoq {
namespace {

using Rows = std::vector<std::int32_t>;

TEST(RowUnion, HasEachMarkedRowOnceInOrder) {
  const std::unique_ptr<Communicator> alone = single_rank();
  RowUnion rows(200, 1);
  EXPECT_EQ(rows.join(*alone), Rows{});
  rows.mark(Rows{199, 64, 0, 63, 64, 128, 0});
  EXPECT_EQ(rows.join(*alone), (Rows{0, 63, 64, 128, 199}));
  rows.mark(Rows{1});
  EXPECT_EQ(rows.join(*alone), (Rows{0, 1, 63, 64, 128, 199}));
  rows.clear();
  rows.mark(Rows{7});
  EXPECT_EQ(rows.join(*alone), (Rows{7}));
}

TEST(RowUnion, PassesOverWhatIsNoRow) {
  const std::unique_ptr<Communicator> alone = single_rank();
  RowUnion rows(70, 1);
  rows.mark(Rows{-1, 70, 127, 128, 69, 1 << 30});
  EXPECT_EQ(rows.join(*alone), (Rows{69}));
}

TEST(RowUnion, IsTheSameOnEveryRank) {
  for (const int size : {2, 3, 8}) {
    testing_comm::on_ranks(size, [&](Communicator& ranks) {
      RowUnion rows(1000, size);
      // Rank 1 has none; each other has one of its own and one that all have.
      if (ranks.rank() != 1) rows.mark(Rows{100 * ranks.rank() + 5, 777});
      Rows expected;
      for (int r = 0; r < size; ++r) {
        if (r != 1) expected.push_back(100 * r + 5);
      }
      expected.insert(std::upper_bound(expected.begin(), expected.end(), 777), 777);
      EXPECT_EQ(rows.join(ranks), expected) << "rank " << ranks.rank() << " of " << size;
    });
  }
}

}  // namespace
}  // namespace agoq

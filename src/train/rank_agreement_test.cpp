#include "train/rank_agreement.h"

#include <gtest/gtest.h>
#include <sys/fsuid.h>
#include <unistd.h>

#include <filesystem>

#include "comm/thread_ranks.h"
#include "core/error.h"
#include "core/temporary_folder.h"

namespace agoq {
namespace {

/// What each of `size` ranks threw; "agreed" where nothing.
template <typename Check>
std::vector<std::string> outcomes(int size, Check check_rank) {
  std::vector<std::string> texts(static_cast<std::size_t>(size), "agreed");
  testing_comm::on_ranks(size, [&](Communicator& ranks) {
    try {
      check_rank(ranks);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      texts[static_cast<std::size_t>(ranks.rank())] = error.what();
    }
  });
  return texts;
}

void expect_refused(const std::vector<std::string>& outcomes, const std::string& text) {
  EXPECT_NE(outcomes.front().find(text), std::string::npos) << outcomes.front();
  EXPECT_EQ(outcomes.front().find('\n'), std::string::npos) << outcomes.front();
  for (std::size_t r = 1; r < outcomes.size(); ++r) EXPECT_EQ(outcomes[r], "") << "rank " << r;
}

TEST(RankAgreement, EqualRanksAgree) {
  for (const int size : {1, 2, 5}) {
    const auto found = outcomes(size, [](Communicator& ranks) {
      RunConfig config;
      config.run.threads = ranks.rank();  // the one setting that may differ
      expect_agreement(ranks, facts_of_run(ranks, config, RunStart::kNew));
    });
    EXPECT_EQ(found, std::vector<std::string>(static_cast<std::size_t>(size), "agreed"));
  }
}

TEST(RankAgreement, NamesTheSettingBothValuesAndTheRanks) {
  const auto with = [](auto change) {
    return outcomes(4, [&](Communicator& ranks) {
      RunConfig config;
      if (ranks.rank() == 1 || ranks.rank() == 3) change(config);
      expect_agreement(ranks, facts_of_run(ranks, config, RunStart::kNew));
    });
  };
  expect_refused(with([](RunConfig& config) { config.run.steps = 77; }),
                 fmt::format("train.steps is {} on rank 0 and 77 on ranks 1 and 3; start all of them",
                             RunConfig{}.run.steps));
  expect_refused(with([](RunConfig& config) { config.run.directory = "elsewhere"; }),
                 "\"elsewhere\" on ranks 1 and 3");
  expect_refused(with([](RunConfig& config) {
                   config.data.seed = 9;
                   config.optimizer.beta2 = 0.5;
                   config.gradients.format = exact_format(ElementType::kFp32);
                 }),
                 ", and 2 more differences;");
  expect_refused(with([](RunConfig& config) {
                   config.data.seed = 9;
                   config.optimizer.beta2 = 0.5;
                 }),
                 ", and 1 more difference;");
}

TEST(RankAgreement, ComparesTheLibraryBetweenTheRanks) {
  struct Updated : testing_comm::ThreadRank {
    using ThreadRank::ThreadRank;
    std::string description() const override { return rank() == 1 ? "newer threads" : "threads"; }
  };
  testing_comm::Board board(3);
  std::vector<std::string> texts(3, "agreed");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      Updated ranks(board, rank);
      try {
        expect_agreement(ranks, facts_of_run(ranks, RunConfig{}, RunStart::kNew));
      } catch (const Error& error) {
        texts[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect_refused(texts,
                 "the library between the ranks is threads on rank 0 and newer threads on rank 1");
}

TEST(RankAgreement, ComparesHowTheRunStarts) {
  expect_refused(outcomes(2,
                          [](Communicator& ranks) {
                            const RunStart start =
                                ranks.rank() == 1 ? RunStart::kNew : RunStart::kResume;
                            expect_agreement(ranks, facts_of_run(ranks, {}, start));
                          }),
                 "how the run starts is --resume on rank 0 and no option on rank 1");
}

TEST(RankAgreement, OfManyRanksSomeAreNamed) {
  expect_refused(outcomes(12,
                          [](Communicator& ranks) {
                            expect_agreement(ranks, {{"it", ranks.rank() == 0 ? "a" : "b"}});
                          }),
                 "it is a on rank 0 and b on ranks 1, 2, 3, 4, 5, 6 and 5 more");
  expect_refused(outcomes(2,
                          [](Communicator& ranks) {
                            std::vector<RankFact> facts{{"one", "1"}};
                            if (ranks.rank() == 0) facts.emplace_back("two", "2");
                            expect_agreement(ranks, facts);
                          }),
                 "two is 2 on rank 0 and unknown on rank 1");
  expect_refused(outcomes(2,
                          [](Communicator& ranks) {
                            std::vector<RankFact> facts{{"one", "1"}};
                            if (ranks.rank() == 1) facts.emplace_back("two", "2");
                            expect_agreement(ranks, facts);
                          }),
                 "some know settings that rank 0 does not");
}

TEST(RankAgreement, ComparesTheText) {
  const TemporaryFolder folder;
  const auto load = [&](const std::string& name, const std::string& second) {
    folder.write(name + "/a.txt", "first document");
    folder.write(name + "/b.txt", second);
    DataConfig config;
    config.paths = {folder.path(name)};
    config.holdout_every = 2;
    config.holdout_index = 1;
    return Dataset::load(config);
  };
  const Dataset same = load("0", "second document"), equal = load("1", "second document");
  const Dataset other = load("2", "second documenT");
  DataConfig joined;  // the same bytes, cut into other documents
  folder.write("3/a.txt", "first documents");
  folder.write("3/b.txt", "econd document");
  joined.paths = {folder.path("3")};
  joined.holdout_every = 2;
  joined.holdout_index = 1;
  const Dataset cut = Dataset::load(joined);
  const auto compare = [](const Dataset& first, const Dataset& second) {
    return outcomes(2, [&](Communicator& ranks) {
      expect_agreement(ranks, facts_of_data(ranks.rank() == 0 ? first : second));
    });
  };
  EXPECT_EQ(compare(same, equal), std::vector<std::string>(2, "agreed"));
  expect_refused(compare(same, other),
                 "the text at data.paths is 2 documents of 29 bytes with the CRC-32 ");
  expect_refused(compare(same, cut), "on rank 1");
}

TEST(RankAgreement, FindsADirectoryThatIsNotShared) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path("own"));
  std::filesystem::create_directories(folder.path("run"));
  const auto found = outcomes(3, [&](Communicator& ranks) {
    expect_shared(ranks, folder.path(ranks.rank() == 2 ? "own" : "run"));
  });
  expect_refused(found, "is not the same on all ranks: rank 2 cannot see what rank 0 writes there");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path("run")));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path("own")));
  EXPECT_EQ(outcomes(3, [&](Communicator& ranks) { expect_shared(ranks, folder.path("run")); }),
            std::vector<std::string>(3, "agreed"));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path("run")));
}

// Every rank saves its part there: before the first step, not in the first save.
TEST(RankAgreement, FindsARankThatCannotWriteInTheDirectory) {
  if (geteuid() != 0) GTEST_SKIP() << "no right to act as another user";
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path("run"));
  std::filesystem::permissions(folder.path("."), std::filesystem::perms(0755));
  const auto found = outcomes(3, [&](Communicator& ranks) {
    constexpr uid_t kNobody = 65534;
    if (ranks.rank() == 2) setfsuid(kNobody);  // of this thread alone
    expect_shared(ranks, folder.path("run"));
  });
  expect_refused(found, fmt::format("rank 2: run.directory {} cannot be written", folder.path("run")));
  EXPECT_NE(found.front().find("Permission denied"), std::string::npos) << found.front();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path("run")));
}

}  // namespace
}  // namespace agoq

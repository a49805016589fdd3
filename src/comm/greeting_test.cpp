#include "comm/greeting.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <thread>

#include "comm/nccl_id_file.h"
#include "comm/thread_ranks.h"
#include "comm/together.h"
#include "core/temporary_folder.h"

namespace agoq {
namespace {

constexpr const char* kSame = "start all of them with the same one";

/// What a rank threw, which is bad input that all have agreed on; "met" where nothing.
template <typename Work>
std::string outcome(Work work) {
  try {
    work();
    return "met";
  } catch (const AgreedError& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    return error.what();
  }
}

std::vector<std::string> outcomes(const std::vector<std::string>& programs) {
  std::vector<std::string> found(programs.size());
  testing_comm::on_ranks(static_cast<int>(programs.size()), [&](Communicator& ranks) {
    const auto r = static_cast<std::size_t>(ranks.rank());
    found[r] = outcome([&] { greet(ranks, programs[r]); });
  });
  return found;
}

TEST(Greeting, EqualProgramsMeet) {
  EXPECT_EQ(outcomes({"0.1.0 abc"}), std::vector<std::string>(1, "met"));
  EXPECT_EQ(outcomes({"0.1.0 abc", "0.1.0 abc", "0.1.0 abc"}), std::vector<std::string>(3, "met"));
}

TEST(Greeting, NamesWhichRanksRunWhichProgram) {
  const std::vector<std::string> found =
      outcomes({"0.1.0 abc", "0.1.0 abc", "0.2.0 def", "0.1.0 abc", "0.1.0 abc+"});
  EXPECT_EQ(found[0], fmt::format("the ranks run different programs: agoq 0.1.0 abc, protocol {0} on "
                                  "ranks 0, 1 and 3, agoq 0.2.0 def, protocol {0} on rank 2, agoq 0.1.0 "
                                  "abc+, protocol {0} on rank 4; {1}",
                                  kRankProtocol, kSame));
  for (std::size_t r = 1; r < found.size(); ++r) EXPECT_EQ(found[r], "") << r;
}

// Later versions read it: these bytes stay.
TEST(Greeting, HasAFixedForm) {
  static_assert(sizeof(Greeting) == 128);
  const Greeting greeting = greeting_of("1.2.3 0123abc");
  EXPECT_STREQ(greeting.data(), fmt::format("agoq 1.2.3 0123abc, protocol {}", kRankProtocol).c_str());
  EXPECT_EQ(greeting.back(), '\0');
  const Greeting cut = greeting_of(std::string(1000, 'x'));
  EXPECT_EQ(std::strlen(cut.data()), 127u);
  EXPECT_NE(std::string(cut.data()).find(fmt::format("x, protocol {}", kRankProtocol)),
            std::string::npos);
}

TEST(Greeting, WhatIsNoGreetingIsAnotherProgram) {
  Greeting others[3] = {greeting_of("1"), {}, {}};
  std::memcpy(others[2].data(), "agoq \x01\xff", 7);
  EXPECT_EQ(
      difference_of(others),
      fmt::format("the ranks run different programs: agoq 1, protocol {} on rank 0, another program "
                  "on ranks 1 and 2; {}",
                  kRankProtocol, kSame));
}

/// What the ranks of a launch without MPI get from each other, or say, through files in `folder`.
std::vector<std::string> through_files(const TemporaryFolder& folder,
                                       const std::vector<std::string>& programs) {
  std::vector<std::string> found(programs.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < programs.size(); ++r) {
    threads.emplace_back([&, r] {
      Launch launch;
      launch.rank = static_cast<int>(r);
      launch.size = static_cast<int>(programs.size());
      found[r] = outcome([&] {
        NcclId id{};
        id.fill(std::byte{7});
        const NcclIdFile file(folder.path("run"), launch, programs[r], 20);
        EXPECT_EQ(r == 0 ? file.publish(id) : file.wait(), id);
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path("run")));
  return found;
}

TEST(Greeting, GoesThroughFilesWithoutMpi) {
  const TemporaryFolder folder;
  // What an earlier launch left behind.
  folder.write("run/.nccl-join-1", "old");
  folder.write("run/.nccl-join-2", std::string(136, 'x'));
  folder.write("run/.nccl-id", std::string(600, 'x'));
  EXPECT_EQ(through_files(folder, {"0.1.0", "0.1.0", "0.1.0"}), std::vector<std::string>(3, "met"));
  const std::vector<std::string> found = through_files(folder, {"0.1.0", "0.1.0", "0.2.0"});
  EXPECT_EQ(found[0],
            fmt::format("the ranks run different programs: agoq 0.1.0, protocol {0} on ranks 0 and 1, "
                        "agoq 0.2.0, protocol {0} on rank 2; {1}",
                        kRankProtocol, kSame));
  EXPECT_EQ(found[1], "");
  EXPECT_EQ(found[2], "");
}

TEST(Greeting, ARankThatDoesNotComeIsNamedWithoutMpi) {
  const TemporaryFolder folder;
  Launch launch;
  launch.size = 3;
  try {
    NcclIdFile(folder.path("run"), launch, "0.1.0", 0.2).publish({});
    ADD_FAILURE() << "nobody was waited for";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("ranks 1 and 2 of 3 did not come within 0.2 s"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace agoq

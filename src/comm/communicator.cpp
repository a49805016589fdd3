// What every transport has in common, and the group of one.
#include "comm/communicator.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/exchange_checks.h"
#include "comm/rank_names.h"

namespace agoq {
namespace {

class SingleRank : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::string description() const override { return "one rank"; }
  void exchange(const Context&, std::span<const Message> sends,
                std::span<const Message> receives) override {
    expect_messages(*this, sends, receives);
  }
  void all_reduce(const Context&, const Tensor& x) override { expect_summable("all_reduce", x); }
  void reduce_scatter(const Context&, const Tensor& x, std::span<const std::int64_t> counts) override {
    expect_parts(*this, x, counts);
  }
  void gather(const void* mine, void* all, std::size_t bytes) override { std::memcpy(all, mine, bytes); }
  std::unique_ptr<Communicator> split(int, int) override { return single_rank(); }
};

class PlannedRanks : public Communicator {
 public:
  explicit PlannedRanks(int size) : size_(size) {}
  int rank() const override { return 0; }
  int size() const override { return size_; }
  std::string description() const override { return "planned ranks"; }
  void exchange(const Context& context, std::span<const Message> sends,
                std::span<const Message> receives) override {
    expect_messages(*this, sends, receives);
    expect_measuring(context);
  }
  void all_reduce(const Context& context, const Tensor& x) override {
    expect_summable("all_reduce", x);
    expect_measuring(context);
  }
  void reduce_scatter(const Context& context, const Tensor& x,
                      std::span<const std::int64_t> counts) override {
    expect_parts(*this, x, counts);
    expect_measuring(context);
  }
  void gather(const void* mine, void* all, std::size_t bytes) override {
    for (int r = 0; r < size_; ++r) {
      std::memcpy(static_cast<std::byte*>(all) + static_cast<std::size_t>(r) * bytes, mine, bytes);
    }
  }
  std::unique_ptr<Communicator> split(int, int) override { return planned_ranks(size_); }

 private:
  static void expect_measuring(const Context& context) {
    check(context.workspace.is_measuring(), "planned ranks exchange nothing: launch the ranks");
  }
  int size_;
};

std::string late_predicate(const std::string& operation, double seconds) {
  return fmt::format("did not come to {} within {:g} s", operation, seconds);
}

/// Of two ranks the other is missing, whether the transport knows it or not.
std::vector<int> known(const Communicator& group, std::vector<int> missing) {
  if (missing.empty() && group.size() == 2) missing.push_back(1 - group.rank());
  return missing;
}

std::string late_ranks(const Communicator& group, const std::vector<int>& missing) {
  return missing.empty() ? fmt::format("one or more of {} ranks", group.size()) : name_ranks(missing);
}

}  // namespace

LateError::LateError(const Communicator& group, const std::string& operation, double seconds,
                     std::vector<int> missing)
    : Error(ErrorKind::kFailure,
            fmt::format("{} {}: rank {} has waited for it; look at what it printed, and start all again",
                        late_ranks(group, known(group, missing)), late_predicate(operation, seconds),
                        group.rank())),
      missing_(known(group, std::move(missing))),
      predicate_(late_predicate(operation, seconds)) {}

std::unique_ptr<Communicator> planned_ranks(int size) { return std::make_unique<PlannedRanks>(size); }

std::vector<std::string> Communicator::gather_texts(const std::string& mine) {
  const std::vector<std::size_t> lengths = gather_values(mine.size());
  const std::size_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::string padded = mine;
  padded.resize(longest);
  std::string all(longest * lengths.size(), '\0');
  if (longest > 0) gather(padded.data(), all.data(), longest);
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < lengths.size(); ++r) texts.push_back(all.substr(r * longest, lengths[r]));
  return texts;
}

std::unique_ptr<Communicator> single_rank() { return std::make_unique<SingleRank>(); }

}  // namespace agoq

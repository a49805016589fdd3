#include "train/rank_counts.h"

#include <sstream>

namespace agoq {
namespace {

// Names come last: they hold spaces.
std::string to_text(const std::vector<NamedCounts>& counted, std::size_t activations) {
  std::string text;
  for (std::size_t i = 0; i < counted.size(); ++i) {
    const auto& [name, counts] = counted[i];
    text += fmt::format("{} {} {} {} {}\n", counts.non_finite, counts.saturated, counts.flushed_blocks,
                        i < activations ? 0 : 1, name);
  }
  return text;
}

std::vector<RankCounts> from_text(const std::string& text, int rank) {
  std::vector<RankCounts> counted;
  std::istringstream lines(text);
  RankCounts of{rank, {}, {}, false};
  while (lines >> of.counts.non_finite >> of.counts.saturated >> of.counts.flushed_blocks >>
         of.is_gradient) {
    std::getline(lines >> std::ws, of.name);
    counted.push_back(of);
  }
  return counted;
}

}  // namespace

std::vector<RankCounts> gather_counts(Communicator& ranks, const std::vector<NamedCounts>& counted,
                                      std::size_t activations) {
  bool any = false;
  for (const char has : ranks.gather_values<char>(counted.empty() ? 0 : 1)) any = any || has != 0;
  std::vector<RankCounts> all;
  if (!any) return all;
  const std::vector<std::string> texts = ranks.gather_texts(to_text(counted, activations));
  for (std::size_t r = 0; r < texts.size(); ++r) {
    for (RankCounts& of : from_text(texts[r], static_cast<int>(r))) all.push_back(std::move(of));
  }
  return all;
}

std::vector<NamedCounts> sum_over_ranks(const std::vector<RankCounts>& counted) {
  std::vector<NamedCounts> sums;
  for (const RankCounts& of : counted) {
    auto sum = sums.begin();
    while (sum != sums.end() && sum->name != of.name) ++sum;
    if (sum == sums.end()) sum = sums.insert(sum, {of.name, {}});
    sum->counts.non_finite += of.counts.non_finite;
    sum->counts.saturated += of.counts.saturated;
    sum->counts.flushed_blocks += of.counts.flushed_blocks;
  }
  return sums;
}

std::string of_rank(const Communicator& ranks, int rank) {
  return ranks.size() == 1 ? "" : fmt::format(" on rank {}", rank);
}

}  // namespace agoq

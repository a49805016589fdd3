// Ranks in words, for messages.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <string>
#include <vector>

namespace agoq {

/// "rank 2", "ranks 1, 2 and 4", "ranks 1, 2, 3, 4, 5, 6 and 58 more"
inline std::string name_ranks(const std::vector<int>& ranks) {
  constexpr std::size_t kMostNamed = 6;
  if (ranks.size() == 1) return fmt::format("rank {}", ranks.front());
  const std::size_t named = ranks.size() > kMostNamed + 1 ? kMostNamed : ranks.size() - 1;
  const std::vector<int> first(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(named));
  const std::size_t rest = ranks.size() - named;
  return fmt::format("ranks {} and {}", fmt::join(first, ", "),
                     rest == 1 ? std::to_string(ranks.back()) : fmt::format("{} more", rest));
}

}  // namespace agoq

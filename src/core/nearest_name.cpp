#include "core/nearest_name.h"

#include <algorithm>
#include <numeric>

namespace agoq {

int edit_distance(std::string_view a, std::string_view b) {
  // Row i holds the distances of a's first i characters to every prefix of b.
  std::vector<int> before_last(b.size() + 1);
  std::vector<int> last(b.size() + 1);
  std::vector<int> row(b.size() + 1);
  std::iota(last.begin(), last.end(), 0);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const int substituted = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({substituted, last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before_last[j - 2] + 1);
      }
    }
    before_last.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

std::string_view nearest_name(std::string_view text, const std::vector<std::string_view>& names) {
  std::string_view nearest;
  int least = 0;
  for (const std::string_view name : names) {
    const int distance = edit_distance(text, name);
    if (distance > std::max(2, static_cast<int>(name.size()) / 3)) continue;
    if (nearest.empty() || distance < least) {
      nearest = name;
      least = distance;
    }
  }
  return nearest;
}

}  // namespace agoq

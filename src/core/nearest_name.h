// The nearest of several names, for the "did you mean" of an error message. Distance: the least
// number of insertions, deletions, substitutions and swaps of neighbours (optimal string alignment).
#pragma once

#include <string_view>
#include <vector>

namespace agoq {

/// The number of single-character edits that turn `a` into `b`.
int edit_distance(std::string_view a, std::string_view b);

/// The name with the least distance to `text`, the first of several; empty when none is close enough
/// to be what was meant (more than a third of its characters, and more than two, would change).
std::string_view nearest_name(std::string_view text, const std::vector<std::string_view>& names);

}  // namespace agoq

#include "core/nearest_name.h"

#include <gtest/gtest.h>

namespace agoq {
namespace {

TEST(EditDistance, CountsInsertionsDeletionsSubstitutionsAndSwaps) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("", "hidden"), 6);
  EXPECT_EQ(edit_distance("hidden", "hidden"), 0);
  EXPECT_EQ(edit_distance("hiden", "hidden"), 1);
  EXPECT_EQ(edit_distance("hiddne", "hidden"), 1);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
}

TEST(NearestName, SuggestsOnlyWhatMayHaveBeenMeant) {
  const std::vector<std::string_view> names{"layers", "hidden", "kv_heads", "heads"};
  EXPECT_EQ(nearest_name("layer", names), "layers");
  EXPECT_EQ(nearest_name("head", names), "heads");
  EXPECT_EQ(nearest_name("kvheads", names), "kv_heads");
  EXPECT_EQ(nearest_name("temperature", names), "");
}

}  // namespace
}  // namespace agoq

#include "cli/table.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace agoq {
namespace {

TEST(Table, AlignsColumnsAndLeavesNoTrailingSpaces) {
  Table table({{"class"}, {"bytes", Align::kRight}, {"note"}});
  table.add_row({"weights", "7", "BF16"});
  table.add_row({"moments", "12,345"});
  table.add_rule();
  table.add_row({"all", "12,352", ""});
  EXPECT_EQ(table.to_string(),
            "class     bytes  note\n"
            "---------------------\n"
            "weights       7  BF16\n"
            "moments  12,345\n"
            "---------------------\n"
            "all      12,352\n");
}

TEST(Table, CountsCharactersNotBytes) {
  Table table({{}, {}});
  table.add_row({"\xC3\xA9\xE2\x86\x92", "x"});  // two characters in five bytes
  table.add_row({"abc", "y"});
  EXPECT_EQ(table.to_string(), "\xC3\xA9\xE2\x86\x92   x\nabc  y\n");
}

TEST(Table, RefusesARowThatIsTooLong) {
  Table table({{"one"}});
  EXPECT_THROW(table.add_row({"1", "2"}), Error);
}

}  // namespace
}  // namespace agoq

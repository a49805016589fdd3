#include "core/quantity.h"

#include <gtest/gtest.h>

#include <limits>

namespace agoq {
namespace {

TEST(FormatBytes, KeepsThreeSignificantDigitsAcrossUnitBorders) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.00 KiB");
  EXPECT_EQ(format_bytes(10 * 1024 - 1), "10.0 KiB");
  EXPECT_EQ(format_bytes(1024 * 1024 - 1), "1.00 MiB");
  EXPECT_EQ(format_bytes(std::int64_t{5} << 28), "1.25 GiB");
  EXPECT_EQ(format_bytes(std::int64_t{47} << 20), "47.0 MiB");
  EXPECT_EQ(format_bytes(std::numeric_limits<std::int64_t>::max()), "8.00 EiB");
  EXPECT_EQ(format_bytes(-2048), "-2.00 KiB");
}

TEST(ParseBytes, ReadsPlainNumbersAndBinaryUnits) {
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("85899345920"), std::int64_t{80} << 30);
  EXPECT_EQ(parse_bytes("80GiB"), std::int64_t{80} << 30);
  EXPECT_EQ(parse_bytes("1.5 KiB"), 1536);
  EXPECT_EQ(parse_bytes("141 GiB"), std::int64_t{141} << 30);
  EXPECT_EQ(parse_bytes("9223372036854775807"), std::numeric_limits<std::int64_t>::max());
  for (const char* text : {"", "GiB", "80 GB", "80GiBs", "80  GiB", "-80GiB", "-1", "1.5", "1e3", "nan",
                           "inf GiB", "8EiB", "9223372036854775808", "80GiB ", "0x10"}) {
    EXPECT_EQ(parse_bytes(text), std::nullopt) << text;
  }
}

TEST(FormatDuration, NamesTheTwoLargestUnits) {
  EXPECT_EQ(format_duration(0.421), "0.42 s");
  EXPECT_EQ(format_duration(9.999), "10.0 s");
  EXPECT_EQ(format_duration(59.96), "1 min 00 s");
  EXPECT_EQ(format_duration(192), "3 min 12 s");
  EXPECT_EQ(format_duration(3599.6), "1 h 00 min");
  EXPECT_EQ(format_duration(7500), "2 h 05 min");
  EXPECT_EQ(format_duration(3 * 86400 + 4 * 3600), "3 d 04 h");
  EXPECT_EQ(format_duration(std::numeric_limits<double>::infinity()), "?");
}

TEST(FormatCount, GroupsDigits) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1,000");
  EXPECT_EQ(format_count(-1234567), "-1,234,567");
  EXPECT_EQ(format_count(-123), "-123");
}

}  // namespace
}  // namespace agoq

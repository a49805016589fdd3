#include "core/checksum.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"

namespace agoq {
namespace {

TEST(Checksum, IsZlibsCrc32) {
  EXPECT_EQ(checksum("123456789", 9), 0xCBF43926u);  // the standard's check value
  EXPECT_EQ(checksum("", 0), 0u);
  EXPECT_EQ(checksum("6789", 4, checksum("12345", 5)), 0xCBF43926u);
}

TEST(Checksum, OfAFileComesFromThatOfItsPieces) {
  std::string file;
  for (int i = 0; i < 1000; ++i) file += std::to_string(i * i);
  const std::vector<std::size_t> borders{0, 1, 17, 17, 500, 1800, file.size()};
  std::vector<PieceChecksum> pieces;
  for (std::size_t i = 0; i + 1 < borders.size(); ++i) {
    const std::size_t bytes = borders[i + 1] - borders[i];
    if (bytes > 0) pieces.push_back({borders[i], bytes, checksum(file.data() + borders[i], bytes)});
  }
  EXPECT_EQ(combined_checksum(pieces, 0, file.size()), checksum(file.data(), file.size()));
  EXPECT_EQ(combined_checksum(pieces, 17, 1800), checksum(file.data() + 17, 1783));
  EXPECT_EQ(combined_checksum(pieces, 17, 17), 0u);
  EXPECT_THROW(combined_checksum(pieces, 0, file.size() + 1), Error);  // a hole at the end
  EXPECT_THROW(combined_checksum(pieces, 2, 500), Error);              // no piece starts there
  EXPECT_THROW(combined_checksum(pieces, 0, 16), Error);               // one crosses the end
  pieces.erase(pieces.begin() + 2);
  EXPECT_THROW(combined_checksum(pieces, 0, file.size()), Error);
}

}  // namespace
}  // namespace agoq

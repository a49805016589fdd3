#include "checkpoint/durable_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>
#include <functional>
#include <string>

#include "core/error.h"
#include "core/temporary_folder.h"

namespace agoq {
namespace {

std::string error_of(const std::function<void()>& action, ErrorKind kind) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind);
    return error.what();
  }
  return "no error";
}

TEST(DurableFile, AFailingRenameTellsItsOwnReason) {
  const TemporaryFolder folder;
  DurableFile file(folder.path("file"));
  std::filesystem::remove(folder.path("file.tmp"));
  errno = 0;
  const std::string text = error_of([&] { file.commit(); }, ErrorKind::kFailure);
  EXPECT_NE(text.find("No such file or directory"), std::string::npos) << text;
}

TEST(DurableFile, TakesThePlaceOfRegularFilesOnly) {
  const TemporaryFolder folder;
  folder.write("file", "old");
  write_durably(folder.path("file"), "new");
  EXPECT_EQ(read_text(folder.path("file"), 100), "new");
  ASSERT_EQ(mkfifo(folder.path("pipe").c_str(), 0600), 0);
  for (const std::string& path : {folder.path(), folder.path("pipe"), std::string("/dev/null")}) {
    const std::string text = error_of([&] { write_durably(path, "text"); }, ErrorKind::kInput);
    EXPECT_NE(text.find("it exists and is "), std::string::npos) << text;
  }
  EXPECT_TRUE(std::filesystem::is_fifo(folder.path("pipe")));
  EXPECT_FALSE(std::filesystem::exists(folder.path("pipe.tmp")));
}

}  // namespace
}  // namespace agoq

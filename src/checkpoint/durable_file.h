// Files that are either whole or not there: written as `name.tmp`, synced, renamed.
//
// Invariant: at `name` there is never a part of a file. A crash leaves the previous content, or
// nothing, and at worst a `name.tmp` that the next writer overwrites.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace agoq {

class DurableFile {
 public:
  /// Creates `path`.tmp, or empties it. Throws Error (kInput) if `path` is there and not a regular file.
  explicit DurableFile(std::string path);
  /// Removes `path`.tmp unless the file was committed.
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(const void* data, std::size_t bytes);
  /// Syncs the content, renames the file to `path` and syncs the directory.
  void commit();

 private:
  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
};

/// Writes `text` as the whole content of `path`.
void write_durably(const std::string& path, std::string_view text);

/// The content of a file of at most `limit` bytes. Throws Error (kInput) when it cannot be read.
std::string read_text(const std::string& path, std::size_t limit);

/// Makes the names in a directory (files created, renamed and removed in it) survive a crash.
void sync_directory(const std::string& directory);

/// `text` on one line of at most 120 characters, control characters shown as '?': names from files
/// in messages.
std::string printable(std::string_view text);

}  // namespace agoq

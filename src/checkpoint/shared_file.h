// SharedFile: a file that several ranks write together, each the byte ranges that are its own.
//
// One rank creates it with its full size; when it is there, every rank opens it, writes and syncs. It is
// for files in a directory that nobody reads yet: what a crash leaves of it is a part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/checksum.h"

namespace agoq {

/// Creates `path` with `bytes` bytes, for which it takes the space where the file system can: a disk
/// that is too small is found here. Throws Error if there is a file, or no space.
void create_shared_file(const std::string& path, std::uint64_t bytes);

class SharedFile {
 public:
  /// Opens what another rank has created. Throws Error when it does not appear: the directory is then
  /// not one that all ranks share.
  explicit SharedFile(std::string path);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  /// Starts a piece at `offset`; what append writes follows it.
  void begin_piece(std::uint64_t offset);
  void append(const void* data, std::size_t bytes);
  /// Makes what this process has written survive a crash. Returns the checksums of its pieces, in the
  /// order in which they were written.
  std::vector<PieceChecksum> finish();

 private:
  std::string path_;
  int descriptor_ = -1;
  std::vector<PieceChecksum> pieces_;
};

}  // namespace agoq

#include "checkpoint/shared_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "core/error.h"

namespace agoq {
namespace {

// Linux transfers at most 0x7FFFF000 bytes in one call.
constexpr std::size_t kLargestTransfer = std::size_t{1} << 30;
// A network file system may show a new file to another machine with a delay.
constexpr std::chrono::seconds kAppears{10};

}  // namespace

void create_shared_file(const std::string& path, std::uint64_t bytes) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  check(descriptor >= 0, "cannot create '{}': {}; check that its directory can be written to", path,
        std::strerror(errno));
  const auto length = static_cast<off_t>(bytes);
  int error = bytes == 0 || ::fallocate(descriptor, 0, 0, length) == 0 ? 0 : errno;
  if (error == EOPNOTSUPP || error == ENOSYS || error == EINVAL) {
    error = ::ftruncate(descriptor, length) == 0 ? 0 : errno;
  }
  // A network file system may report only here what it could not do.
  if (::close(descriptor) != 0 && error == 0) error = errno;
  check(error == 0, "cannot give '{}' its {} bytes: {}; check the space on its file system", path, bytes,
        std::strerror(error));
}

SharedFile::SharedFile(std::string path) : path_(std::move(path)) {
  const auto start = std::chrono::steady_clock::now();
  do {
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
    if (descriptor_ >= 0 || errno != ENOENT) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  } while (std::chrono::steady_clock::now() - start < kAppears);
  check(descriptor_ >= 0,
        "cannot open '{}', which another rank has created: {}; all ranks need the same directory, on a "
        "file system that their machines share",
        path_, std::strerror(errno));
}

SharedFile::~SharedFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void SharedFile::begin_piece(std::uint64_t offset) { pieces_.push_back({offset, 0, 0}); }

void SharedFile::append(const void* data, std::size_t bytes) {
  PieceChecksum& piece = pieces_.back();
  piece.value = checksum(data, bytes, piece.value);
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::pwrite(descriptor_, next, std::min(bytes, kLargestTransfer),
                                     static_cast<off_t>(piece.begin + piece.bytes));
    if (written < 0 && errno == EINTR) continue;
    check(written > 0, "cannot write '{}': {}; check the space on its file system", path_,
          std::strerror(errno));
    next += written;
    piece.bytes += static_cast<std::uint64_t>(written);
    bytes -= static_cast<std::size_t>(written);
  }
}

std::vector<PieceChecksum> SharedFile::finish() {
  const bool synced = ::fsync(descriptor_) == 0;
  check(synced, "cannot sync '{}': {}; check its file system", path_, std::strerror(errno));
  const bool closed = ::close(std::exchange(descriptor_, -1)) == 0;
  check(closed, "cannot close '{}': {}; check its file system", path_, std::strerror(errno));
  std::erase_if(pieces_, [](const PieceChecksum& piece) { return piece.bytes == 0; });
  return std::move(pieces_);
}

}  // namespace agoq

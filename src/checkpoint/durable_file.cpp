#include "checkpoint/durable_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "core/error.h"

namespace agoq {
namespace {

std::string reason() { return std::strerror(errno); }

// Linux transfers at most 0x7FFFF000 bytes in one call.
constexpr std::size_t kLargestTransfer = std::size_t{1} << 30;

}  // namespace

DurableFile::DurableFile(std::string path) : path_(std::move(path)), temporary_(path_ + ".tmp") {
  // Renaming would put a file in the place of a device or a pipe.
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path_, error);
  check_input(!std::filesystem::exists(status) || std::filesystem::is_regular_file(status),
              "cannot write '{}': it exists and is {}; name a file", path_,
              std::filesystem::is_directory(status) ? "a folder" : "not a regular file");
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  check(descriptor_ >= 0,
        "cannot create '{}': {}; check that the directory exists and can be written to", temporary_,
        reason());
}

DurableFile::~DurableFile() {
  if (descriptor_ < 0) return;
  ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void DurableFile::write(const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, next, std::min(bytes, kLargestTransfer));
    if (written < 0 && errno == EINTR) continue;
    check(written > 0, "cannot write '{}': {}; check the space on its file system", temporary_,
          reason());
    next += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void DurableFile::commit() {
  // Statements of their own: the arguments of one call, reason() among them, are computed in any order.
  const bool synced = ::fsync(descriptor_) == 0;
  check(synced, "cannot sync '{}': {}; check its file system", temporary_, reason());
  const bool renamed = std::rename(temporary_.c_str(), path_.c_str()) == 0;
  check(renamed, "cannot rename '{}' to '{}': {}", temporary_, path_, reason());
  ::close(std::exchange(descriptor_, -1));
  const std::string parent = std::filesystem::path(path_).parent_path().string();
  sync_directory(parent.empty() ? "." : parent);
}

void write_durably(const std::string& path, std::string_view text) {
  DurableFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

std::string read_text(const std::string& path, std::size_t limit) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  check_input(descriptor >= 0, "cannot open '{}': {}", path, reason());
  std::string text;
  char buffer[4096];
  for (;;) {
    const ssize_t count = ::read(descriptor, buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0 || text.size() > limit) {
      const std::string why = count < 0 ? reason() : "";
      ::close(descriptor);
      check_input(count >= 0, "cannot read '{}': {}", path, why);
      check_input(text.size() <= limit, "'{}' has more than the {} bytes such a file may have", path,
                  limit);
      return text;
    }
    text.append(buffer, static_cast<std::size_t>(count));
  }
}

void sync_directory(const std::string& directory) {
  const int descriptor = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  check(descriptor >= 0, "cannot open the directory '{}': {}", directory, reason());
  // Some network file systems cannot sync a directory and say so with EINVAL.
  const bool synced = ::fsync(descriptor) == 0 || errno == EINVAL;
  const std::string why = synced ? "" : reason();
  ::close(descriptor);
  check(synced, "cannot sync the directory '{}': {}; check its file system", directory, why);
}

std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 120;
  std::string line(text.substr(0, kLongest));
  for (char& c : line) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  return text.size() > kLongest ? line + "..." : line;
}

}  // namespace agoq

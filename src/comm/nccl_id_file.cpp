#include "comm/nccl_id_file.h"

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "core/error.h"

namespace agoq {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using Number = std::uint64_t;  // of one rank of one launch

void write_aside(const std::string& path, const void* bytes, std::size_t count) {
  const std::string aside = path + ".tmp";
  std::ofstream file(aside, std::ios::binary | std::ios::trunc);
  file.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(count));
  file.close();
  check_input(static_cast<bool>(file),
              "{} cannot be written: choose a run.directory that all ranks share", path);
  fs::rename(aside, path);
}

/// The file's `count` bytes; nothing if it is absent or of another size.
std::optional<std::vector<char>> read_whole(const std::string& path, std::size_t count) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes(count + 1);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (static_cast<std::size_t>(file.gcount()) != count) return std::nullopt;
  bytes.resize(count);
  return bytes;
}

/// Asks until `done` or the deadline; whether it was done.
template <typename Done>
bool poll(double timeout_seconds, Done done) {
  const Clock::time_point deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                        std::chrono::duration<double>(timeout_seconds));
  while (!done()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return true;
}

}  // namespace

NcclIdFile::NcclIdFile(const std::string& directory, const Launch& launch, double timeout_seconds)
    : directory_(directory), rank_(launch.rank), size_(launch.size), timeout_seconds_(timeout_seconds) {
  std::error_code failure;
  fs::create_directories(directory_, failure);
  check_input(fs::is_directory(directory_, failure),
              "{} cannot be created: choose a run.directory that all ranks can write to", directory_);
}

std::string NcclIdFile::join_path(int rank) const {
  return fmt::format("{}/.nccl-join-{}", directory_, rank);
}

std::string NcclIdFile::id_path() const { return directory_ + "/.nccl-id"; }

NcclId NcclIdFile::publish(const NcclId& id) const {
  std::vector<Number> numbers(static_cast<std::size_t>(size_));
  // A number that an earlier launch left may be answered first: its owner is gone, and the rank of this
  // launch answers with another. So the answer is renewed as long as numbers change.
  std::vector<Number> answered;
  const auto acknowledged = [&] {
    for (int r = 1; r < size_; ++r) {
      if (fs::exists(join_path(r))) return false;  // removed by its rank once it has the id
    }
    return true;
  };
  const bool done = poll(timeout_seconds_, [&] {
    for (int r = 1; r < size_; ++r) {
      if (const auto bytes = read_whole(join_path(r), sizeof(Number))) {
        std::memcpy(&numbers[static_cast<std::size_t>(r)], bytes->data(), sizeof(Number));
      }
    }
    for (int r = 1; r < size_; ++r) {
      if (numbers[static_cast<std::size_t>(r)] == 0) return false;
    }
    if (numbers != answered) {
      std::vector<std::byte> answer(sizeof(NcclId) + numbers.size() * sizeof(Number));
      std::memcpy(answer.data(), id.data(), sizeof(NcclId));
      std::memcpy(answer.data() + sizeof(NcclId), numbers.data(), numbers.size() * sizeof(Number));
      write_aside(id_path(), answer.data(), answer.size());
      answered = numbers;
    }
    return acknowledged();
  });
  std::string missing;
  for (int r = 1; r < size_; ++r) {
    if (numbers[static_cast<std::size_t>(r)] == 0 || fs::exists(join_path(r))) {
      missing += fmt::format("{}{}", missing.empty() ? "" : ", ", r);
    }
  }
  std::error_code ignored;
  fs::remove(id_path(), ignored);
  check(done, "rank {} of {} did not come within {} s: look at its output, and whether it sees {}",
        missing, size_, timeout_seconds_, directory_);
  return id;
}

NcclId NcclIdFile::wait() const {
  std::random_device random;
  const Number own = (Number{random()} << 32 | random()) | 1;  // never 0
  write_aside(join_path(rank_), &own, sizeof(own));
  NcclId id;
  const bool done = poll(timeout_seconds_, [&] {
    const std::size_t numbers = static_cast<std::size_t>(size_) * sizeof(Number);
    const auto answer = read_whole(id_path(), sizeof(NcclId) + numbers);
    if (!answer) return false;
    Number answered = 0;
    std::memcpy(&answered,
                answer->data() + sizeof(NcclId) + static_cast<std::size_t>(rank_) * sizeof(Number),
                sizeof(Number));
    if (answered != own) return false;
    std::memcpy(id.data(), answer->data(), sizeof(NcclId));
    return true;
  });
  std::error_code ignored;
  fs::remove(join_path(rank_), ignored);
  check(done, "rank {}: rank 0 gave no NCCL id within {} s: look at its output, and whether it sees {}",
        rank_, timeout_seconds_, directory_);
  return id;
}

}  // namespace agoq

#include "comm/nccl_id_file.h"

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <random>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "comm/rank_names.h"
#include "comm/together.h"
#include "core/error.h"

namespace agoq {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using Number = std::uint64_t;  // of one rank of one launch

void write_aside(const std::string& path, const std::vector<char>& bytes) {
  const std::string aside = path + ".tmp";
  std::ofstream file(aside, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  check_input(static_cast<bool>(file),
              "{} cannot be written: choose a run.directory that all ranks share", path);
  fs::rename(aside, path);
}

/// The whole file; empty if it is absent.
std::vector<char> read_whole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// What stands at `at` of a file, and `at` behind it; nothing if the file is shorter.
template <typename Value>
std::optional<Value> take(const std::vector<char>& bytes, std::size_t& at) {
  static_assert(std::is_trivially_copyable_v<Value>);
  if (bytes.size() < at + sizeof(Value)) return std::nullopt;
  Value value;
  std::memcpy(&value, bytes.data() + at, sizeof(Value));
  at += sizeof(Value);
  return value;
}

template <typename Value>
void append(std::vector<char>& bytes, const Value& value) {
  static_assert(std::is_trivially_copyable_v<Value>);
  const auto* const first = reinterpret_cast<const char*>(&value);
  bytes.insert(bytes.end(), first, first + sizeof(Value));
}

/// Of one rank: what .nccl-join-R holds, and .nccl-id of all.
struct Joined {
  Greeting greeting{};
  Number number = 0;  // 0: has not come
};
static_assert(sizeof(Joined) == sizeof(Greeting) + sizeof(Number));

void expect_same_program(const std::vector<Joined>& ranks, bool says_so) {
  std::vector<Greeting> greetings;
  for (const Joined& rank : ranks) greetings.push_back(rank.greeting);
  const std::string difference = difference_of(greetings);
  if (!difference.empty()) throw AgreedError(ErrorKind::kInput, says_so ? difference : "");
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

NcclIdFile::NcclIdFile(const std::string& directory, const Launch& launch, const std::string& program,
                       double timeout_seconds)
    : directory_(directory),
      rank_(launch.rank),
      size_(launch.size),
      greeting_(greeting_of(program)),
      timeout_seconds_(timeout_seconds) {
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
  std::vector<Joined> joined(static_cast<std::size_t>(size_));
  joined.front().greeting = greeting_;
  // A number that an earlier launch left may be answered first: its owner is gone, and the rank of this
  // launch answers with another. So the answer is renewed as long as numbers change.
  std::vector<char> answered;
  const auto acknowledged = [&] {
    for (int r = 1; r < size_; ++r) {
      if (fs::exists(join_path(r))) return false;  // removed by its rank once it has the id
    }
    return true;
  };
  const bool done = poll(timeout_seconds_, [&] {
    bool all = true;
    for (int r = 1; r < size_; ++r) {
      Joined& rank = joined[static_cast<std::size_t>(r)];
      std::size_t at = 0;
      if (const auto read = take<Joined>(read_whole(join_path(r)), at)) rank = *read;
      all = all && rank.number != 0;
    }
    if (!all) return false;
    std::vector<char> answer;
    for (const Joined& rank : joined) append(answer, rank);
    append(answer, id);
    if (answer != answered) write_aside(id_path(), answer);
    answered = std::move(answer);
    return acknowledged();
  });
  std::vector<int> missing;
  for (int r = 1; r < size_; ++r) {
    if (joined[static_cast<std::size_t>(r)].number == 0 || fs::exists(join_path(r)))
      missing.push_back(r);
  }
  std::error_code ignored;
  fs::remove(id_path(), ignored);
  check(done, "{} of {} did not come within {} s: look at its output, and whether it sees {}",
        missing.empty() ? "a rank" : name_ranks(missing), size_, timeout_seconds_, directory_);
  expect_same_program(joined, /*says_so=*/true);
  return id;
}

NcclId NcclIdFile::wait() const {
  std::random_device random;
  const Joined own{greeting_, (Number{random()} << 32 | random()) | 1};  // never 0
  std::vector<char> bytes;
  append(bytes, own);
  write_aside(join_path(rank_), bytes);
  std::vector<Joined> joined(static_cast<std::size_t>(size_));
  std::optional<NcclId> id;
  // Where another rank is missing, rank 0 knows which.
  const bool done = poll(timeout_seconds_ + turn_seconds(rank_), [&] {
    const std::vector<char> answer = read_whole(id_path());
    std::size_t at = 0;
    for (Joined& rank : joined) {
      const auto read = take<Joined>(answer, at);
      if (!read) return false;
      rank = *read;
    }
    id = take<NcclId>(answer, at);
    return joined[static_cast<std::size_t>(rank_)].number == own.number;
  });
  std::error_code ignored;
  fs::remove(join_path(rank_), ignored);
  check(done, "rank {}: rank 0 gave no NCCL id within {} s: look at its output, and whether it sees {}",
        rank_, timeout_seconds_, directory_);
  expect_same_program(joined, /*says_so=*/false);
  check(id.has_value(), "rank {}: {} holds no NCCL id: start all ranks again", rank_, id_path());
  return *id;
}

}  // namespace agoq

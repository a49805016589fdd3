#include "train/rank_agreement.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <random>
#include <thread>

#include "backend/backend.h"
#include "checkpoint/durable_file.h"
#include "checkpoint/hugging_face.h"
#include "comm/rank_names.h"
#include "comm/together.h"
#include "core/checksum.h"
#include "core/error.h"

namespace agoq {
namespace {

// A network file system may show a new file to another machine with a delay.
constexpr std::chrono::seconds kAppears{10};

// Names and values hold no zero bytes.
std::string packed(const std::vector<RankFact>& facts) {
  std::string text;
  for (const auto& [name, value] : facts) (text += name).append(1, '\0').append(value).append(1, '\0');
  return text;
}

std::map<std::string, std::string> unpacked(const std::string& text) {
  std::map<std::string, std::string> facts;
  for (std::size_t at = 0; at < text.size();) {
    const std::string name(text.c_str() + at);
    const std::string value(text.c_str() + at + name.size() + 1);
    at += name.size() + value.size() + 2;
    facts.emplace(name, value);
  }
  return facts;
}

/// The facts in which the ranks differ, in words; in the order of rank 0's.
std::vector<std::string> differences(const std::vector<RankFact>& facts,
                                     const std::vector<std::string>& of_ranks) {
  std::vector<std::map<std::string, std::string>> theirs;
  for (const std::string& text : of_ranks) theirs.push_back(unpacked(text));
  std::vector<std::string> found;
  for (const auto& [name, value] : facts) {
    std::string other;
    std::vector<int> ranks;  // that have the other value
    for (std::size_t r = 1; r < theirs.size(); ++r) {
      const auto fact = theirs[r].find(name);
      const std::string of_rank = fact == theirs[r].end() ? "unknown" : fact->second;
      if (of_rank == value) continue;
      if (ranks.empty()) other = of_rank;
      if (of_rank == other) ranks.push_back(static_cast<int>(r));
    }
    if (ranks.empty()) continue;
    found.push_back(fmt::format("{} is {} on rank 0 and {} on {}", name, printable(value),
                                printable(other), name_ranks(ranks)));
  }
  return found;
}

[[noreturn]] void fail_on_all(const Communicator& ranks, const std::string& text) {
  throw AgreedError(ErrorKind::kInput, ranks.rank() == 0 ? text : "");
}

void write_probe(const std::string& directory, const std::string& name) {
  try {
    write_durably((std::filesystem::path(directory) / name).string(), "");
  } catch (const Error& error) {
    fail_input("run.directory {} cannot be written, and every rank saves its part there: {}", directory,
               error.what());
  }
}

}  // namespace

std::vector<RankFact> facts_of_run(const Communicator& ranks, const RunConfig& config, RunStart start) {
  std::vector<RankFact> facts{{"the library between the ranks", ranks.description()}};
  const char* const option = start == RunStart::kResume      ? "--resume"
                             : start == RunStart::kOverwrite ? "--overwrite"
                                                             : "no option";
  facts.emplace_back("how the run starts", option);
  for (RankFact& setting : settings_of(config)) {
    if (setting.first != "run.threads") facts.push_back(std::move(setting));
  }
  return facts;
}

std::vector<RankFact> facts_of_data(const Dataset& data) {
  return {{"the text at data.paths", data.fingerprint()}};
}

std::vector<RankFact> facts_of_weights(const Context& context, const std::vector<Parameter>& parameters,
                                       const std::vector<Tensor>& weights) {
  std::vector<RankFact> facts;
  std::vector<std::byte> piece;
  for (std::size_t p = 0; p < weights.size(); ++p) {
    std::uint32_t sum = 0;
    for (std::size_t first = 0; first < weights[p].bytes(); first += kTransferBytes) {
      piece.resize(std::min(kTransferBytes, weights[p].bytes() - first));
      context.backend.read(context, weights[p].data + first, piece.data(), piece.size());
      sum = checksum(piece.data(), piece.size(), sum);
    }
    facts.emplace_back("the checksum of the weight " + parameters[p].name, fmt::format("{:08x}", sum));
  }
  return facts;
}

void expect_agreement(Communicator& ranks, const std::vector<RankFact>& facts,
                      const std::string& advice) {
  const Patience patience(ranks);  // some may still read their text
  const std::vector<std::string> of_ranks = ranks.gather_texts(packed(facts));
  // All compare, and come to the same end: rank 0's facts are those that count.
  const bool equal = std::all_of(of_ranks.begin(), of_ranks.end(),
                                 [&](const std::string& text) { return text == of_ranks.front(); });
  if (equal) return;
  const std::vector<std::string> found = differences(facts, of_ranks);
  std::string more;
  if (found.size() > 1) {
    more = fmt::format(", and {} more difference{}", found.size() - 1, found.size() == 2 ? "" : "s");
  }
  fail_on_all(
      ranks, fmt::format("the ranks do not agree: {}{}; {}",
                         found.empty() ? "some know settings that rank 0 does not" : found.front(), more,
                         advice));
}

void expect_shared(Communicator& ranks, const std::string& directory) {
  if (ranks.size() == 1) return;
  // A name that nobody has seen before: an answer "there is none" may be remembered for a while.
  std::random_device random;
  const std::string name =
      ranks.gather_texts(fmt::format(".shared-{:08x}{:08x}", random(), random())).front();
  const std::filesystem::path path = std::filesystem::path(directory) / name;
  together(ranks, [&] {
    if (ranks.rank() == 0) write_probe(directory, name);
  });
  std::error_code error;
  bool seen = std::filesystem::exists(path, error);
  const auto start = std::chrono::steady_clock::now();
  while (!seen && std::chrono::steady_clock::now() - start < kAppears) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    seen = std::filesystem::exists(path, error);
  }
  const std::vector<char> all = [&] {
    const Patience patience(ranks);
    return ranks.gather_values<char>(seen ? 1 : 0);
  }();
  if (ranks.rank() == 0) std::filesystem::remove(path, error);
  std::vector<int> blind;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] == 0) blind.push_back(static_cast<int>(r));
  }
  if (!blind.empty()) {
    fail_on_all(ranks,
                fmt::format("run.directory {} is not the same on all ranks: {} cannot see what rank 0 "
                            "writes there; choose one on a file system that all machines share",
                            directory, name_ranks(blind)));
  }
  // A machine may have mounted it to read only, which the first save would come upon.
  together(ranks, [&] {
    if (ranks.rank() == 0) return;
    const std::string own = fmt::format("{}-{}", name, ranks.rank());
    write_probe(directory, own);
    std::filesystem::remove(std::filesystem::path(directory) / own, error);
  });
}

}  // namespace agoq

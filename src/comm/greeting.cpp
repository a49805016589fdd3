#include "comm/greeting.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <vector>

#include "comm/rank_names.h"
#include "comm/together.h"

namespace agoq {
namespace {

constexpr std::string_view kName = "agoq ";

/// "agoq 0.1.0 1a2b3c4, protocol 1", or what stands for a program that does not say so.
std::string program_of(const Greeting& greeting) {
  const std::string text(greeting.begin(), std::find(greeting.begin(), greeting.end(), '\0'));
  const bool is_text =
      std::all_of(text.begin(), text.end(), [](unsigned char byte) { return std::isprint(byte) != 0; });
  return is_text && text.rfind(kName, 0) == 0 ? text : "another program";
}

}  // namespace

Greeting greeting_of(const std::string& program) {
  const std::string protocol = fmt::format(", protocol {}", kRankProtocol);
  Greeting greeting{};
  const std::size_t room = greeting.size() - 1 - kName.size() - protocol.size();
  const std::string text = std::string(kName) + program.substr(0, room) + protocol;
  text.copy(greeting.data(), text.size());
  return greeting;
}

std::string difference_of(std::span<const Greeting> of_ranks) {
  std::vector<std::pair<std::string, std::vector<int>>> programs;
  for (std::size_t r = 0; r < of_ranks.size(); ++r) {
    const std::string program = program_of(of_ranks[r]);
    auto same = std::find_if(programs.begin(), programs.end(),
                             [&](const auto& entry) { return entry.first == program; });
    if (same == programs.end()) same = programs.insert(same, {program, {}});
    same->second.push_back(static_cast<int>(r));
  }
  if (programs.size() == 1) return "";
  std::string text;
  for (const auto& [program, ranks] : programs) {
    text += fmt::format("{}{} on {}", text.empty() ? "" : ", ", program, name_ranks(ranks));
  }
  return fmt::format("the ranks run different programs: {}; start all of them with the same one", text);
}

void greet(Communicator& ranks, const std::string& program) {
  if (ranks.size() == 1) return;
  const Greeting own = greeting_of(program);
  std::vector<Greeting> all(static_cast<std::size_t>(ranks.size()));
  try {
    ranks.gather(own.data(), all.data(), own.size());
  } catch (const Error& error) {
    fail_input("{}, in the first exchange of all: start all ranks with the same version of agoq",
               error.what());
  }
  const std::string difference = difference_of(all);
  if (!difference.empty()) throw AgreedError(ErrorKind::kInput, ranks.rank() == 0 ? difference : "");
}

}  // namespace agoq

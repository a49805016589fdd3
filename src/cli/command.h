// The shape of a subcommand: it declares its arguments and hands back what to run.
//
// Only arguments.cpp knows CLI11, whose headers take longer to compile than any command.
// To add a command: its file defines `Action declare_<name>(Arguments&)`, declared below and listed
// in main.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace agoq {

class ProcessRanks;

/// The arguments of one subcommand. Values are written when the command line is parsed and must live
/// until the action has run; what stands in them before is the default that --help shows.
class Arguments {
 public:
  explicit Arguments(CLI::App& app) : app_(app) {}

  /// A positional argument that must be there, or (vector) at least one.
  void positional(const std::string& name, std::string& value, const std::string& description);
  void positional(const std::string& name, std::vector<std::string>& values,
                  const std::string& description);
  /// `name` is "--tokens"; `placeholder` ("N") stands for the value in --help.
  void option(const std::string& name, const std::string& placeholder, std::string& value,
              const std::string& description);
  /// May be left out, but not be given empty: a script's variable that is not set is no default.
  void option(const std::string& name, const std::string& placeholder, std::optional<std::string>& value,
              const std::string& description);
  void option(const std::string& name, const std::string& placeholder, std::int64_t& value,
              const std::string& description);
  void option(const std::string& name, const std::string& placeholder, double& value,
              const std::string& description);
  /// One value each time it is given.
  void option(const std::string& name, const std::string& placeholder, std::vector<std::string>& values,
              const std::string& description);
  void flag(const std::string& name, bool& value, const std::string& description);

 private:
  CLI::App& app_;
};

/// Runs a command: prints to stdout, throws Error. Of several ranks (cli/process_ranks.h), which run
/// on each of them where the command is one for several processes, and on rank 0 alone otherwise.
using Action = std::function<void(ProcessRanks&)>;

enum class Processes : std::uint8_t { kOne, kSeveral };

struct Command {
  std::string name;
  std::string summary;
  Action (*declare)(Arguments&);
  Processes processes = Processes::kOne;
};

/// Parses the command line and runs the command it names. Returns the exit status: 0 done, 1 the run
/// failed, 2 bad input; an error is one line on stderr, "agoq: ...", of all ranks where there are
/// several. `opening` is the help's first paragraph.
int run_command_line(int argc, char** argv, const std::vector<Command>& commands,
                     const std::string& opening);

Action declare_train(Arguments&);
Action declare_plan(Arguments&);
Action declare_eval(Arguments&);
Action declare_generate(Arguments&);
Action declare_report(Arguments&);
Action declare_formats(Arguments&);
Action declare_bench(Arguments&);
Action declare_fidelity(Arguments&);
Action declare_info(Arguments&);

}  // namespace agoq

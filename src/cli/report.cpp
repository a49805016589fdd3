// agoq report: finished runs side by side.
#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "checkpoint/durable_file.h"
#include "checkpoint/json_text.h"
#include "cli/command.h"
#include "cli/summary_table.h"
#include "core/error.h"

namespace agoq {
namespace {

struct ReportArguments {
  std::vector<std::string> runs;
  std::optional<std::string> out;
  bool json = false;
};

/// The last part of a path: what a run is called among its neighbours.
std::string run_name(const std::string& directory) {
  std::filesystem::path path = std::filesystem::path(directory).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  return path.filename().string();
}

void report(const ReportArguments& arguments) {
  std::vector<NamedSummary> runs;
  nlohmann::ordered_json json;
  for (const std::string& directory : arguments.runs) {
    const std::string name = run_name(directory);
    check_input(!json.contains(name), "two runs are called '{}': give runs whose folders differ in name",
                name);
    runs.push_back({name, read_summary(directory)});
    json[name] = parse_json(to_json(runs.back().summary));
  }
  const std::string text = to_text(json) + "\n";
  if (arguments.out) write_durably(*arguments.out, text);
  fmt::print("{}", arguments.json ? text : summary_table(runs));
}

}  // namespace

Action declare_report(Arguments& arguments) {
  const auto given = std::make_shared<ReportArguments>();
  arguments.positional("RUN", given->runs, "Run directories; ratios are against the first");
  arguments.option("--out", "FILE", given->out, "Write the JSON there, whatever is printed");
  arguments.flag("--json", given->json, "Print JSON");
  return [given](ProcessRanks&) { report(*given); };
}

}  // namespace agoq

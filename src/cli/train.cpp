// agoq train: trains what a configuration describes.
#include <fmt/format.h>
#include <omp.h>

#include <memory>

#include "cli/command.h"
#include "cli/summary_table.h"
#include "train/training_run.h"

namespace agoq {
namespace {

struct TrainArguments {
  std::string config;
  std::vector<std::string> settings;
  bool resume = false;
  bool overwrite = false;
  bool json = false;
};

void train(const TrainArguments& arguments) {
  check_input(!(arguments.resume && arguments.overwrite),
              "--resume goes on with a run and --overwrite removes it: give one of them");
  const RunConfig config = load_run_config(arguments.config, arguments.settings);
  if (config.run.threads > 0) omp_set_num_threads(static_cast<int>(config.run.threads));
  RunOptions options;
  options.show_progress = !arguments.json;
  if (arguments.resume) options.start = RunStart::kResume;
  if (arguments.overwrite) options.start = RunStart::kOverwrite;
  const RunSummary summary = run_training(config, backend_of(config.run.device), options);
  if (summary.steps < config.run.steps) return;
  if (arguments.json) {
    fmt::print("{}", to_json(summary));
    return;
  }
  fmt::print("{}", summary_table({{config.run.directory, summary}}));
}

}  // namespace

Action declare_train(Arguments& arguments) {
  const auto given = std::make_shared<TrainArguments>();
  arguments.positional("CONFIG", given->config, "The run's configuration (TOML; examples/ has some)");
  arguments.option("--set", "KEY=VALUE", given->settings,
                   "Override a setting, for instance train.steps=100");
  arguments.flag("--resume", given->resume, "Go on from the newest checkpoint of the run directory");
  arguments.flag("--overwrite", given->overwrite, "Remove the run that the run directory holds");
  arguments.flag("--json", given->json, "Print the summary as JSON, and no progress");
  return [given] { train(*given); };
}

}  // namespace agoq

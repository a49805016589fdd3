// agoq train: trains what a configuration describes.
#include <fmt/format.h>

#include <csignal>
#include <memory>
#include <optional>

#include "backend/profiled_backend.h"
#include "cli/command.h"
#include "cli/operation_table.h"
#include "cli/process_ranks.h"
#include "cli/summary_table.h"
#include "core/stop_signals.h"
#include "train/training_run.h"

namespace agoq {
namespace {

struct TrainArguments {
  std::string config;
  std::vector<std::string> settings;
  bool resume = false;
  bool overwrite = false;
  bool profile = false;
  bool json = false;
};

void train(const TrainArguments& arguments, ProcessRanks& ranks) {
  // From here on: a rank that a signal ended while the ranks find each other and take their devices, for
  // which GPUs need seconds, would end them all, with nothing saved. Not where the ranks cannot speak
  // with each other yet: their launcher ends those of one that has failed in this way.
  std::optional<StopSignals> signals;
  if (ranks.can_speak()) signals.emplace();
  // `agoq train run.toml | head`: to the run a reader who left is an error of writing, after which it
  // saves a checkpoint, and so is a file that grows beyond what is allowed; the signals would end it at
  // once.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  RunConfig config;
  ranks.together([&] {
    check_input(!(arguments.resume && arguments.overwrite),
                "--resume goes on with a run and --overwrite removes it: give one of them");
    config = load_run_config(arguments.config, arguments.settings);
    ranks.set_timeout(config.parallel.timeout_seconds);
  });
  RunOptions options;
  options.show_progress = !arguments.json;
  if (arguments.resume) options.start = RunStart::kResume;
  if (arguments.overwrite) options.start = RunStart::kOverwrite;
  Backend& backend =
      ranks.join(config.run.device, world_options(config, config.run.directory), config.run.threads);
  options.ranks = &ranks.all();
  ProfiledBackend profiled(backend);
  const RunSummary summary =
      run_training(config, arguments.profile ? static_cast<Backend&>(profiled) : backend, options);
  if (ranks.leads()) {
    if (arguments.profile) {
      fmt::print(arguments.json ? stderr : stdout,
                 "\nThe whole run, each operation timed by itself:\n{}\n",
                 operation_table(profiled.profile()));
    }
    if (arguments.json) {
      fmt::print("{}", to_json(summary));
    } else if (!summary.stopped) {
      fmt::print("{}", summary_table({{config.run.directory, summary}}));
    }
  }
  ranks.leave();
}

}  // namespace

Action declare_train(Arguments& arguments) {
  const auto given = std::make_shared<TrainArguments>();
  arguments.positional("CONFIG", given->config, "The run's configuration (TOML; examples/ has some)");
  arguments.option("--set", "KEY=VALUE", given->settings,
                   "Override a setting, for instance train.steps=100");
  arguments.flag("--resume", given->resume, "Go on from the newest checkpoint of the run directory");
  arguments.flag("--overwrite", given->overwrite, "Remove the run that the run directory holds");
  arguments.flag("--profile", given->profile,
                 "Time each operation by itself and print what it took; the run is slower for it");
  arguments.flag("--json", given->json, "Print the summary as JSON, and no progress");
  return [given](ProcessRanks& ranks) { train(*given, ranks); };
}

}  // namespace agoq

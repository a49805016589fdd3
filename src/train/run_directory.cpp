#include "train/run_directory.h"

#include <charconv>
#include <filesystem>
#include <utility>

#include "checkpoint/durable_file.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/training_state.h"
#include "core/error.h"
#include "core/version.h"
#include "train/trainer.h"

namespace agoq {
namespace {

namespace fs = std::filesystem;

std::string checkpoints_of(const std::string& run) { return run + "/checkpoints"; }

/// The step of a line of metrics.jsonl, which begins {"step":N; -1 if it does not.
std::int64_t step_of(std::string_view line) {
  constexpr std::string_view kStart = R"({"step":)";
  if (line.substr(0, kStart.size()) != kStart) return -1;
  std::int64_t step = -1;
  std::from_chars(line.data() + kStart.size(), line.data() + line.size(), step);
  return step;
}

HuggingFaceConfig hugging_face_config(const RunConfig& config) {
  HuggingFaceConfig described;
  described.model = config.model;
  described.positions = config.run.sequence;
  described.end_of_document = kDocumentBorder;
  return described;
}

std::string newest_checkpoint(const std::string& run) {
  const std::optional<std::int64_t> step = latest_checkpoint(checkpoints_of(run));
  check_input(step.has_value(),
              "{} holds no checkpoint: train it first, with agoq train {}/config.toml --overwrite", run,
              run);
  return checkpoint_directory(checkpoints_of(run), *step);
}

}  // namespace

RunDirectory::RunDirectory(std::string path, RunStart start) : path_(std::move(path)) {
  const bool holds_run = fs::exists(path_ + "/config.toml") || fs::exists(checkpoints_of(path_));
  if (start == RunStart::kResume) {
    check_input(holds_run, "{} holds no run: start one with agoq train CONFIG --set run.directory={}",
                path_, path_);
    return;
  }
  check_input(start == RunStart::kOverwrite || !holds_run,
              "{} holds a run: go on with it (--resume), remove it (--overwrite), or choose another "
              "run.directory",
              path_);
  std::error_code error;
  if (holds_run) {
    // Only what a run writes: the directory may hold files of the user's.
    fs::remove_all(checkpoints_of(path_), error);
    for (const char* name : {"config.toml", "plan.json", "metrics.jsonl", "summary.json"}) {
      fs::remove(path_ + "/" + name, error);
    }
  }
  fs::create_directories(path_, error);
  check_input(!error && fs::is_directory(path_), "run.directory {} cannot be created: {}", path_,
              error.message());
}

RunConfig RunDirectory::config() const { return load_run_config(path_ + "/config.toml"); }

void RunDirectory::write(const std::string& name, std::string_view text) const {
  write_durably(path_ + "/" + name, text);
}

std::ofstream RunDirectory::open_metrics(std::int64_t step) const {
  const std::string path = path_ + "/metrics.jsonl";
  std::string kept;
  std::ifstream old(path);
  for (std::string line; std::getline(old, line);) {
    const std::int64_t of_line = step_of(line);
    if (0 <= of_line && of_line <= step) kept += line + "\n";
  }
  old.close();
  write_durably(path, kept);
  std::ofstream metrics(path, std::ios::app);
  check_input(metrics.is_open(), "{} cannot be opened for writing", path);
  return metrics;
}

void RunDirectory::save(const RunConfig& config, Trainer& trainer, std::int64_t next_sequence) const {
  const HuggingFaceConfig described = hugging_face_config(config);
  const TrainingSubject subject{described, trainer.model().parameters(), trainer.model().weights(),
                                trainer.optimizer(), config.gradients.format};
  write_checkpoint(trainer.context(), checkpoints_of(path_), subject,
                   {trainer.step(), next_sequence, config.run.seed}, config.checkpoint.keep, kVersion);
}

std::int64_t RunDirectory::load_latest(const RunConfig& config, Trainer& trainer) const {
  const HuggingFaceConfig described = hugging_face_config(config);
  const TrainingSubject subject{described, trainer.model().parameters(), trainer.model().weights(),
                                trainer.optimizer(), config.gradients.format};
  const std::string directory = newest_checkpoint(path_);
  const TrainingPosition position = read_training_position(directory);
  check_input(position.seed == config.run.seed,
              "{} was made with run.seed {}, the configuration says {}: a resumed run keeps its seed",
              directory, position.seed, config.run.seed);
  read_checkpoint(trainer.context(), directory, subject);
  trainer.set_step(position.step);
  return position.next_sequence;
}

void RunDirectory::load_latest_weights(const Context& context, const RunConfig& config,
                                       const Transformer& model) const {
  read_model(context, newest_checkpoint(path_), config.model, model.parameters(), model.weights());
}

}  // namespace agoq

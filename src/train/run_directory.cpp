#include "train/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include "checkpoint/durable_file.h"
#include "checkpoint/hugging_face.h"
#include "checkpoint/training_state.h"
#include "comm/together.h"
#include "core/error.h"
#include "core/version.h"
#include "train/rank_agreement.h"
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

std::string newest_checkpoint(const std::string& run, const Notice& notice) {
  std::vector<std::string> skipped;
  const std::optional<std::int64_t> step = latest_checkpoint(checkpoints_of(run), skipped);
  check_input(step || skipped.empty(), "{} holds no whole checkpoint; the newest is {}", run,
              skipped.empty() ? "" : skipped.front());
  check_input(step.has_value(),
              "{} holds no checkpoint: train it first, with agoq train {}/config.toml --overwrite", run,
              run);
  std::string directory = checkpoint_directory(checkpoints_of(run), *step);
  for (const std::string& line : skipped)
    notice(fmt::format("skipped {}; {} is taken", line, directory));
  return directory;
}

/// The first name in `run` that a run would write to; empty if there is none.
std::string name_of_a_run_in(const std::string& run) {
  for (const char* name : {"config.toml", "checkpoints", "plan.json", "metrics.jsonl", "summary.json"}) {
    std::error_code error;
    // The link itself: one that leads nowhere is somebody's too.
    if (fs::exists(fs::symlink_status(run + "/" + name, error))) return name;
  }
  return "";
}

/// Whether the file is a configuration as runs write it: readable, and with every section. One that a
/// person wrote to start runs from seldom has them all, and must not be taken for a run's.
bool is_resolved_config(const std::string& path) {
  try {
    load_run_config(path);
    std::set<std::string> missing;
    for (const ConfigKey& key : config_keys()) missing.insert(key.section);
    for (const TomlSection& section : parse_toml(read_text(path, std::size_t{1} << 20), path)) {
      missing.erase(section.name);
    }
    return missing.empty();
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

RunDirectory::RunDirectory(std::string path, RunStart start) : path_(std::move(path)), start_(start) {
  check_start();
}

RunDirectory::~RunDirectory() {
  if (lock_ >= 0) ::close(lock_);
}

void RunDirectory::check_start() const {
  const std::string found = name_of_a_run_in(path_);
  if (start_ == RunStart::kResume) {
    check_input(!found.empty(),
                "{} holds no run: start one with agoq train CONFIG --set run.directory={}", path_,
                path_);
    return;
  }
  if (found.empty()) return;
  check_input(is_resolved_config(path_ + "/config.toml"),
              "{} has a {}, but no config.toml that a run wrote: it is not agoq's to replace; choose "
              "another run.directory",
              path_, found);
  check_input(start_ == RunStart::kOverwrite,
              "{} holds a run: go on with it (--resume), remove it (--overwrite), or choose another "
              "run.directory",
              path_);
}

std::vector<std::string> RunDirectory::check_settings(const RunConfig& now) const {
  if (start_ != RunStart::kResume) return {};
  const std::string name = path_ + "/config.toml";
  std::error_code error;
  check_input(
      fs::exists(name, error),
      "{} is missing, so that nothing says how the run was trained: copy it back, or start a new "
      "run in another run.directory",
      name);
  return changes_on_resume(config(), now, name);
}

void RunDirectory::lock() {
  std::error_code error;
  fs::create_directories(path_, error);
  check_input(!error && fs::is_directory(path_, error), "run.directory {} cannot be created: {}", path_,
              error ? error.message() : "it is not a folder");
  const std::string name = path_ + "/run.lock";
  lock_ = ::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  const int open_error = errno;
  check_input(lock_ >= 0, "cannot create '{}': {}; choose a run.directory that can be written to", name,
              std::strerror(open_error));
  if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
    const int lock_error = errno;
    check_input(lock_error != EWOULDBLOCK,
                "{} is in use by another run: wait for its end, or choose another run.directory", path_);
    // Some network file systems have no locks: there, keeping runs apart is left to the user.
    check(lock_error == ENOLCK || lock_error == ENOSYS || lock_error == EOPNOTSUPP,
          "cannot lock '{}': {}; check its file system", name, std::strerror(lock_error));
  }
  // A run may have begun since the directory was looked at.
  check_start();
}

void RunDirectory::begin(const RunConfig& config, std::string_view plan) const {
  const auto remove = [&](const char* name) {
    std::error_code error;
    fs::remove(path_ + "/" + name, error);
    check(!error, "cannot remove '{}/{}': {}", path_, name, error.message());
  };
  if (start_ == RunStart::kResume) remove("summary.json");
  if (start_ == RunStart::kOverwrite) {
    remove_checkpoints(checkpoints_of(path_));
    for (const char* name : {"plan.json", "metrics.jsonl", "summary.json"}) remove(name);
    // config.toml is replaced, not removed: after a crash in between --overwrite still knows the run.
  }
  write("config.toml", to_toml(config));
  write("plan.json", plan);
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

std::optional<double> RunDirectory::metric(std::int64_t step, std::string_view name) const {
  const std::string start = fmt::format(R"({{"step":{},"{}":)", step, name);
  std::optional<double> found;
  std::ifstream metrics(path_ + "/metrics.jsonl");
  for (std::string line; std::getline(metrics, line);) {
    double value = 0;
    const char* end = line.data() + line.size();
    if (line.starts_with(start) &&
        std::from_chars(line.data() + start.size(), end, value).ec == std::errc()) {
      found = value;
    }
  }
  return found;
}

bool RunDirectory::is_finished() const {
  std::error_code error;
  return fs::exists(path_ + "/summary.json", error);
}

void RunDirectory::save(const RunConfig& config, Trainer& trainer, std::int64_t next_sequence) const {
  const HuggingFaceConfig described = hugging_face_config(config);
  const TrainingSubject subject{described, trainer.model().parameters(), trainer.model().weights(),
                                trainer.optimizer(), config.gradients.format};
  if (trainer.ranks().size() > 1) {
    // Each writes a part of the weights: parts of models that have drifted apart would make none.
    expect_agreement(
        trainer.ranks(),
        facts_of_weights(trainer.context(), trainer.model().parameters(), trainer.model().weights()),
        "a device or a link between them has failed: go on from the last checkpoint, with "
        "--resume, on other ones");
  }
  write_checkpoint(trainer.context(), trainer.ranks(), checkpoints_of(path_), subject,
                   {trainer.step(), next_sequence, config.run.seed, config.data.seed},
                   config.checkpoint.keep, kVersion);
}

std::int64_t RunDirectory::load_latest(const RunConfig& config, Trainer& trainer,
                                       const Notice& notice) const {
  const HuggingFaceConfig described = hugging_face_config(config);
  const TrainingSubject subject{described, trainer.model().parameters(), trainer.model().weights(),
                                trainer.optimizer(), config.gradients.format};
  Communicator& ranks = trainer.ranks();
  // All go on from the one that rank 0 sees: another machine may see a directory as it was before.
  std::string directory;
  together(ranks, [&] {
    if (ranks.rank() == 0) directory = newest_checkpoint(path_, notice);
  });
  directory = ranks.gather_texts(directory).front();
  TrainingPosition position;
  together(ranks, [&] {
    position = read_training_position(directory);
    check_input(position.seed == config.run.seed,
                "{} was made with run.seed {}, the configuration says {}: a resumed run keeps its seed",
                directory, position.seed, config.run.seed);
    check_input(position.data_seed == config.data.seed,
                "{} was made with data.seed {}, the configuration says {}: a resumed run keeps its seed",
                directory, position.data_seed, config.data.seed);
  });
  read_checkpoint(trainer.context(), ranks, directory, subject);
  trainer.set_step(position.step);
  return position.next_sequence;
}

void RunDirectory::load_latest_weights(const Context& context, const RunConfig& config,
                                       const Transformer& model, const Notice& notice) const {
  const std::string directory = newest_checkpoint(path_, notice);
  read_training_position(directory);  // refuses a directory of another name
  verify_weights(directory);
  read_model(context, directory, config.model, model.parameters(), model.weights());
}

}  // namespace agoq

// RunDirectory: the files of one run.
//
// Invariant: a run that cannot start leaves the directory as it was. What stands in it is removed or
// replaced by begin() only, when nothing that can fail is left to do, and only if agoq wrote it.
#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "train/progress.h"
#include "train/run_config.h"

namespace agoq {

class Trainer;
class Transformer;
struct Context;

/// What to do with a run directory that is not empty.
enum class RunStart : std::uint8_t {
  kNew,        // refuse if it holds a run
  kResume,     // go on from its newest checkpoint; refuse if there is none
  kOverwrite,  // remove the run it holds
};

class RunDirectory {
 public:
  /// Checks that a run can start there in this way; changes nothing. Throws Error (kInput) saying what
  /// to do.
  RunDirectory(std::string path, RunStart start);
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  /// What differs from the settings of the run that is to be resumed (changes_on_resume); nothing for
  /// one that starts. Throws Error (kInput) for a setting that may not change.
  std::vector<std::string> check_settings(const RunConfig& config) const;
  /// Creates the directory if it is absent and keeps it for this run until the object dies. Throws Error
  /// (kInput) if another run has it.
  void lock();
  /// Removes the run that is to be overwritten, or the summary of the one that goes on, and writes
  /// config.toml and plan.json.
  void begin(const RunConfig& config, std::string_view plan) const;

  /// The run's resolved configuration (config.toml).
  RunConfig config() const;
  /// Writes a whole file of the directory.
  void write(const std::string& name, std::string_view text) const;
  /// metrics.jsonl, for appending after `step`: lines of later steps, which a resumed run repeats, are
  /// removed.
  std::ofstream open_metrics(std::int64_t step) const;

  /// What metrics.jsonl gives for `step` as "loss" or "validation_loss"; nothing if it does not.
  std::optional<double> metric(std::int64_t step, std::string_view name) const;
  /// Whether the run has done all its steps and the last validation.
  bool is_finished() const;

  /// Checkpoint after trainer.step() steps; next_sequence: the position in the training stream.
  /// Collective over the trainer's ranks, like the next one.
  void save(const RunConfig& config, Trainer& trainer, std::int64_t next_sequence) const;
  /// Reads the newest whole checkpoint into the trainer; returns the position in the training stream.
  /// `notice` gets a line for each later one that is not whole.
  std::int64_t load_latest(const RunConfig& config, Trainer& trainer, const Notice& notice) const;
  /// The weights only.
  void load_latest_weights(const Context&, const RunConfig& config, const Transformer& model,
                           const Notice& notice) const;

 private:
  void check_start() const;

  std::string path_;
  RunStart start_;
  int lock_ = -1;  // descriptor of run.lock
};

}  // namespace agoq

// RunDirectory: the files of one run.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>

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
  /// Creates the directory, or checks that it holds a run. Throws Error (kInput) saying what to do.
  RunDirectory(std::string path, RunStart start);

  /// The run's resolved configuration (config.toml).
  RunConfig config() const;
  /// Writes a whole file of the directory.
  void write(const std::string& name, std::string_view text) const;
  /// metrics.jsonl, for appending after `step`: lines of later steps, which a resumed run repeats, are
  /// removed.
  std::ofstream open_metrics(std::int64_t step) const;

  /// Checkpoint after trainer.step() steps; next_sequence: the position in the training stream.
  void save(const RunConfig& config, Trainer& trainer, std::int64_t next_sequence) const;
  /// Reads the newest checkpoint into the trainer; returns the position in the training stream.
  std::int64_t load_latest(const RunConfig& config, Trainer& trainer) const;
  /// The weights only.
  void load_latest_weights(const Context&, const RunConfig& config, const Transformer& model) const;

 private:
  std::string path_;
};

}  // namespace agoq

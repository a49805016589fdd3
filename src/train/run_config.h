// RunConfig: everything a run is told, read from TOML.
//
// One table of keys (config_keys) drives all of it: parsing, ranges, unknown keys, --set overrides
// and writing the resolved settings back as TOML, so a key is described in exactly one place.
// Invariant: parse_run_config(to_toml(c)) == c for every c that check() accepts.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "activations/bit_plan.h"
#include "data/dataset.h"
#include "gradients/gradient_reducer.h"
#include "gradients/main_gradients.h"
#include "model/model_config.h"
#include "optim/adamw.h"
#include "train/toml_text.h"

namespace agoq {

struct CheckpointConfig {
  std::int64_t every = 0;  // steps between checkpoints; 0: only at the end of the run
  std::int64_t keep = 2;   // the newest that stay

  bool operator==(const CheckpointConfig&) const = default;
};

struct ParallelConfig {
  std::int64_t ranks = 0;  // 0: as many as were launched
  ReductionConfig reduction;
  double timeout_seconds = 60;
  int nccl_max_ctas = 0;    // comm/launch.h; 0: as many as NCCL chooses
  bool peer_copies = true;  // comm/launch.h

  bool operator==(const ParallelConfig&) const = default;
};

/// What becomes of a step whose loss or gradient is NaN or Inf (train/nonfinite_steps.h).
enum class NonFiniteAction : std::uint8_t { kStop, kSkip };

struct RunSettings {
  std::string directory = "runs/run";
  BackendKind device = BackendKind::kCpu;
  std::uint64_t seed = 1;
  bool deterministic = false;  // Backend::set_deterministic
  NonFiniteAction nonfinite = NonFiniteAction::kStop;
  std::int64_t nonfinite_limit = 10;  // skipped steps in a row that fail the run
  std::int64_t threads = 0;           // 0: one per processor
  std::int64_t log_every = 1;

  std::int64_t steps = 100;
  std::int64_t sequence = 256;          // tokens
  std::int64_t micro_batch = 2;         // sequences of one micro-batch
  std::int64_t micro_batches = 4;       // of one step
  std::int64_t validate_every = 0;      // steps; 0: after the last step only
  std::int64_t validation_batches = 0;  // micro-batches of one validation; 0: all

  bool operator==(const RunSettings&) const = default;
  std::int64_t tokens_per_step() const { return sequence * micro_batch * micro_batches; }
};

struct RunConfig {
  ModelConfig model;
  DataConfig data;
  OptimizerConfig optimizer;
  ActivationConfig activations;
  GradientConfig gradients;
  ParallelConfig parallel;
  CheckpointConfig checkpoint;
  RunSettings run;  // the keys of [train] and [run]

  bool operator==(const RunConfig&) const = default;
  /// Throws Error (kInput) naming the keys that do not fit together. Single values are in range
  /// already when they come from a file or an override.
  void check() const;
};

struct ConfigKey {
  std::string section;
  std::string name;
  std::string allowed;      // "an integer from 1", "one of cosine, linear": completes "must be ..."
  std::string description;  // one line
  std::function<Setting(const RunConfig&)> get;
  /// False when the value is not an allowed one; it holds the alternative that get() returns.
  std::function<bool(RunConfig&, const Setting&)> set;
  /// False: the data stream or the meaning of the saved state depends on it.
  bool may_change_on_resume = false;

  std::string full_name() const { return section + "." + name; }
};

/// Every key, in the order in which to_toml writes them.
const std::vector<ConfigKey>& config_keys();

/// parse_format for activations and gradients, which have both signs: refuses codes for non-negative
/// values, which would make zeros of half of them. Throws Error (kInput) that suggests the nearest.
QuantFormat parse_signed_format(const std::string& text);

/// The text of `toml` over the defaults, then `overrides` ("section.key=value") in their order, then
/// RunConfig::check(). `name` stands in messages. Throws Error (kInput) with name and line.
RunConfig parse_run_config(std::string_view toml, const std::string& name,
                           const std::vector<std::string>& overrides = {});
/// parse_run_config of the file at `path`.
RunConfig load_run_config(const std::string& path, const std::vector<std::string>& overrides = {});

/// The settings in which a run that is resumed differs from what it was trained with: "KEY OLD -> NEW",
/// in the order of the keys. `name` says where `trained` stands. Throws Error (kInput) for one that
/// may not change.
std::vector<std::string> changes_on_resume(const RunConfig& trained, const RunConfig& now,
                                           const std::string& name);

/// The configuration with the number of ranks that are there as parallel.ranks. Throws Error (kInput) if
/// it asks for another number.
RunConfig with_ranks(const RunConfig& config, const Communicator& ranks);

/// What the user should know of `config`, whose parallel.ranks are known, where some of the ranks have
/// no micro-batch of a step; empty where all have.
std::string idle_ranks_of(const RunConfig& config);

/// How the ranks of the run reduce gradients: "quangrad", "library, optimizer sharded".
std::string reduction_of(const RunConfig& config);

/// Every setting's full name and its value as TOML writes it.
std::vector<std::pair<std::string, std::string>> settings_of(const RunConfig& config);

/// All settings as TOML, each under its description.
std::string to_toml(const RunConfig& config);

}  // namespace agoq

// NonFiniteSteps: what becomes of a step whose loss or gradient is not finite (run.nonfinite).
//
//   stop   the run fails; the weights are those of the step before
//   skip   weights, masters and moments stay bit for bit as they are, and the run goes on with the next
//          step's data and learning rate; nonfinite_limit such steps in a row fail the run
//
// Either way the micro-batches of the step go forward once more, traced, to tell where NaN or Inf first
// appears (Trainer::first_not_finite).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "data/dataset.h"
#include "train/trainer.h"

namespace agoq {

class NonFiniteSteps {
 public:
  NonFiniteSteps(const RunConfig& config, Trainer& trainer, const Dataset& data)
      : config_(config), trainer_(trainer), data_(data) {}

  /// Trainer::finish_step; nothing when the step was skipped. first_sequence: where in the training
  /// stream the step began; `batch` is overwritten when something is not finite.
  std::optional<StepReport> finish_step(std::int64_t first_sequence, HostBatch& batch);

  /// Of the step that was skipped last: its line in metrics.jsonl, and one for people.
  const std::string& metrics_line() const { return metrics_line_; }
  const std::string& note() const { return note_; }
  /// Steps skipped by this object.
  std::int64_t skipped() const { return skipped_; }

 private:
  /// Where NaN or Inf first appears, as the end of a sentence.
  std::string origin(std::int64_t first_sequence, HostBatch& batch);

  const RunConfig& config_;
  Trainer& trainer_;
  const Dataset& data_;
  std::string metrics_line_;
  std::string note_;
  std::int64_t skipped_ = 0;
  std::int64_t in_a_row_ = 0;
};

}  // namespace agoq

// A training run: the loop around Trainer, with its run directory, progress and checkpoints.
//
// Run directory: config.toml (resolved), plan.json, metrics.jsonl (a line per step and validation),
// checkpoints/step-N/, summary.json, and run.lock, which keeps other runs away; rank 0 writes it. The
// same configuration, seed and data give the same losses, also across --resume.
#pragma once

#include <cstdint>
#include <string>

#include "backend/backend.h"
#include "train/progress.h"
#include "train/run_config.h"
#include "train/run_directory.h"

namespace agoq {

struct RunSummary {
  std::string policy;
  std::int64_t ranks = 1;
  std::string reduction;                     // of several ranks: reduction_of()
  double exposed_communication_seconds = 0;  // of several ranks: median over steps (StepReport)
  double exposed_communication_share = 0;    // of the median step
  std::int64_t steps = 0;
  bool stopped = false;            // by a signal, before the last step or its validation was done
  std::int64_t skipped_steps = 0;  // by run.nonfinite, since the run was started or resumed
  std::int64_t parameters = 0;
  double training_loss = 0;                // of the last step
  double validation_loss = 0;              // nats per token, after the last step
  double order1_byte_loss = 0;             // what an order-1 byte model reaches on the same split
  std::size_t saved_activation_bytes = 0;  // high water over micro-batches in flight
  std::size_t main_gradient_bytes = 0;
  std::size_t moment_bytes = 0;
  std::size_t master_bytes = 0;
  std::size_t weight_bytes = 0;
  std::size_t peak_bytes_predicted = 0;
  /// Of the memory that the arenas lie in; 0 where it is not known (PeakMemory).
  std::int64_t peak_bytes_measured = 0;
  std::int64_t resident_bytes_grown = 0;  // VmHWM at the end minus VmRSS at the start
  double tokens_per_second = 0;           // median over steps
};

struct RunOptions {
  RunStart start = RunStart::kNew;
  bool show_progress = true;
  /// Who share the run; null: this process alone. Rank 0 shows progress and writes the run directory.
  Communicator* ranks = nullptr;
  /// Gets a line for each setting that changed on resume, for each checkpoint that was skipped, and
  /// where ranks have nothing to do.
  Notice notice = print_notice;
};

/// Trains, or goes on from the newest checkpoint. On a signal of StopSignals (core/stop_signals.h)
/// saves a checkpoint and returns after the step, or the micro-batch of a validation, under way, with
/// summary.stopped set; one that came before the call counts where the caller's StopSignals lives. When
/// progress can no longer be printed, saves a checkpoint and throws Error (kFailure); for a pipe,
/// SIGPIPE has to be ignored. What fails on the device fails the run with the step, the operation and
/// the last checkpoint named. Collective; the summary's bytes are rank 0's own.
///
/// Of several ranks, one that dies, stands still or fails ends them all with one line
/// (comm/rank_watch.h): this process then ends in here, with the error's exit status.
RunSummary run_training(const RunConfig& config, Backend& backend, const RunOptions& options);

/// summary.json of a run directory; throws Error (kInput) if the run did not finish.
RunSummary read_summary(const std::string& directory);
std::string to_json(const RunSummary& summary);

}  // namespace agoq

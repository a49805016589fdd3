// The speed of training steps on random tokens, beside the floor that the same machine sets.
//
//   tokens/s   median over steps, each from its first upload to the last weight
//   MFU        model FLOPs per second over the device's peak. Model FLOPs per token: 6 for each weight
//              in a matrix product, and 12 layers width sequence for attention; under the causal
//              mask half of that, and both conventions are given. Recomputation does not count.
//   floor      matrix products and attention at the speed of each measured by itself, every other
//              byte once at the speed of a copy
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "backend/profiled_backend.h"
#include "train/run_config.h"
#include "train/run_plan.h"

namespace agoq {

struct StepBenchmarkOptions {
  int warmup_steps = 3;
  int steps = 10;
  /// Neither operations by themselves nor the floor, which take several steps' time.
  bool speed_only = false;
};

struct StepBenchmark {
  int ranks = 1;
  std::int64_t tokens = 0;           // of a step, over all ranks
  std::vector<double> step_seconds;  // of each timed step
  double median_seconds = 0;
  // Median over steps: what the host takes until everything up to the last gradient is queued. On a GPU
  // the rest of a step is waiting, as long as the queue does not fill up.
  double host_seconds = 0;
  double tokens_per_second = 0;
  // Medians over steps of what a StepReport says of them.
  double exposed_communication_seconds = 0;
  double rank_wait_seconds = 0;
  double model_flops = 0;                // of a step, causal attention
  double model_flops_full = 0;           // of a step, attention over the full square
  std::optional<double> peak_flops;      // of the devices, dense BF16; nothing for those not listed
  std::int64_t peak_bytes_measured = 0;  // 0 where it is not known (PeakMemory)
  RunPlan plan;
  // Of a rank that is alone only, and not with speed_only: of one step, each operation timed by itself;
  // and the floor.
  std::vector<OperationProfile> operations;
  double operations_seconds = 0;     // their sum
  double copy_bytes_per_second = 0;  // read and write
  double floor_seconds = 0;          // of a step; 0: not measured
  double loss = 0;                   // of the last step, so that nobody optimises it away

  std::string to_json(const RunConfig& config) const;
};

/// Collective over `ranks`, which share the step's micro-batches.
StepBenchmark benchmark_step(const RunConfig& config, Backend& backend, Communicator& ranks,
                             const StepBenchmarkOptions& options);

}  // namespace agoq

// What tests of data parallelism share: configurations, batches, and a run on some of the ranks.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "ranks/ranks.h"
#include "train/run_plan.h"
#include "train/tiny_model.h"
#include "train/trainer.h"

namespace agoq {

inline constexpr QuantFormat kE4m3{Code::kE4m3, 128, ScaleType::kFp32, Rounding::kNearest};

/// FP32 throughout, in one segment.
inline RunConfig fp32_config() {
  RunConfig config;
  config.model = testing_train::tiny_model(/*hidden=*/64, /*feed_forward=*/176);
  config.model.segments = 1;
  config.model.loss_chunk = 16;
  config.run.sequence = 16;
  config.run.micro_batch = 1;
  config.run.micro_batches = 24;
  config.run.steps = 50;
  config.optimizer.learning_rate = 5e-4;
  config.optimizer.warmup_steps = 5;
  testing_train::quantise_nothing(config);
  return config;
}

/// The same with everything that AGoQ quantises.
inline RunConfig agoq_config() {
  RunConfig config = fp32_config();
  config.model.dtype = ElementType::kBf16;
  config.activations.policy = SavePolicy::kAgoq;
  config.optimizer.master = MasterKind::kRemainder;
  config.optimizer.moments_8bit = true;
  config.gradients.format = kE4m3;
  return config;
}

/// Micro-batch `number` of an endless made-up text with structure to learn, whose targets are ragged, so
/// that ranks have different numbers of valid tokens; every seventh micro-batch has none at all.
inline HostBatch ragged_batch(std::int64_t number, std::int64_t sequence) {
  HostBatch batch = shape_only_batch(1, sequence);
  batch.valid_tokens = 0;
  for (std::int64_t i = 0; i < sequence; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const std::int64_t place = number * 5 + i;
    batch.tokens[at] = static_cast<std::int32_t>((place * place + number) % 61);
    batch.targets[at] = static_cast<std::int32_t>(((place + 1) * (place + 1) + number) % 61);
    const bool valid = number % 7 != 3 && i < 4 + number * 5 % (sequence - 3);
    batch.weights[at] = valid ? 1.0f : 0.0f;
    batch.valid_tokens += valid ? 1 : 0;
  }
  return batch;
}

/// A run that owns its memory.
class RankRun {
 public:
  RankRun(const RunConfig& given, Communicator& group)
      : config(with_ranks(given, group.size())),
        arenas(rank_backend().allocator(), plan_run(config, rank_backend(), 0, false).classes),
        trainer(config, rank_backend(), arenas, group) {
    trainer.initialise();
  }
  explicit RankRun(const RunConfig& given) : RankRun(given, *alone()) {}

  void accumulate() {
    trainer.begin_step();
    for (std::int64_t i = 0; i < trainer.own_micro_batches(); ++i) {
      trainer.micro_batch(
          ragged_batch(trainer.step() * config.run.micro_batches + trainer.micro_batch_number(i),
                       config.run.sequence));
    }
  }
  StepReport step() {
    accumulate();
    return trainer.finish_step();
  }
  std::string weight_bytes() {
    std::string bytes;
    for (const Tensor& weight : trainer.model().weights()) {
      bytes += bytes_of(weight);
    }
    return bytes;
  }

 private:
  static RunConfig with_ranks(RunConfig config, int size) {
    config.parallel.ranks = size;
    config.run.device = rank_device();
    config.run.deterministic = true;
    return config;
  }
  static Communicator* alone() {
    static const std::unique_ptr<Communicator> one = single_rank();
    return one.get();
  }

 public:
  RunConfig config;
  RunArenas arenas;
  Trainer trainer;
};

/// What every rank gave, one after the other: the same on all ranks, or on which it is not.
inline void expect_same_on_all_ranks(const std::string& bytes) {
  const std::vector<std::string> of_ranks = ranks().gather_texts(bytes);
  for (std::size_t r = 1; r < of_ranks.size(); ++r) {
    EXPECT_TRUE(of_ranks[r] == of_ranks[0]) << "ranks 0 and " << r << " differ";
  }
}

// Where only the last bit matters, a few steps show it.
inline constexpr std::int64_t kFewSteps = 8;

/// The reports and weights after some steps, which are the same on all ranks.
inline std::string after_steps(const RunConfig& config, std::int64_t count = kFewSteps) {
  RankRun run(config, ranks());
  std::string reports;
  for (std::int64_t step = 0; step < count; ++step) {
    const StepReport report = run.step();
    reports += fmt::format("{} {} ", report.loss, report.gradient_norm);
  }
  std::string state = reports + run.weight_bytes();
  expect_same_on_all_ranks(state);
  return state;
}

}  // namespace agoq

// The plan's promise, measured from outside the arenas at the quickstart's shape: the predicted peak is
// the measured one, and a step allocates nothing once the first two have passed.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "core/random.h"
#include "train/memory_probe.h"
#include "train/run_plan.h"
#include "train/trainer.h"
#include "train/training_run.h"

namespace agoq {
namespace {

namespace fs = std::filesystem;

class TrainingMemory : public ::testing::Test {
 protected:
  TrainingMemory() {
    std::string name = (fs::temp_directory_path() / "agoq-memory-XXXXXX").string();
    check(mkdtemp(name.data()) != nullptr, "no temporary folder");
    folder_ = name;
    // As much text as the quickstart's, 8.8 MB, made up.
    RandomKey key;
    fs::create_directory(folder_ / "text");
    for (std::uint64_t d = 0; d < 40; ++d) {
      std::ofstream file(folder_ / fmt::format("text/{:02}.txt", d));
      std::string text(220000, ' ');
      for (std::uint64_t i = 0; i < text.size(); ++i) {
        text[i] = static_cast<char>('a' + random_bits(key, d * text.size() + i) % 26);
      }
      file << text;
    }
  }

 public:
  ~TrainingMemory() override { fs::remove_all(folder_); }

 protected:
  RunConfig quickstart(SavePolicy policy) const {
    RunConfig config = load_run_config(AGOQ_QUICKSTART);
    config.data.paths = {(folder_ / "text").string()};
    config.data.extensions = {".txt"};
    config.run.directory = (folder_ / name_of(policy)).string();
    config.run.steps = 4;
    config.run.validation_batches = 2;
    config.optimizer.warmup_steps = 1;
    config.activations.policy = policy;
    if (policy == SavePolicy::kKeep) {
      config.gradients.format = exact_format(ElementType::kFp32);
      config.optimizer.moments_8bit = false;
      config.optimizer.master = MasterKind::kFp32;
    }
    return config;
  }

  fs::path folder_;
};

TEST_F(TrainingMemory, ThePredictedPeakIsTheMeasuredOne) {
  if (!memory_probe_available()) GTEST_SKIP() << "this build does not count its memory";
  for (const SavePolicy policy : {SavePolicy::kAgoq, SavePolicy::kKeep}) {
    mark_memory();
    const RunSummary summary =
        run_training(quickstart(policy), cpu_backend(), {RunStart::kNew, /*show_progress=*/false});
    const auto predicted = static_cast<double>(summary.peak_bytes_predicted);
    const auto measured = static_cast<double>(summary.peak_bytes_measured);
    fmt::print("{}: predicted {:.0f}, measured {:.0f} bytes, ratio {:.4f}\n", name_of(policy), predicted,
               measured, predicted / measured);
    EXPECT_NEAR(predicted / measured, 1.0, 0.02) << name_of(policy);
  }
}

// Where the arenas are small beside the program and what it holds for moments only.
TEST_F(TrainingMemory, ThePredictedPeakOfATinyModelIsTheMeasuredOne) {
  if (!memory_probe_available()) GTEST_SKIP() << "this build does not count its memory";
  for (const SavePolicy policy : {SavePolicy::kAgoq, SavePolicy::kKeep}) {
    RunConfig config = quickstart(policy);
    config.model.hidden = 32;
    config.model.layers = 1;
    config.model.heads = 2;
    config.model.kv_heads = 1;
    config.model.head_size = 16;
    config.model.feed_forward = 32;
    config.model.segments = 1;
    config.run.sequence = 32;
    config.run.micro_batch = 1;
    for (const char* name : {"0.txt", "1.txt"}) {
      std::ofstream(folder_ / name) << std::string(2000, 'a');
    }
    config.data.paths = {(folder_ / "0.txt").string(), (folder_ / "1.txt").string()};
    config.data.holdout_every = 2;
    config.data.holdout_index = 1;
    // What is in the way has to be read first.
    run_training(config, cpu_backend(), {RunStart::kNew, false});
    mark_memory();
    const RunSummary summary = run_training(config, cpu_backend(), {RunStart::kOverwrite, false});
    const auto predicted = static_cast<double>(summary.peak_bytes_predicted);
    const auto measured = static_cast<double>(summary.peak_bytes_measured);
    fmt::print("{}: predicted {:.0f}, measured {:.0f} bytes, ratio {:.4f}\n", name_of(policy), predicted,
               measured, predicted / measured);
    EXPECT_NEAR(predicted / measured, 1.0, 0.02) << name_of(policy);
  }
}

TEST_F(TrainingMemory, AStepAllocatesNothingAndTheProcessDoesNotGrow) {
  if (!memory_probe_available()) GTEST_SKIP() << "this build does not count its memory";
  const RunConfig config = quickstart(SavePolicy::kAgoq);
  const Dataset data = Dataset::load(config.data);
  RunArenas arenas(cpu_backend().allocator(),
                   plan_run(config, cpu_backend(), data.bytes(), true).classes);
  Trainer trainer(config, cpu_backend(), arenas);
  trainer.initialise();
  HostBatch batch;
  std::int64_t next = 0;
  const auto step = [&] {
    trainer.begin_step();
    for (std::int64_t m = 0; m < config.run.micro_batches; ++m, next += config.run.micro_batch) {
      data.fill(Split::kTraining, 1, next, config.run.micro_batch, config.run.sequence, batch);
      trainer.micro_batch(batch);
    }
    trainer.finish_step();
  };
  step();
  step();
  mark_memory();
  const MemoryUse before = memory_use();
  const std::int64_t resident = resident_memory().current;
  step();
  step();
  const MemoryUse after = memory_use();
  EXPECT_EQ(after.large_allocations, 0);
  EXPECT_EQ(after.current, before.current);
  EXPECT_LE(resident_memory().current - resident, 1 << 16);
}

}  // namespace
}  // namespace agoq

// A run on a GPU holds to its plan: the free memory falls by the predicted peak, and no step changes it
// once every operation has been called. The CPU's are in memory_hooks/training_memory_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "backend/cuda_testing.h"
#include "core/temporary_folder.h"
#include "train/batch_buffers.h"
#include "train/peak_memory.h"
#include "train/run_plan.h"
#include "train/trainer.h"
#include "train/training_run.h"

namespace agoq {
namespace {

/// 3 GiB and more: what lies beside the arenas, some 20 MiB, is less than 1 % of that, also where
/// a test before has loaded kernels already. Most of it is activations, so that checkpoints are small.
RunConfig run_of_gibibytes() {
  RunConfig config;
  config.run.device = BackendKind::kCuda;
  config.model.hidden = 1024;
  config.model.layers = 4;
  config.model.heads = 8;
  config.model.kv_heads = 4;
  config.model.head_size = 128;
  config.model.feed_forward = 4096;
  config.model.loss_chunk = 4096;
  config.run.sequence = 4096;
  config.run.micro_batch = 8;
  config.run.micro_batches = 2;
  config.run.steps = 5;
  config.run.validation_batches = 1;
  config.optimizer.warmup_steps = 1;
  return config;
}

class CudaRunMemory : public testing::TestWithParam<SavePolicy> {
 protected:
  RunConfig config() const {
    RunConfig config = run_of_gibibytes();
    config.activations.policy = GetParam();
    return config;
  }
};

std::size_t free_memory() { return cuda_backend().device_memory()->free; }

TEST_P(CudaRunMemory, ThePredictedPeakIsTheMeasuredOne) {
  AGOQ_NEEDS_GPU();
  const TemporaryFolder folder;
  const RandomKey key;
  // Documents longer than a sequence and as long as some: batches of one kind and of the other.
  for (std::uint64_t d = 0; d < 40; ++d) {
    std::string text(60000, ' ');
    for (std::uint64_t i = 0; i < text.size(); ++i) {
      text[i] = static_cast<char>('a' + random_bits(key, d * text.size() + i) % 26);
    }
    folder.write(fmt::format("text/{:02}.txt", d), text);
  }
  RunConfig config = this->config();
  config.data.paths = {folder.path("text")};
  config.run.directory = folder.path("run");
  const RunSummary summary =
      run_training(config, cuda_backend(), {RunStart::kNew, /*show_progress=*/false});
  const auto predicted = static_cast<double>(summary.peak_bytes_predicted);
  const auto measured = static_cast<double>(summary.peak_bytes_measured);
  fmt::print("predicted {:.0f}, measured {:.0f} bytes, ratio {:.4f}\n", predicted, measured,
             predicted / measured);
  EXPECT_GT(predicted, 2.0 * (1 << 30)) << "less than what is beside the arenas can hide in";
  EXPECT_NEAR(predicted / measured, 1.0, 0.02);
}

TEST_P(CudaRunMemory, AStepAllocatesNothing) {
  AGOQ_NEEDS_GPU();
  const RunConfig config = this->config();
  const PeakMemory peak(cuda_backend());
  const RunPlan plan = plan_run(config, cuda_backend(), 0, false);
  RunArenas arenas(cuda_backend().allocator(), plan.classes);
  Trainer trainer(config, cuda_backend(), arenas);
  trainer.initialise();
  HostBatch batch = shape_only_batch(config.run.micro_batch, config.run.sequence);
  for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
    batch.tokens[i] = static_cast<std::int32_t>((i * 37 + 11) % 257);
    batch.targets[i] = static_cast<std::int32_t>((i * 53 + 5) % 257);
  }
  const auto step = [&] {
    trainer.begin_step();
    for (int m = 0; m < config.run.micro_batches; ++m) trainer.micro_batch(batch);
    return trainer.finish_step();
  };
  // The first loads kernels and times the algorithms of matrix products.
  step();
  step();
  const std::size_t before = free_memory();
  double loss = 0;
  for (int i = 0; i < 3; ++i) loss = step().loss;
  EXPECT_EQ(free_memory(), before);
  EXPECT_TRUE(std::isfinite(loss));
  EXPECT_NEAR(
      static_cast<double>(plan.predicted_peak()) / static_cast<double>(peak.bytes(plan.arena_bytes())),
      1.0, 0.02);
}

INSTANTIATE_TEST_SUITE_P(Policies, CudaRunMemory, testing::Values(SavePolicy::kAgoq, SavePolicy::kKeep),
                         [](const auto& test) { return std::string(name_of(test.param)); });

}  // namespace
}  // namespace agoq

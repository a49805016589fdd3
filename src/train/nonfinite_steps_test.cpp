// Steps with NaN or Inf: where the trace finds them first, that a skipped step changes nothing, and that
// a run stops when it is told to. On the CPU, and on a GPU where there is one.
#include "train/nonfinite_steps.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>

#include "backend/cuda_testing.h"
#include "backend/profiled_backend.h"
#include "checkpoint/training_state.h"
#include "core/temporary_folder.h"
#include "train/finite_trace.h"
#include "train/run_plan.h"
#include "train/tiny_model.h"
#include "train/training_run.h"

namespace agoq {
namespace {

/// Another backend that plants NaN in the output of attention, of the first layer that computes it, in
/// some steps.
class Planting : public ProfiledBackend {
 public:
  Planting(Backend& backend, std::vector<std::uint32_t> steps)
      : ProfiledBackend(backend), steps_(std::move(steps)) {}

  void embedding_forward(const Context& context, const Tensor& tokens, const Tensor& table,
                         const Tensor& out) override {
    ProfiledBackend::embedding_forward(context, tokens, table, out);
    first_layer_ = true;
  }
  void attention_forward(const Context& context, const AttentionShape& shape, const Tensor& qkv,
                         const Documents& documents, const Tensor& out,
                         const Tensor& log_sum_exp) override {
    ProfiledBackend::attention_forward(context, shape, qkv, documents, out, log_sum_exp);
    const bool now = std::find(steps_.begin(), steps_.end(), context.random.step) != steps_.end();
    if (now && first_layer_) {
      const std::vector<std::byte> not_a_number(size_of(out.type), std::byte{0xFF});
      upload(context, not_a_number.data(), out.data, not_a_number.size());
    }
    first_layer_ = false;
  }

 private:
  std::vector<std::uint32_t> steps_;
  bool first_layer_ = false;
};

RunConfig small_config(BackendKind device) {
  RunConfig config;
  config.model = testing_train::tiny_model(/*hidden=*/64, /*feed_forward=*/128);
  config.model.loss_chunk = 20;
  config.run.device = device;
  config.run.deterministic = true;
  config.run.sequence = 32;
  config.run.micro_batch = 1;
  config.run.micro_batches = 2;
  config.run.steps = 6;
  config.optimizer.warmup_steps = 0;
  return config;
}

HostBatch some_batch(const RunConfig& config) {
  HostBatch batch = shape_only_batch(config.run.micro_batch, config.run.sequence);
  for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
    batch.tokens[i] = static_cast<std::int32_t>((i * 37 + 11) % 257);
    batch.targets[i] = static_cast<std::int32_t>((i * 53 + 5) % 257);
  }
  return batch;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A safetensors file without its header, which names the step.
std::string payload_of(const std::string& path) {
  const std::string bytes = read_file(path);
  std::uint64_t header = 0;
  if (bytes.size() < sizeof(header)) return "";
  std::memcpy(&header, bytes.data(), sizeof(header));
  return bytes.substr(sizeof(header) + header);
}

class NonFinite : public testing::TestWithParam<BackendKind> {
 protected:
  void SetUp() override {
    if (GetParam() == BackendKind::kCuda) AGOQ_NEEDS_GPU();
    for (int d = 0; d < 20; ++d) {
      std::string text;
      for (int s = 0; s < 30; ++s) text += fmt::format("document {} keeps sentence {}. ", d, s);
      folder_.write(fmt::format("text/{:02}.txt", d), text);
    }
  }
  Backend& backend() const { return backend_of(GetParam()); }
  RunConfig run_config(const std::string& name) const {
    RunConfig config = small_config(GetParam());
    config.data.paths = {folder_.path("text")};
    config.run.directory = folder_.path(name);
    config.checkpoint.every = 1;
    config.checkpoint.keep = 100;
    return config;
  }
  std::string state(const RunConfig& config, std::int64_t step) const {
    const std::string of = checkpoint_directory(config.run.directory + "/checkpoints", step);
    return payload_of(of + "/model.safetensors") + payload_of(of + "/state.safetensors");
  }
  static void train(const RunConfig& config, Backend& backend) {
    run_training(config, backend, {RunStart::kNew, /*show_progress=*/false});
  }

  TemporaryFolder folder_;
};

/// A trainer that owns its memory.
struct OwnedRun {
  OwnedRun(RunConfig run_config, Backend& backend)
      : config(std::move(run_config)),
        plan(plan_run(config, backend, 0, false)),
        arenas(backend.allocator(), plan.classes),
        trainer(config, backend, arenas) {
    trainer.initialise();
  }
  /// Fills a weight with one BF16 value.
  void fill(std::size_t parameter, float value) {
    const Tensor& weight = trainer.model().weights()[parameter];
    const std::vector<Bf16> values(static_cast<std::size_t>(weight.count()), to_bf16(value));
    const Context context = trainer.context();
    context.backend.upload(context, values.data(), weight.data, weight.bytes());
    std::byte byte{};  // a read waits for the copy
    context.backend.read(context, weight.data, &byte, 1);
  }
  RunConfig config;
  RunPlan plan;
  RunArenas arenas;
  Trainer trainer;
};

TEST_P(NonFinite, TheTraceFindsTheFirstTensorOfTheForwardPass) {
  for (const SavePolicy policy : {SavePolicy::kKeep, SavePolicy::kAgoq, SavePolicy::kRecompute}) {
    SCOPED_TRACE(name_of(policy));
    RunConfig config = small_config(GetParam());
    config.activations.policy = policy;
    const HostBatch batch = some_batch(config);
    {
      OwnedRun run(config, backend());
      EXPECT_EQ(run.trainer.first_not_finite(batch), std::nullopt);
      // Finite weights that overflow: 128 terms of about 1e38.
      run.fill(run.trainer.model().index().blocks[1].gate_up, 1e38f);
      run.fill(run.trainer.model().index().blocks[1].norm2, 1e3f);
      EXPECT_EQ(run.trainer.first_not_finite(batch), "layer 1 gate_up");
      run.fill(run.trainer.model().index().blocks[1].down, std::numeric_limits<float>::infinity());
      EXPECT_EQ(run.trainer.first_not_finite(batch), "the weight layers.1.down") << "the cause, if any";
      run.fill(run.trainer.model().index().blocks[0].qkv, std::numeric_limits<float>::quiet_NaN());
      EXPECT_EQ(run.trainer.first_not_finite(batch), "the weight layers.0.qkv");
    }
    {
      // What no slot holds is named by what came before it.
      OwnedRun run(config, backend());
      run.fill(run.trainer.model().index().head, 3e38f);
      run.fill(run.trainer.model().index().final_norm, 1e3f);
      EXPECT_EQ(run.trainer.first_not_finite(batch),
                "the result of matmul after layer 2 final_norm_input");
    }
    {
      Planting planting(backend(), {1});
      OwnedRun run(config, planting);
      EXPECT_EQ(run.trainer.first_not_finite(batch), "layer 0 attention_output");
    }
  }
}

TEST_P(NonFinite, StopNamesStepLayerAndTensorAndLeavesTheLastCheckpoint) {
  const RunConfig config = run_config("run");
  Planting planting(backend(), {3});
  try {
    train(config, planting);
    FAIL() << "a step with NaN was taken";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.kind(), ErrorKind::kNotFinite);
    for (const char* part : {"step 3: ", "stay those of step 2", "layer 0 attention_output",
                             "in micro-batch 1", "run.nonfinite = skip"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  }
  EXPECT_EQ(latest_checkpoint(config.run.directory + "/checkpoints"), 2);
  // It goes on from there as if nothing had been.
  run_training(config, backend(), {RunStart::kResume, false});
  const RunConfig clean = run_config("clean");
  train(clean, backend());
  EXPECT_TRUE(state(config, 6) == state(clean, 6));
}

TEST_P(NonFinite, SkipLeavesWeightsAndMomentsAndGoesOn) {
  RunConfig config = run_config("run");
  config.run.nonfinite = NonFiniteAction::kSkip;
  config.run.nonfinite_limit = 2;
  Planting planting(backend(), {3, 5});
  train(config, planting);
  EXPECT_FALSE(state(config, 2).empty());
  EXPECT_TRUE(state(config, 3) == state(config, 2));
  EXPECT_FALSE(state(config, 4) == state(config, 3));
  EXPECT_TRUE(state(config, 5) == state(config, 4));
  EXPECT_EQ(read_summary(config.run.directory).skipped_steps, 2);
  // The skipped step's data are not seen again: the others' are those of a run without NaN.
  std::ifstream metrics(config.run.directory + "/metrics.jsonl");
  std::vector<std::int64_t> steps, skipped;
  for (std::string line; std::getline(metrics, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("validation_loss")) continue;
    steps.push_back(json.at("step"));
    if (!json.value("skipped", false)) continue;
    skipped.push_back(json.at("step"));
    EXPECT_EQ(json.at("skipped_in_a_row"), 1);
    EXPECT_NE(json.at("reason").get<std::string>().find("layer 0 attention_output"), std::string::npos);
  }
  EXPECT_EQ(steps, (std::vector<std::int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(skipped, (std::vector<std::int64_t>{3, 5}));
}

TEST_P(NonFinite, SkippingEndsAfterAsManyInARowAsAreAllowed) {
  RunConfig config = run_config("run");
  config.run.nonfinite = NonFiniteAction::kSkip;
  config.run.nonfinite_limit = 2;
  Planting planting(backend(), {2, 4, 5, 6});
  try {
    train(config, planting);
    FAIL() << "it went on";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("step 5: "), std::string::npos) << text;
    EXPECT_NE(text.find("2 steps in a row"), std::string::npos) << text;
  }
  EXPECT_EQ(latest_checkpoint(config.run.directory + "/checkpoints"), 4);
  EXPECT_TRUE(state(config, 4) == state(config, 3));
}

// A gradient may overflow where the forward pass did not.
TEST_P(NonFinite, TellsWhenItAroseGoingBackward) {
  struct Backward : ProfiledBackend {
    using ProfiledBackend::ProfiledBackend;
    void attention_backward(const Context& context, const AttentionShape& shape, const Tensor& dout,
                            const Tensor& qkv, const Tensor& out, const Tensor& log_sum_exp,
                            const Documents& documents, const Tensor& dqkv) override {
      ProfiledBackend::attention_backward(context, shape, dout, qkv, out, log_sum_exp, documents, dqkv);
      const std::vector<std::byte> not_a_number(size_of(dqkv.type), std::byte{0xFF});
      upload(context, not_a_number.data(), dqkv.data, not_a_number.size());
    }
  };
  for (const char* format : {"e4m3/128/fp32", "fp32"}) {
    RunConfig config = run_config(std::string("run-") + format[0]);
    config.gradients.format = parse_format(format);
    Backward planting(backend());
    try {
      train(config, planting);
      FAIL() << "a step with NaN was taken";
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("arose going backward"), std::string::npos) << text;
      EXPECT_NE(text.find("layers.1.qkv"), std::string::npos) << text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, NonFinite, testing::Values(BackendKind::kCpu, BackendKind::kCuda),
                         [](const auto& device) {
                           return std::string(device.param == BackendKind::kCpu ? "cpu" : "cuda");
                         });

}  // namespace
}  // namespace agoq

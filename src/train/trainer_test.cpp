// The training step: weighting over ragged micro-batches, what a measured and a real run take, and
// that numeric trouble stops a step before it changes a weight.
#include "train/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "backend/profiled_backend.h"
#include "checkpoint/json_text.h"
#include "train/run_plan.h"
#include "train/tiny_model.h"

namespace agoq {
namespace {

RunConfig tiny_config() {
  RunConfig config;
  config.model = testing_train::tiny_model(/*hidden=*/32, /*feed_forward=*/48);
  config.model.loss_chunk = 7;
  config.model.initial_deviation = 0.2;
  config.run.sequence = 10;
  config.run.micro_batch = 1;
  config.run.micro_batches = 8;
  config.run.steps = 10;
  config.optimizer.warmup_steps = 0;
  testing_train::quantise_nothing(config);
  return config;
}

/// A run that owns its memory.
struct TinyRun {
  explicit TinyRun(const RunConfig& run_config)
      : config(run_config),
        plan(plan_run(config, cpu_backend(), 0, false)),
        arenas(cpu_backend().allocator(), plan.classes),
        trainer(config, cpu_backend(), arenas) {
    trainer.initialise();
  }
  RunConfig config;
  RunPlan plan;
  RunArenas arenas;
  Trainer trainer;
};

/// Sequences [first, first + count) of an endless made-up text whose targets carry ragged weights:
/// sequence 3 has none at all.
HostBatch ragged_batch(std::int64_t first, std::int64_t count, std::int64_t sequence) {
  HostBatch batch = shape_only_batch(count, sequence);
  batch.valid_tokens = 0;
  for (std::int64_t s = 0; s < count; ++s) {
    for (std::int64_t i = 0; i < sequence; ++i) {
      const auto at = static_cast<std::size_t>(s * sequence + i);
      const std::int64_t global = (first + s) * sequence + i;
      batch.tokens[at] = static_cast<std::int32_t>((global * 37 + 11) % 257);
      batch.targets[at] = static_cast<std::int32_t>((global * 53 + 5) % 257);
      const bool valid = first + s != 3 && i < 2 + (first + s) % 9;
      batch.weights[at] = valid ? 1.0f : 0.0f;
      batch.valid_tokens += valid ? 1 : 0;
    }
  }
  return batch;
}

std::vector<float> weights_of(TinyRun& run, std::size_t parameter) {
  const Tensor& tensor = run.trainer.model().weights()[parameter];
  return {tensor.as<float>(), tensor.as<float>() + tensor.count()};
}

double relative_distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    norm += static_cast<double>(b[i]) * b[i];
  }
  return std::sqrt(difference / norm);
}

// A mean of the micro-batches' means would weigh a sequence of two targets like one of ten.
TEST(Trainer, EightRaggedMicroBatchesEqualOne) {
  RunConfig split_config = tiny_config();
  RunConfig whole_config = tiny_config();
  whole_config.run.micro_batch = 8;
  whole_config.run.micro_batches = 1;
  TinyRun split(split_config);
  TinyRun whole(whole_config);
  for (std::int64_t step = 0; step < 3; ++step) {
    split.trainer.begin_step();
    for (std::int64_t m = 0; m < 8; ++m) split.trainer.micro_batch(ragged_batch(8 * step + m, 1, 10));
    whole.trainer.begin_step();
    whole.trainer.micro_batch(ragged_batch(8 * step, 8, 10));
    const StepReport a = split.trainer.finish_step();
    const StepReport b = whole.trainer.finish_step();
    EXPECT_EQ(a.valid_tokens, b.valid_tokens);
    EXPECT_NEAR(a.loss, b.loss, 1e-6 * b.loss);
    EXPECT_NEAR(a.gradient_norm, b.gradient_norm, 1e-5 * b.gradient_norm);
  }
  for (std::size_t p = 0; p < split.trainer.model().parameters().size(); ++p) {
    EXPECT_LT(relative_distance(weights_of(split, p), weights_of(whole, p)), 1e-5)
        << split.trainer.model().parameters()[p].name;
  }
}

TEST(Trainer, AStepWithoutATargetIsRefused) {
  RunConfig config = tiny_config();
  config.run.micro_batches = 1;
  TinyRun run(config);
  const std::vector<float> before = weights_of(run, 0);
  run.trainer.begin_step();
  run.trainer.micro_batch(ragged_batch(3, 1, 10));
  EXPECT_THROW(run.trainer.finish_step(), Error);
  EXPECT_EQ(weights_of(run, 0), before);
}

TEST(Trainer, NotANumberStopsTheStepNamesTheTensorAndLeavesTheWeights) {
  RunConfig config = tiny_config();
  config.activations.policy = SavePolicy::kAgoq;
  config.run.micro_batches = 1;
  TinyRun run(config);
  const std::size_t qkv = run.trainer.model().index().blocks[1].qkv;
  const std::vector<float> before = weights_of(run, 0);
  run.trainer.model().weights()[qkv].as<float>()[5] = std::numeric_limits<float>::quiet_NaN();
  run.trainer.begin_step();
  run.trainer.micro_batch(ragged_batch(0, 1, 10));
  try {
    run.trainer.finish_step();
    FAIL() << "a step with NaN was taken";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("step 1"), std::string::npos) << text;
    EXPECT_NE(text.find("layer 1"), std::string::npos) << text;
  }
  EXPECT_EQ(weights_of(run, 0), before);
  EXPECT_EQ(run.trainer.step(), 0);
}

// The plan runs the step itself on measuring arenas: for every policy and format a real step must fit
// the planned arenas exactly, no byte more and none less.
TEST(Trainer, TakesExactlyThePlannedMemory) {
  for (const SavePolicy policy : {SavePolicy::kKeep, SavePolicy::kExact, SavePolicy::kAgoq,
                                  SavePolicy::kRecompute, SavePolicy::kUniform}) {
    for (const char* gradients : {"fp32", "bf16", "e4m3/128/fp32", "int8/128/fp32"}) {
      RunConfig config = tiny_config();
      config.activations.policy = policy;
      config.gradients.format = parse_format(gradients);
      config.model.dtype = ElementType::kBf16;
      config.optimizer.master = MasterKind::kRemainder;
      config.optimizer.moments_8bit = true;
      config.model.tied_embeddings = policy == SavePolicy::kExact;
      TinyRun run(config);
      for (std::int64_t step = 0; step < 2; ++step) {
        run.trainer.begin_step();
        for (std::int64_t m = 0; m < 8; ++m) run.trainer.micro_batch(ragged_batch(8 * step + m, 1, 10));
        run.trainer.finish_step();
      }
      run.trainer.evaluate(ragged_batch(1, 1, 10));
      EXPECT_EQ(run.arenas.high_water(), run.plan.classes) << name_of(policy) << " " << gradients;
    }
  }
}

// A mode that came after the plan would take other workspaces than were planned.
TEST(Trainer, SetsTheBackendsModeBeforeAPlanMeasures) {
  struct Recording : ProfiledBackend {
    using ProfiledBackend::ProfiledBackend;
    void set_deterministic(bool deterministic) override { modes.push_back(deterministic); }
    void matmul(const Context& context, const Tensor& a, Transpose flip_a, const Tensor& b,
                Transpose flip_b, const Tensor& c, bool accumulate) override {
      EXPECT_FALSE(modes.empty());
      ProfiledBackend::matmul(context, a, flip_a, b, flip_b, c, accumulate);
    }
    std::vector<bool> modes;
  };
  for (const bool deterministic : {true, false}) {
    RunConfig config = tiny_config();
    config.run.deterministic = deterministic;
    Recording backend(cpu_backend());
    plan_run(config, backend, 0, false);
    ASSERT_FALSE(backend.modes.empty());
    EXPECT_EQ(backend.modes.back(), deterministic);
  }
}

TEST(Trainer, TheSameSeedGivesTheSameLosses) {
  RunConfig config = tiny_config();
  config.activations.policy = SavePolicy::kAgoq;
  config.gradients.format = parse_format("e4m3/128/fp32/stochastic");
  std::vector<double> losses[2];
  for (auto& of_run : losses) {
    TinyRun run(config);
    for (std::int64_t step = 0; step < 3; ++step) {
      run.trainer.begin_step();
      for (std::int64_t m = 0; m < 8; ++m) run.trainer.micro_batch(ragged_batch(8 * step + m, 1, 10));
      of_run.push_back(run.trainer.finish_step().loss);
    }
  }
  EXPECT_EQ(losses[0], losses[1]);
}

// A GPU gives out whole pieces, one for an empty arena too: what it then lacks is in the peak.
TEST(RunPlan, CountsTheWholePiecesThatADeviceGives) {
  constexpr std::size_t kGranule = std::size_t{2} << 20, kOverhead = 12345;
  struct Coarse : ProfiledBackend {
    using ProfiledBackend::ProfiledBackend;
    std::optional<DeviceMemory> device_memory() override {
      return DeviceMemory{.name = "a GPU", .overhead = kOverhead, .granule = kGranule};
    }
  };
  Coarse backend(cpu_backend());
  RunConfig config = tiny_config();
  config.run.sequence = 4000;
  const RunPlan plan = plan_run(config, backend, 0, false);
  std::size_t sum = 0, taken = 0;
  for (const std::size_t bytes : plan.classes) {
    sum += bytes;
    taken += std::max<std::size_t>((bytes + kGranule - 1) / kGranule, 1) * kGranule;
  }
  ASSERT_GT(*std::max_element(plan.classes.begin(), plan.classes.end()), kGranule);
  EXPECT_EQ(plan.arena_bytes(), sum);
  EXPECT_EQ(plan.rounding_bytes(), taken - sum);
  EXPECT_EQ(plan.predicted_peak(), taken + kOverhead);
  // Host memory is not rounded.
  EXPECT_EQ(plan_run(config, cpu_backend(), 0, false).rounding_bytes(), 0);

  const DeviceMemory fine{.name = "a GPU"};
  EXPECT_EQ(fine.taken_for(5), 5);
  const DeviceMemory coarse{.name = "a GPU", .granule = 8};
  EXPECT_EQ(coarse.taken_for(0), 8);
  EXPECT_EQ(coarse.taken_for(8), 8);
  EXPECT_EQ(coarse.taken_for(9), 16);
}

// It is taken before a run's peak begins.
TEST(RunPlan, ListsTheContextBesideThePeak) {
  struct WithContext : ProfiledBackend {
    using ProfiledBackend::ProfiledBackend;
    std::optional<DeviceMemory> device_memory() override {
      return DeviceMemory{.name = "a GPU", .context = 12345};
    }
  };
  WithContext backend(cpu_backend());
  const RunPlan plan = plan_run(tiny_config(), backend, 0, false);
  EXPECT_EQ(plan.predicted_peak(), plan.arena_bytes());
  const auto json = parse_json(to_json(plan, tiny_config()));
  EXPECT_EQ(json.at("device").at("context_bytes"), 12345);
  EXPECT_EQ(json.at("peak_bytes_predicted"), plan.arena_bytes());
}

// What does not fit a device is said before the run, with the fewest layers to recompute that fit.
TEST(RunPlan, NamesTheSettingThatMakesARunFit) {
  struct Small : ProfiledBackend {
    using ProfiledBackend::ProfiledBackend;
    std::optional<DeviceMemory> device_memory() override { return {{"a small GPU", 1 << 30, free, 0}}; }
    std::size_t free = 1 << 30;
  };
  Small backend(cpu_backend());
  RunConfig config = tiny_config();
  config.model.layers = 8;
  config.run.sequence = 200;
  const std::size_t whole = plan_run(config, backend, 0, false).predicted_peak();
  config.activations.recompute_layers = 8;
  const std::size_t least = plan_run(config, backend, 0, false).predicted_peak();
  config.activations.recompute_layers = 0;
  ASSERT_LT(least, whole);
  const auto refusal = [&](std::size_t free) -> std::string {
    backend.free = free;
    try {
      check_fits(plan_run(config, backend, 0, false), config, backend);
      return "fits";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      return error.what();
    }
  };
  EXPECT_EQ(refusal(whole), "fits");
  const std::size_t between = (least + whole) / 2;
  const std::string text = refusal(between);
  const RunPlan plan = plan_run(config, backend, 0, false);
  EXPECT_FALSE(plan.fits());
  const std::optional<std::int64_t> layers = fewest_recomputed_layers(plan, config, backend);
  ASSERT_TRUE(layers.has_value());
  EXPECT_NE(text.find(fmt::format("would take {} bytes of a small GPU, where {} of {} are free", whole,
                                  between, 1 << 30)),
            std::string::npos)
      << text;
  EXPECT_NE(text.find(fmt::format("set activations.recompute_layers = {} ", *layers)), std::string::npos)
      << text;
  config.activations.recompute_layers = *layers;
  EXPECT_EQ(refusal(between), "fits");
  config.activations.recompute_layers = *layers - 1;
  EXPECT_NE(refusal(between), "fits");
  config.activations.recompute_layers = 0;
  EXPECT_NE(refusal(least / 2).find("lower train.micro_batch"), std::string::npos);
}

// A plan for a GPU that is not at hand: of its memory a process has all but its context, and that
// decides what the plan says, and its groups of attention, whatever this machine has.
TEST(RunPlan, TakesTheMemoryThatItIsGiven) {
  struct Remote : ProfiledBackend {
    using ProfiledBackend::ProfiledBackend;
    std::optional<DeviceMemory> device_memory() override {
      return DeviceMemory{.name = "another GPU", .total = total, .free = total, .context = 1000};
    }
    std::size_t total = 0;
  };
  Remote backend(cpu_backend());
  RunConfig config = tiny_config();
  config.model.layers = 8;
  config.run.sequence = 200;
  const RunPlan unknown = plan_run(config, backend, 0, false);
  EXPECT_TRUE(unknown.fits());
  EXPECT_FALSE(unknown.room().has_value());
  EXPECT_FALSE(parse_json(to_json(unknown, config)).contains("fits"));

  for (const std::size_t total : {std::size_t{0}, std::size_t{1} << 40}) {
    backend.total = total;
    const std::size_t enough = unknown.predicted_peak() + 1000;
    const RunPlan fitting = plan_run(config, backend, 0, false, enough);
    EXPECT_TRUE(fitting.fits());
    auto json = parse_json(to_json(fitting, config));
    EXPECT_EQ(json.at("fits"), true);
    EXPECT_EQ(json.at("device").at("free_bytes"), enough - 1000);
    EXPECT_EQ(json.at("device").at("total_bytes"), enough);
    EXPECT_FALSE(json.contains("fewest_recomputed_layers"));
    EXPECT_NE(fit_text(fitting).find(" of a GPU of "), std::string::npos) << fit_text(fitting);

    const RunPlan lacking = plan_run(config, backend, 0, false, enough - 1);
    EXPECT_FALSE(lacking.fits());
    const std::optional<std::int64_t> layers = fewest_recomputed_layers(lacking, config, backend);
    ASSERT_TRUE(layers.has_value());
    RunConfig recomputing = config;
    recomputing.activations.recompute_layers = *layers;
    EXPECT_TRUE(plan_run(recomputing, backend, 0, false, enough - 1).fits());
    recomputing.activations.recompute_layers = *layers - 1;
    EXPECT_FALSE(plan_run(recomputing, backend, 0, false, enough - 1).fits());
    json = parse_json(to_json(lacking, config, layers));
    EXPECT_EQ(json.at("fits"), false);
    EXPECT_EQ(json.at("fewest_recomputed_layers"), *layers);

    const RunPlan hopeless = plan_run(config, backend, 0, false, 5);
    EXPECT_EQ(hopeless.room()->free, 0) << "less than a context";
    EXPECT_EQ(fewest_recomputed_layers(hopeless, config, backend), std::nullopt);
    EXPECT_TRUE(parse_json(to_json(hopeless, config)).at("fewest_recomputed_layers").is_null());
  }
}

// A host kills a process that takes too much, in some step: what will not fit is refused before. What
// the process has already is not taken again.
TEST(RunPlan, RefusesWhatTheHostHasNoRoomFor) {
  RunConfig config = tiny_config();
  config.model.layers = 8;
  config.run.sequence = 200;
  constexpr std::size_t kText = 5'000'000;
  RunPlan loaded = plan_run(config, cpu_backend(), kText, true);
  const RunPlan absent = plan_run(config, cpu_backend(), kText, false);
  // This program does not count its memory, so what it holds is a constant.
  EXPECT_EQ(loaded.bytes_to_take(), loaded.arena_bytes() + loaded.checkpoint);
  EXPECT_EQ(absent.bytes_to_take(), absent.arena_bytes() + absent.checkpoint + kText);
  EXPECT_EQ(loaded.predicted_peak(), absent.predicted_peak());

  const auto refusal = [&](RunPlan plan, std::size_t free) -> std::string {
    plan.host = MemoryRoom{"this machine's memory", 1 << 30, free};
    try {
      check_fits(plan, config, cpu_backend());
      return "fits";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      return error.what();
    }
  };
  const std::size_t need = loaded.bytes_to_take();
  EXPECT_EQ(refusal(loaded, need), "fits");
  EXPECT_NE(refusal(absent, need), "fits");
  EXPECT_EQ(refusal(absent, need + kText), "fits");
  std::string text = refusal(loaded, need - 1);
  EXPECT_NE(
      text.find(fmt::format("would take {} bytes of this machine's memory, where {} of {} are free: "
                            "set activations.recompute_layers = ",
                            need, need - 1, 1 << 30)),
      std::string::npos)
      << text;
  EXPECT_NE(text.find(", or run on a GPU (--set run.device=cuda)"), std::string::npos) << text;
  loaded.host = MemoryRoom{"this machine's memory", 1 << 30, need - 1};
  config.activations.recompute_layers = fewest_recomputed_layers(loaded, config, cpu_backend()).value();
  EXPECT_EQ(refusal(plan_run(config, cpu_backend(), kText, true), need - 1), "fits");
  --config.activations.recompute_layers;
  EXPECT_NE(refusal(plan_run(config, cpu_backend(), kText, true), need - 1), "fits");
  config.activations.recompute_layers = 0;
  text = refusal(loaded, 10);
  EXPECT_NE(text.find("lower train.micro_batch, train.sequence or model.layers, or run on a GPU"),
            std::string::npos)
      << text;
  // Where the kernel does not say.
  loaded.host.reset();
  EXPECT_NO_THROW(check_fits(loaded, config, cpu_backend()));

  // Another machine: nothing is there yet.
  const RunPlan given = plan_run(config, cpu_backend(), kText, false, absent.predicted_peak());
  EXPECT_EQ(given.bytes_to_take(), given.predicted_peak());
  EXPECT_TRUE(given.fits());
  EXPECT_FALSE(plan_run(config, cpu_backend(), kText, false, absent.predicted_peak() - 1).fits());
  const auto json = parse_json(to_json(given, config));
  EXPECT_EQ(json.at("host").at("free_bytes"), absent.predicted_peak());
  EXPECT_EQ(json.at("fits"), true);
}

/// Bytes that the backend of the next test takes for backward attention in one call.
constexpr std::size_t kHungryWorkspace = std::size_t{64} << 20;

// A backend whose backward attention takes memory by the heads is cut into groups before a run is
// refused.
TEST(RunPlan, CutsAttentionIntoTheFewestGroupsThatFit) {
  struct Hungry : ProfiledBackend {
    using ProfiledBackend::ProfiledBackend;
    std::optional<DeviceMemory> device_memory() override { return {{"a small GPU", total, free, 0}}; }
    void set_attention_groups(int count) override { groups = count; }
    void attention_backward(const Context& context, const AttentionShape& shape, const Tensor& dout,
                            const Tensor& qkv, const Tensor& out, const Tensor& log_sum_exp,
                            const Documents& documents, const Tensor& dqkv) override {
      const Arena::Scope scope(context.workspace);
      context.workspace.take(kHungryWorkspace / static_cast<std::size_t>(groups));
      ProfiledBackend::attention_backward(context, shape, dout, qkv, out, log_sum_exp, documents, dqkv);
    }
    std::size_t total = std::size_t{1} << 40, free = std::size_t{1} << 40;
    int groups = 0;
  };
  Hungry backend(cpu_backend());
  RunConfig config = tiny_config();
  config.model.heads = config.model.kv_heads = 6;
  const RunPlan whole = plan_run(config, backend, 0, false);
  EXPECT_EQ(whole.attention_groups, 1);
  for (const int groups : {2, 3, 6}) {
    const std::size_t saved = kHungryWorkspace - kHungryWorkspace / static_cast<std::size_t>(groups);
    backend.free = whole.predicted_peak() - saved + 4096;
    const RunPlan plan = plan_run(config, backend, 0, false);
    EXPECT_EQ(plan.attention_groups, groups);
    EXPECT_EQ(backend.groups, groups) << "as the run needs it";
    EXPECT_LE(plan.predicted_peak(), backend.free);
    EXPECT_NO_THROW(check_fits(plan, config, backend));
  }
  backend.free = whole.predicted_peak() - kHungryWorkspace;
  EXPECT_EQ(plan_run(config, backend, 0, false).attention_groups, 1) << "no number of them is enough";
  // A machine without the device: whatever the run may need, but for a memory that is given.
  backend.total = 0;
  EXPECT_EQ(plan_run(config, backend, 0, false).attention_groups, 1);
  const std::size_t saved = kHungryWorkspace - kHungryWorkspace / 3;
  const std::size_t given = whole.predicted_peak() - saved + 4096;
  EXPECT_EQ(plan_run(config, backend, 0, false, given).attention_groups, 3);
}

// In 8-bit mode a gradient in higher precision exists for one parameter at a time.
TEST(Trainer, HoldsNoGradientInHigherPrecisionBeyondOneParameter) {
  RunConfig config = tiny_config();
  config.model.layers = 6;
  const std::size_t exact = plan_run(config, cpu_backend(), 0, false)
                                .classes[static_cast<std::size_t>(MemoryClass::kWorkspace)];
  config.gradients.format = parse_format("e4m3/128/fp32");
  const std::size_t packed = plan_run(config, cpu_backend(), 0, false)
                                 .classes[static_cast<std::size_t>(MemoryClass::kWorkspace)];
  std::int64_t largest = 0;
  for (const Parameter& parameter : parameters_of(config.model))
    largest = std::max(largest, parameter.count());
  EXPECT_LE(packed, exact + static_cast<std::size_t>(largest) * sizeof(float) + 4096);
  EXPECT_LT(packed, static_cast<std::size_t>(parameter_count(config.model)) * sizeof(float));
}

}  // namespace
}  // namespace agoq

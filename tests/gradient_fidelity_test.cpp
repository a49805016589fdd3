// What quantised activations do to the gradient of a trained model: the quickstart's model, trained
// with everything kept, and one fixed batch. The gradient under each format is held against the one
// under `keep`.
//
// The bounds are 1.5 times what an independent prototype measured (85M parameters, 12 layers of 768,
// byte-level text, 26M tokens): L2 of the gradient's difference over its norm, per kind of tensor.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>

#include "train/fidelity.h"
#include "train/run_plan.h"
#include "train/trainer.h"

namespace agoq {
namespace {

// The prototype's relative L2 of each of default_fidelity_settings().
struct Bounds {
  double qkv, o, gate_up, down, norm;
};

// How far above the prototype's figure each kind may be.
constexpr double kFactor = 1.5;

const std::map<std::string, Bounds>& bounds() {
  static const std::map<std::string, Bounds> bounds = {
      {"INT8/32", {.008, .008, .010, .011, .009}},
      {"NF4/32 two-level", {.079, .053, .118, .117, .105}},
      {"NF4/128", {.089, .060, .132, .132, .12}},
      {"E2M1/128", {.100, .068, .149, .151, .13}},
      {"INT4/128", {.114, .081, .174, .175, .155}},
      {"FP4/128", {.123, .085, .187, .188, .17}},
      {"uniform FP4/128", {.250, .224, .249, .256, .25}},
  };
  return bounds;
}

/// A trainer and the memory it lives in.
struct OwnedRun {
  explicit OwnedRun(RunConfig run_config)
      : config(std::move(run_config)),
        arenas(cpu_backend().allocator(), plan_run(config, cpu_backend(), 0, false).classes),
        trainer(config, cpu_backend(), arenas) {}
  RunConfig config;
  RunArenas arenas;
  Trainer trainer;
};

class GradientFidelity : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string text = AGOQ_TEXT;
    if (!std::filesystem::exists(text)) return;
    RunConfig config = load_run_config(AGOQ_QUICKSTART);
    config.data.paths = {text};
    config.activations.policy = SavePolicy::kKeep;
    config.gradients.format = exact_format(ElementType::kFp32);
    const Dataset data = Dataset::load(config.data);
    OwnedRun owned(config);
    Trainer& trainer = owned.trainer;
    trainer.initialise();
    HostBatch batch;
    std::int64_t next = 0;
    for (std::int64_t step = 0; step < config.run.steps; ++step) {
      trainer.begin_step();
      for (std::int64_t m = 0; m < config.run.micro_batches; ++m, next += config.run.micro_batch) {
        data.fill(Split::kTraining, config.data.seed, next, config.run.micro_batch, config.run.sequence,
                  batch);
        trainer.micro_batch(batch);
      }
      trainer.finish_step();
    }
    weights_ = read_weights(trainer.context(), trainer.model());
    config_ = config;
    batch_ = spread_batch(data, kSequences, config.run.sequence);
    reference_ = gradient(SavePolicy::kKeep, config.activations.format);
  }

  void SetUp() override {
    if (weights_.empty()) GTEST_SKIP() << "no text at " << AGOQ_TEXT << ": ./dev test fetches it";
  }

  static HostGradients gradient(SavePolicy policy, const QuantFormat& format,
                                const Trainer::Between& between = {}) {
    return gradient_under(config_, cpu_backend(), weights_, batch_, policy, format, between);
  }

  static GradientDistance compare(const HostGradients& gradients) {
    return distance(parameters_of(config_.model), reference_, gradients);
  }

  /// Every saved byte with bits 1 and 5 flipped before the backward pass.
  static void break_codes(ActivationStore& store, std::size_t frame) {
    for (std::size_t l = 0; l < store.layers().size(); ++l) {
      LayerFrame layer = store.layer(frame, l);
      for (int s = 0; s < static_cast<int>(store.layers()[l].size()); ++s) {
        if (!layer.kept(s)) continue;
        const QuantTensor packed = layer.saved(s);
        if (packed.format.is_exact()) continue;
        const std::int64_t bytes = packed.rows() * row_bytes(packed.format, packed.grid).codes;
        for (std::int64_t i = 0; i < bytes; ++i) packed.codes[i] ^= std::byte{0x22};
      }
    }
  }

  // 32 of 256 tokens: half as many tokens as in the prototype's batch of 16 x 1,024.
  static constexpr std::int64_t kSequences = 32;
  static RunConfig config_;
  static HostWeights weights_;
  static HostBatch batch_;
  static HostGradients reference_;
};

RunConfig GradientFidelity::config_;
HostWeights GradientFidelity::weights_;
HostBatch GradientFidelity::batch_;
HostGradients GradientFidelity::reference_;

TEST_F(GradientFidelity, StaysWithinTheBoundsOfEachFormatAndInTheirOrder) {
  fmt::print("{:18} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}\n", "activations", "cosine", "L2", "qkv",
             "o", "gate/up", "down", "norms");
  double previous = 0;
  // From the closest to the furthest: the order is part of the test.
  for (const FidelitySetting& setting : default_fidelity_settings()) {
    const Bounds& bound = bounds().at(setting.name);
    const HostGradients gradients = gradient(setting.policy, setting.format);
    const GradientDistance found = compare(gradients);
    const auto of = [&](ParameterKind kind) { return found.kinds.at(kind); };
    fmt::print("{:18} {:8.5f} {:8.4f} {:8.4f} {:8.4f} {:8.4f} {:8.4f} {:8.4f}\n", setting.name,
               found.cosine, found.whole, of(ParameterKind::kQkv), of(ParameterKind::kAttentionOutput),
               of(ParameterKind::kGateUp), of(ParameterKind::kDown), of(ParameterKind::kNorm));
    if (setting.policy == SavePolicy::kAgoq) {
      EXPECT_GE(found.cosine, 0.99) << setting.name;
    }
    EXPECT_LE(of(ParameterKind::kQkv), kFactor * bound.qkv) << setting.name;
    EXPECT_LE(of(ParameterKind::kAttentionOutput), kFactor * bound.o) << setting.name;
    EXPECT_LE(of(ParameterKind::kGateUp), kFactor * bound.gate_up) << setting.name;
    EXPECT_LE(of(ParameterKind::kDown), kFactor * bound.down) << setting.name;
    EXPECT_LE(of(ParameterKind::kNorm), kFactor * bound.norm) << setting.name;
    EXPECT_GT(found.whole, previous) << setting.name << " is closer than the format before it";
    previous = found.whole;
    fmt::print("  qkv by layer: {:.4f}\n",
               fmt::join(distance_by_layer(parameters_of(config_.model), ParameterKind::kQkv, reference_,
                                           gradients),
                         " "));
  }
}

// The control: bounds that a broken codec passes would bound nothing.
TEST_F(GradientFidelity, ABrokenCodecIsNoticed) {
  const GradientDistance found =
      compare(gradient(SavePolicy::kAgoq, parse_format("nf4/32/two-level"), break_codes));
  fmt::print("{:18} {:8.5f} {:8.4f}\n", "broken NF4", found.cosine, found.whole);
  EXPECT_GT(found.kinds.at(ParameterKind::kGateUp), 1.5 * 0.118);
  EXPECT_GT(found.kinds.at(ParameterKind::kDown), 1.5 * 0.117);
}

}  // namespace
}  // namespace agoq

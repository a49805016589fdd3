// What quantised activations do to the gradient of a trained model: the quickstart's model, trained
// with everything kept, and one fixed batch. The gradient under each format is held against the one
// under `keep`.
//
// The bounds are 1.5 times what an independent prototype measured (85M parameters, 12 layers of 768,
// byte-level text, 26M tokens): L2 of the gradient's difference over its norm, per kind of tensor.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "train/run_plan.h"
#include "train/trainer.h"

namespace agoq {
namespace {

/// Distances of a gradient from the reference one.
struct Fidelity {
  double cosine = 0;  // of the whole gradient
  double whole = 0;   // relative L2 of the whole gradient
  std::map<ParameterKind, double> kinds;
};

struct Setting {
  const char* name;
  SavePolicy policy;
  const char* format;
  // The prototype's relative L2: qkv, o, gate/up, down, norm weights.
  double qkv, o, gate_up, down, norm;
};

// How far above the prototype's figure each kind may be.
constexpr double kFactor = 1.5;

// E2M1 and INT4 change places from model to model and batch to batch (docs/method.md): of these two only
// that they are close is asserted.
constexpr double kCloseFormats = 0.10;

// From the closest to the furthest: the order is part of the test.
const std::vector<Setting>& settings() {
  static const std::vector<Setting> settings = {
      {"INT8/32", SavePolicy::kAgoq, "int8/32/fp32", .008, .008, .010, .011, .009},
      {"NF4/32 two-level", SavePolicy::kAgoq, "nf4/32/two-level", .079, .053, .118, .117, .105},
      {"NF4/128", SavePolicy::kAgoq, "nf4/128/fp32", .089, .060, .132, .132, .12},
      {"E2M1/128", SavePolicy::kAgoq, "e2m1/128/fp32", .100, .068, .149, .151, .13},
      {"INT4/128", SavePolicy::kAgoq, "int4/128/fp32", .114, .081, .174, .175, .155},
      {"FP4/128", SavePolicy::kAgoq, "bnbfp4/128/fp32", .123, .085, .187, .188, .17},
      {"uniform FP4/128", SavePolicy::kUniform, "bnbfp4/128/fp32", .250, .224, .249, .256, .25},
  };
  return settings;
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
    trained_ = std::make_unique<OwnedRun>(config);
    Trainer& trainer = trained_->trainer;
    trainer.initialise();
    HostBatch batch;
    std::int64_t next = 0;
    for (std::int64_t step = 0; step < config.run.steps; ++step) {
      trainer.begin_step();
      for (std::int64_t m = 0; m < config.run.micro_batches; ++m, next += config.run.micro_batch) {
        data.fill(Split::kTraining, config.run.seed, next, config.run.micro_batch, config.run.sequence,
                  batch);
        trainer.micro_batch(batch);
      }
      trainer.finish_step();
    }
    batch_ = spread_batch(data, config.run.sequence);
    reference_ = gradient(SavePolicy::kKeep, "bf16", Codec::kRight);
  }
  static void TearDownTestSuite() { trained_.reset(); }

  void SetUp() override {
    if (!trained_) GTEST_SKIP() << "no text at " << AGOQ_TEXT << ": ./dev test fetches it";
  }

  /// kSequences sequences, evenly spread over the validation documents: neighbours come from one
  /// document, and some of these are in languages that the model has hardly seen.
  static HostBatch spread_batch(const Dataset& data, std::int64_t sequence) {
    const std::int64_t stride = data.sequences(Split::kValidation, sequence) / kSequences;
    HostBatch all;
    HostBatch one;
    for (std::int64_t s = 0; s < kSequences; ++s) {
      data.fill(Split::kValidation, 0, s * stride, 1, sequence, one);
      const auto append = [](auto& to, const auto& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      append(all.tokens, one.tokens);
      append(all.targets, one.targets);
      append(all.weights, one.weights);
      append(all.positions, one.positions);
      for (std::int64_t d = 0; d < one.document_count; ++d) {
        all.document_starts.push_back(static_cast<std::int32_t>(s * sequence) +
                                      one.document_starts[static_cast<std::size_t>(d)]);
      }
      all.document_count += one.document_count;
      all.longest_document = std::max(all.longest_document, one.longest_document);
      all.valid_tokens += one.valid_tokens;
    }
    all.document_starts.push_back(static_cast<std::int32_t>(kSequences * sequence));
    return all;
  }

  enum class Codec { kRight, kBroken };

  /// The gradient of the fixed batch under a policy and format, parameter after parameter. kBroken:
  /// every saved byte has bits 1 and 5 flipped before the backward pass.
  static std::vector<std::vector<float>> gradient(SavePolicy policy, const std::string& format,
                                                  Codec codec) {
    RunConfig config = trained_->config;
    config.activations.policy = policy;
    config.activations.format = parse_format(format);
    config.run.micro_batch = kSequences;
    config.run.micro_batches = 1;
    OwnedRun run(config);
    const Context context = run.trainer.context();
    const Transformer& model = run.trainer.model();
    for (std::size_t p = 0; p < model.weights().size(); ++p) {
      cpu_backend().copy(context, trained_->trainer.model().weights()[p], model.weights()[p]);
    }
    if (codec == Codec::kRight) {
      run.trainer.gradients_of(batch_);
    } else {
      run.trainer.gradients_of(batch_, [&](ActivationStore& store, std::size_t frame) {
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
      });
    }
    std::vector<std::vector<float>> gradients;
    for (std::size_t p = 0; p < model.parameters().size(); ++p) {
      const Tensor exact = run.trainer.gradients().gradient(p).exact();
      gradients.emplace_back(exact.as<float>(), exact.as<float>() + exact.count());
    }
    return gradients;
  }

  /// The relative L2 of each layer's qkv, for the log.
  static std::string qkv_by_layer(const std::vector<std::vector<float>>& gradients) {
    std::string text;
    for (const BlockParameters& block : trained_->trainer.model().index().blocks) {
      double difference = 0;
      double norm = 0;
      for (std::size_t i = 0; i < gradients[block.qkv].size(); ++i) {
        const double expected = reference_[block.qkv][i];
        difference += (gradients[block.qkv][i] - expected) * (gradients[block.qkv][i] - expected);
        norm += expected * expected;
      }
      text += fmt::format(" {:.4f} (norm {:.3g})", std::sqrt(difference / norm), std::sqrt(norm));
    }
    return text;
  }

  static Fidelity compare(const std::vector<std::vector<float>>& gradients) {
    struct Sums {
      double difference = 0;
      double reference = 0;
    };
    std::map<ParameterKind, Sums> kinds;
    double dot = 0;
    double norm = 0;
    Sums whole;
    const auto& parameters = trained_->trainer.model().parameters();
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      Sums& kind = kinds[parameters[p].kind];
      for (std::size_t i = 0; i < gradients[p].size(); ++i) {
        const double value = gradients[p][i];
        const double expected = reference_[p][i];
        const double squared = (value - expected) * (value - expected);
        kind.difference += squared;
        kind.reference += expected * expected;
        whole.difference += squared;
        whole.reference += expected * expected;
        dot += value * expected;
        norm += value * value;
      }
    }
    Fidelity fidelity;
    fidelity.cosine = dot / std::sqrt(norm * whole.reference);
    fidelity.whole = std::sqrt(whole.difference / whole.reference);
    for (const auto& [kind, sums] : kinds)
      fidelity.kinds[kind] = std::sqrt(sums.difference / sums.reference);
    return fidelity;
  }

  // 64 of 256 tokens: as many tokens as in the prototype's batch of 16 x 1,024.
  static constexpr std::int64_t kSequences = 64;
  static std::unique_ptr<OwnedRun> trained_;
  static HostBatch batch_;
  static std::vector<std::vector<float>> reference_;
};

std::unique_ptr<OwnedRun> GradientFidelity::trained_;
HostBatch GradientFidelity::batch_;
std::vector<std::vector<float>> GradientFidelity::reference_;

TEST_F(GradientFidelity, StaysWithinTheBoundsOfEachFormatAndInTheirOrder) {
  fmt::print("{:18} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}\n", "activations", "cosine", "L2", "qkv",
             "o", "gate/up", "down", "norms");
  double previous = 0;
  for (const Setting& setting : settings()) {
    const auto gradients = gradient(setting.policy, setting.format, Codec::kRight);
    const Fidelity found = compare(gradients);
    const auto of = [&](ParameterKind kind) { return found.kinds.at(kind); };
    fmt::print("{:18} {:8.5f} {:8.4f} {:8.4f} {:8.4f} {:8.4f} {:8.4f} {:8.4f}\n", setting.name,
               found.cosine, found.whole, of(ParameterKind::kQkv), of(ParameterKind::kAttentionOutput),
               of(ParameterKind::kGateUp), of(ParameterKind::kDown), of(ParameterKind::kNorm));
    if (setting.policy == SavePolicy::kAgoq) {
      EXPECT_GE(found.cosine, 0.99) << setting.name;
    }
    EXPECT_LE(of(ParameterKind::kQkv), kFactor * setting.qkv) << setting.name;
    EXPECT_LE(of(ParameterKind::kAttentionOutput), kFactor * setting.o) << setting.name;
    EXPECT_LE(of(ParameterKind::kGateUp), kFactor * setting.gate_up) << setting.name;
    EXPECT_LE(of(ParameterKind::kDown), kFactor * setting.down) << setting.name;
    EXPECT_LE(of(ParameterKind::kNorm), kFactor * setting.norm) << setting.name;
    if (std::string(setting.name) == "INT4/128") {
      EXPECT_NEAR(found.whole / previous, 1.0, kCloseFormats) << setting.name;
    } else {
      EXPECT_GT(found.whole, previous) << setting.name << " is closer than the format before it";
    }
    previous = std::max(previous, found.whole);
    fmt::print("  qkv by layer:{}\n", qkv_by_layer(gradients));
  }
}

// The control: bounds that a broken codec passes would bound nothing.
TEST_F(GradientFidelity, ABrokenCodecIsNoticed) {
  const Fidelity found = compare(gradient(SavePolicy::kAgoq, "nf4/32/two-level", Codec::kBroken));
  fmt::print("{:18} {:8.5f} {:8.4f}\n", "broken NF4", found.cosine, found.whole);
  EXPECT_GT(found.kinds.at(ParameterKind::kGateUp), 1.5 * 0.118);
  EXPECT_GT(found.kinds.at(ParameterKind::kDown), 1.5 * 0.117);
}

}  // namespace
}  // namespace agoq

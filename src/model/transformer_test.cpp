#include "model/transformer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "model/rope_table.h"

namespace agoq {
namespace {

/// Grouped queries, odd sizes where they may be, two sequences of two documents each.
ModelConfig tiny_config(ElementType dtype) {
  ModelConfig config;
  config.hidden = 24;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_size = 6;
  config.feed_forward = 20;
  config.vocabulary = 17;
  config.dtype = dtype;
  config.segments = 2;
  config.loss_chunk = 5;  // does not divide the tokens
  config.initial_deviation = 0.3;
  return config;
}

/// A model with random weights, a batch, and what is needed to run it.
struct Fixture {
  static constexpr std::int64_t kSequence = 7;
  static constexpr std::int64_t kTokens = 2 * kSequence;

  Fixture(const ModelConfig& model_config, const ActivationConfig& activations,
          const QuantFormat& gradient_format, std::int64_t positions = kSequence)
      : context{cpu_backend(), {}, workspace, {.seed = 3}},
        model(context, model_config, memory, memory, positions),
        gradients(memory, model.parameters(), {gradient_format}, model_config.dtype),
        store(memory, transformer_saves(model_config),
              make_bit_plan(transformer_saves(model_config), activations), kTokens, 1),
        forward_only(memory, transformer_saves(model_config),
                     make_forward_only_plan(transformer_saves(model_config)), kTokens, 1) {
    for (std::size_t p = 0; p < model.parameters().size(); ++p) {
      const Parameter& parameter = model.parameters()[p];
      std::vector<float> values(static_cast<std::size_t>(parameter.count()));
      const Tensor source{reinterpret_cast<std::byte*>(values.data()), ElementType::kFp32,
                          Shape{parameter.rows, parameter.columns}};
      initial_values(context, model_config, parameter, p, source);
      // Norm weights away from one, so that their part in each formula shows.
      if (parameter.kind == ParameterKind::kNorm) {
        for (std::size_t i = 0; i < values.size(); ++i)
          values[i] = 1.0f + 0.3f * std::sin(static_cast<float>(i));
      }
      context.backend.copy(context, source, model.weights()[p]);
    }
    const std::int32_t starts[] = {0, 3, kSequence, kSequence + 5, kTokens};
    batch.tokens = memory.take(ElementType::kInt32, Shape{kTokens});
    batch.targets = memory.take(ElementType::kInt32, Shape{kTokens});
    batch.weights = memory.take(ElementType::kFp32, Shape{kTokens});
    batch.positions = memory.take(ElementType::kInt32, Shape{kTokens});
    batch.documents.starts = memory.take(ElementType::kInt32, Shape{5});
    batch.documents.count = 4;
    batch.documents.longest = kSequence;
    std::int32_t document = 0;
    for (std::int32_t n = 0; n < kTokens; ++n) {
      if (n == starts[document + 1]) ++document;
      batch.tokens.as<std::int32_t>()[n] =
          (n * 5 + 2) % static_cast<std::int32_t>(model_config.vocabulary);
      batch.targets.as<std::int32_t>()[n] =
          (n * 11 + 1) % static_cast<std::int32_t>(model_config.vocabulary);
      batch.weights.as<float>()[n] = n == 4 ? 0.0f : n == 6 ? 0.5f : 1.0f;
      batch.positions.as<std::int32_t>()[n] = n - starts[document];
    }
    for (int d = 0; d < 5; ++d) batch.documents.starts.as<std::int32_t>()[d] = starts[d];
    token_loss = memory.take(statistics_type(model_config.dtype), Shape{kTokens});
    total = memory.take(ElementType::kFp64, Shape{1});
  }

  double loss() {
    model.evaluate(context, batch, forward_only, token_loss);
    context.backend.sum(context, token_loss, total);
    return *total.as<double>();
  }

  /// Forward and backward; returns the loss.
  double run() {
    gradients.zero(context);
    const Arena::Scope scope(workspace);
    const Tensor doutput = workspace.take(model.config().dtype, Shape{kTokens, model.config().hidden});
    const std::size_t frame = store.open();
    model.forward(context, batch, store, frame, gradients, token_loss, doutput);
    context.backend.sum(context, token_loss, total);
    model.backward(context, batch, store, frame, gradients, doutput);
    unused = store.close(frame);
    return *total.as<double>();
  }

  /// The gradient of a parameter, in double.
  std::vector<double> gradient(std::size_t parameter) {
    const Arena::Scope scope(workspace);
    const QuantTensor& packed = gradients.gradient(parameter);
    const bool wide = packed.format.code == Code::kFp64;
    const Tensor values = workspace.take(wide ? ElementType::kFp64 : ElementType::kFp32,
                                         Shape{packed.rows(), packed.width()});
    context.backend.dequantize(context, packed, values);
    std::vector<double> result;
    for (std::int64_t i = 0; i < values.count(); ++i) {
      result.push_back(wide ? values.as<double>()[i] : static_cast<double>(values.as<float>()[i]));
    }
    return result;
  }

  Arena memory{"memory", host_allocator(), std::size_t{8} << 20};
  Arena workspace{"workspace", host_allocator(), std::size_t{8} << 20};
  Context context;
  Transformer model;
  MainGradients gradients;
  ActivationStore store;
  ActivationStore forward_only;
  Batch batch;
  Tensor token_loss;
  Tensor total;
  std::vector<std::string> unused;
};

ActivationConfig with_policy(SavePolicy policy) {
  ActivationConfig config;
  config.policy = policy;
  return config;
}

double relative_distance(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

/// Central differences of the summed loss in double precision, for every element of every parameter.
void expect_finite_differences(const ModelConfig& config) {
  Fixture fixture(config, with_policy(SavePolicy::kKeep), exact_format(ElementType::kFp64));
  const double loss = fixture.run();
  EXPECT_NEAR(loss, fixture.loss(), 1e-12 * std::abs(loss)) << "training and evaluation agree";
  EXPECT_TRUE(fixture.unused.empty());
  for (std::size_t p = 0; p < fixture.model.parameters().size(); ++p) {
    const std::vector<double> gradient = fixture.gradient(p);
    double* weights = fixture.model.weights()[p].as<double>();
    std::vector<double> differences;
    constexpr double kStep = 1e-5;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const double kept = weights[i];
      weights[i] = kept + kStep;
      const double above = fixture.loss();
      weights[i] = kept - kStep;
      const double below = fixture.loss();
      weights[i] = kept;
      differences.push_back((above - below) / (2 * kStep));
    }
    EXPECT_LT(relative_distance(gradient, differences), 1e-6) << fixture.model.parameters()[p].name;
  }
}

TEST(Transformer, GradientsEqualFiniteDifferences) {
  expect_finite_differences(tiny_config(ElementType::kFp64));
}

TEST(Transformer, GradientsEqualFiniteDifferencesWithTiedEmbeddings) {
  ModelConfig config = tiny_config(ElementType::kFp64);
  config.tied_embeddings = true;
  expect_finite_differences(config);
}

TEST(Transformer, GradientsEqualFiniteDifferencesWithLayerNorm) {
  ModelConfig config = tiny_config(ElementType::kFp64);
  config.norm = NormKind::kLayerNorm;
  expect_finite_differences(config);
}

// What is not kept is recomputed by the same operations from the same values: not a bit differs.
TEST(Transformer, PoliciesThatQuantiseNothingGiveTheSameGradients) {
  for (const ElementType dtype : {ElementType::kFp64, ElementType::kFp32, ElementType::kBf16}) {
    const QuantFormat format = exact_format(statistics_type(dtype));
    Fixture keep(tiny_config(dtype), with_policy(SavePolicy::kKeep), format);
    const double loss = keep.run();
    ActivationConfig keep_rstd = with_policy(SavePolicy::kExact);
    keep_rstd.keep_rstd = true;
    ActivationConfig half = with_policy(SavePolicy::kKeep);
    half.recompute_layers = 1;
    for (const ActivationConfig& config :
         {with_policy(SavePolicy::kExact), with_policy(SavePolicy::kRecompute), keep_rstd, half}) {
      Fixture other(tiny_config(dtype), config, format);
      EXPECT_EQ(other.run(), loss);
      EXPECT_TRUE(other.unused.empty()) << other.unused.front();
      for (std::size_t p = 0; p < keep.model.parameters().size(); ++p) {
        EXPECT_EQ(other.gradient(p), keep.gradient(p))
            << keep.model.parameters()[p].name << " " << name_of(dtype) << " " << name_of(config.policy);
      }
    }
  }
}

// The forward pass is exact: quantisation changes gradients, never the loss of the same step. (How much
// it changes them is held against measured bounds on a trained model: tests/gradient_fidelity_test.)
TEST(Transformer, QuantisingActivationsLeavesTheLossAndMovesTheGradients) {
  const QuantFormat fp32 = exact_format(ElementType::kFp32);
  Fixture keep(tiny_config(ElementType::kFp32), with_policy(SavePolicy::kKeep), fp32);
  const double loss = keep.run();
  const auto distance = [&](SavePolicy policy, const char* format) {
    ActivationConfig config = with_policy(policy);
    config.format = parse_format(format);
    Fixture quantised(tiny_config(ElementType::kFp32), config, fp32);
    EXPECT_EQ(quantised.run(), loss);
    EXPECT_TRUE(quantised.unused.empty());
    return relative_distance(quantised.gradient(2), keep.gradient(2));
  };
  const double int8 = distance(SavePolicy::kAgoq, "int8/32/fp32");
  const double nf4 = distance(SavePolicy::kAgoq, "nf4/32/two-level");
  const double uniform_int8 = distance(SavePolicy::kUniform, "int8/32/fp32");
  const double uniform = distance(SavePolicy::kUniform, "nf4/32/two-level");
  EXPECT_GT(int8, 1e-4);
  EXPECT_LT(int8, 0.03);
  EXPECT_LT(uniform_int8, 0.05);
  EXPECT_GT(nf4, 4 * int8);
  EXPECT_LT(nf4, 0.4);
  EXPECT_GT(uniform, nf4) << "attention quantised too";
  fmt::print("int8 {:.4f}, nf4 {:.4f}, uniform int8 {:.4f}, uniform nf4 {:.4f}\n", int8, nf4,
             uniform_int8, uniform);
}

TEST(Transformer, ALossChunkOfAnySizeGivesTheSameLossAndGradient) {
  ModelConfig config = tiny_config(ElementType::kFp64);
  const QuantFormat fp64 = exact_format(ElementType::kFp64);
  Fixture chunked(config, with_policy(SavePolicy::kKeep), fp64);
  config.loss_chunk = 1000;
  Fixture whole(config, with_policy(SavePolicy::kKeep), fp64);
  EXPECT_NEAR(chunked.run(), whole.run(), 1e-12);
  const std::size_t head = whole.model.index().head;
  EXPECT_LT(relative_distance(chunked.gradient(head), whole.gradient(head)), 1e-12);
}

// Each document by itself gives the losses it has among others.
TEST(Transformer, DocumentsDoNotSeeEachOther) {
  Fixture together(tiny_config(ElementType::kFp64), with_policy(SavePolicy::kKeep),
                   exact_format(ElementType::kFp64));
  together.loss();
  std::vector<double> losses(together.token_loss.as<double>(),
                             together.token_loss.as<double>() + Fixture::kTokens);
  // Change the first document: the others' losses stay.
  together.batch.tokens.as<std::int32_t>()[0] = 9;
  together.loss();
  EXPECT_NE(together.token_loss.as<double>()[2], losses[2]);
  for (std::size_t n = 3; n < losses.size(); ++n)
    EXPECT_EQ(together.token_loss.as<double>()[n], losses[n]) << n;
}

// method.md's bytes for LLaMA3-8B, per token and layer.
TEST(Transformer, KeepsTheBytesPerTokenThatTheMethodPromises) {
  ModelConfig config;
  config.hidden = 4096;
  config.heads = 32;
  config.kv_heads = 8;
  config.head_size = 128;
  config.feed_forward = 14336;
  config.segments = 1;
  // Not the first block: its input is recomputed from the token ids.
  const LayerSlots slots = transformer_saves(config)[1];
  const auto bytes = [&](const ActivationConfig& activations) {
    const auto layers = transformer_saves(config);
    return saved_bytes(slots, make_bit_plan(layers, activations).layers[1], 1);
  };
  // 139,264 bytes of tensors; 128 of log-sum-exp and 8 of rstd.
  EXPECT_EQ(bytes(with_policy(SavePolicy::kKeep)), 139264 + 128 + 8);
  // 38,912 at exactly 4 bits, 1,224 of scales, 128 of log-sum-exp.
  EXPECT_EQ(bytes(with_policy(SavePolicy::kAgoq)), 40264);
  ActivationConfig keep_rstd = with_policy(SavePolicy::kAgoq);
  keep_rstd.keep_rstd = true;
  EXPECT_EQ(bytes(keep_rstd), 40264 + 8);
  // Cut into 16 segments for tensor parallelism, gate and up have a BF16 scale per 896 elements
  // instead of per 1,024: 8 bytes more.
  config.segments = 16;
  EXPECT_EQ(
      saved_bytes(transformer_saves(config)[1],
                  make_bit_plan(transformer_saves(config), with_policy(SavePolicy::kAgoq)).layers[1], 1),
      40264 + 8);
}

TEST(Transformer, CountsTheParametersOfLlama3) {
  ModelConfig config;
  config.hidden = 4096;
  config.layers = 32;
  config.heads = 32;
  config.kv_heads = 8;
  config.head_size = 128;
  config.feed_forward = 14336;
  config.vocabulary = 128256;
  EXPECT_EQ(parameter_count(config), 8030261248);
}

}  // namespace
}  // namespace agoq

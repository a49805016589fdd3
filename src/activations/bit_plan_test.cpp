#include "activations/bit_plan.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace agoq {
namespace {

/// Two layers with a slot of each role, and a final norm.
std::vector<LayerSlots> example_layers() {
  const LayerSlots block = {
      {"input", SlotRole::kNormInput, 256, 1, ElementType::kBf16, ""},
      {"rstd", SlotRole::kRstd, 1, 1, ElementType::kFp32, "input"},
      {"output", SlotRole::kNormOutput, 256, 1, ElementType::kBf16, "norm of input"},
      {"qkv", SlotRole::kQkv, 512, 1, ElementType::kBf16, ""},
      {"lse", SlotRole::kLogSumExp, 4, 1, ElementType::kFp32, ""},
      {"o", SlotRole::kAttentionOutput, 256, 1, ElementType::kBf16, ""},
      {"gate_up", SlotRole::kGateUp, 1408, 8, ElementType::kBf16, ""},
      {"hidden", SlotRole::kMlpHidden, 704, 4, ElementType::kBf16, "gate_up"},
  };
  return {block, block, {{"final", SlotRole::kNormInput, 256, 1, ElementType::kBf16, ""}}};
}

ActivationConfig with_policy(SavePolicy policy) {
  ActivationConfig config;
  config.policy = policy;
  return config;
}

/// "k" for kept, "r" for recomputed, per slot.
std::string actions(const LayerPlan& plan) {
  std::string text;
  for (const SlotPlan& slot : plan.slots) text += slot.action == SlotAction::kKeep ? 'k' : 'r';
  return text;
}

TEST(BitPlan, KeepKeepsEverySlotExactly) {
  const auto layers = example_layers();
  const BitPlan plan = make_bit_plan(layers, with_policy(SavePolicy::kKeep));
  EXPECT_EQ(actions(plan.layers[0]), "kkkkkkkk");
  for (std::size_t s = 0; s < layers[0].size(); ++s) {
    EXPECT_EQ(plan.layers[0].slots[s].format, exact_format(layers[0][s].type)) << layers[0][s].name;
  }
}

TEST(BitPlan, AgoqQuantisesNormInputsAndGateUpAndNothingOfAttention) {
  const BitPlan plan = make_bit_plan(example_layers(), with_policy(SavePolicy::kAgoq));
  EXPECT_EQ(actions(plan.layers[1]), "krrkkkkr");
  const QuantFormat nf4 = parse_format("nf4/32/two-level");
  EXPECT_EQ(plan.layers[1].slots[0].format, nf4);
  EXPECT_EQ(plan.layers[1].slots[3].format, parse_format("bf16"));
  EXPECT_EQ(plan.layers[1].slots[4].format, parse_format("fp32"));
  EXPECT_EQ(plan.layers[1].slots[5].format, parse_format("bf16"));
  EXPECT_EQ(plan.layers[1].slots[6].format, nf4);
  EXPECT_EQ(plan.layers[2].slots[0].format, nf4);
}

TEST(BitPlan, ExactKeepsTheSlotsOfAgoqUnquantised) {
  const BitPlan exact = make_bit_plan(example_layers(), with_policy(SavePolicy::kExact));
  const BitPlan agoq = make_bit_plan(example_layers(), with_policy(SavePolicy::kAgoq));
  EXPECT_EQ(actions(exact.layers[0]), actions(agoq.layers[0]));
  for (const SlotPlan& slot : exact.layers[0].slots) {
    if (slot.action == SlotAction::kKeep) {
      EXPECT_TRUE(slot.format.is_exact());
    }
  }
}

TEST(BitPlan, RecomputeKeepsLayerInputsExactly) {
  const BitPlan plan = make_bit_plan(example_layers(), with_policy(SavePolicy::kRecompute));
  EXPECT_EQ(actions(plan.layers[0]), "krrrrrrr");
  EXPECT_TRUE(plan.layers[0].recompute_layer);
  EXPECT_EQ(plan.layers[0].slots[0].format, parse_format("bf16"));
  EXPECT_FALSE(plan.layers[2].recompute_layer);
}

TEST(BitPlan, UniformQuantisesAttentionTooButNoStatistics) {
  ActivationConfig config = with_policy(SavePolicy::kUniform);
  config.format = parse_format("bnbfp4/128/fp32");
  const BitPlan plan = make_bit_plan(example_layers(), config);
  EXPECT_EQ(actions(plan.layers[0]), "kkkkkkkk");
  EXPECT_EQ(plan.layers[0].slots[3].format, config.format);
  EXPECT_EQ(plan.layers[0].slots[5].format, config.format);
  EXPECT_EQ(plan.layers[0].slots[1].format, parse_format("fp32"));
  EXPECT_EQ(plan.layers[0].slots[4].format, parse_format("fp32"));
}

TEST(BitPlan, AFormatForOneRoleOverridesThePolicy) {
  ActivationConfig config = with_policy(SavePolicy::kAgoq);
  config.role_format[static_cast<std::size_t>(SlotRole::kGateUp)] = parse_format("int8/32/bf16");
  config.role_format[static_cast<std::size_t>(SlotRole::kMlpHidden)] = parse_format("int8/32/bf16");
  const BitPlan plan = make_bit_plan(example_layers(), config);
  EXPECT_EQ(plan.layers[0].slots[6].format, parse_format("int8/32/bf16"));
  EXPECT_EQ(actions(plan.layers[0]), "krrkkkkr") << "a recomputed slot stays recomputed";
  config.role_format[static_cast<std::size_t>(SlotRole::kLogSumExp)] = parse_format("bf16");
  EXPECT_THROW(make_bit_plan(example_layers(), config), Error);
}

TEST(BitPlan, RunsTheFirstLayersAgainWhenAsked) {
  ActivationConfig config = with_policy(SavePolicy::kAgoq);
  config.recompute_layers = 1;
  const BitPlan plan = make_bit_plan(example_layers(), config);
  EXPECT_TRUE(plan.layers[0].recompute_layer);
  EXPECT_FALSE(plan.layers[1].recompute_layer);
  config.recompute_layers = 3;
  EXPECT_THROW(make_bit_plan(example_layers(), config), Error);
}

TEST(BitPlan, KeepRstdIsASetting) {
  ActivationConfig config = with_policy(SavePolicy::kAgoq);
  config.keep_rstd = true;
  EXPECT_EQ(actions(make_bit_plan(example_layers(), config).layers[0]), "kkrkkkkr");
}

TEST(BitPlan, CountsTheBytesOfEachPolicy) {
  const auto layers = example_layers();
  const auto bytes = [&](SavePolicy policy) {
    return saved_bytes(layers[0], make_bit_plan(layers, with_policy(policy)).layers[0], 10);
  };
  // 2 bytes an element, FP32 statistics.
  EXPECT_EQ(bytes(SavePolicy::kKeep), 10 * (2 * (256 + 256 + 512 + 256 + 1408 + 704) + 4 + 16));
  EXPECT_EQ(bytes(SavePolicy::kExact), 10 * (2 * (256 + 512 + 256 + 1408) + 16));
  EXPECT_EQ(bytes(SavePolicy::kRecompute), 10 * 2 * 256);
  // nf4/32/two-level: 256 elements: 128 + 8 + 2; a segment of 176 elements: 88 + 6 + 2.
  EXPECT_EQ(bytes(SavePolicy::kAgoq), 10 * (138 + 8 * 96 + 2 * (512 + 256) + 16));
}

TEST(BitPlan, NamesRoundTrip) {
  for (const char* name : {"keep", "exact", "agoq", "recompute", "uniform"}) {
    EXPECT_EQ(name_of(parse_save_policy(name)), name);
  }
  EXPECT_THROW(parse_save_policy("all"), Error);
}

}  // namespace
}  // namespace agoq

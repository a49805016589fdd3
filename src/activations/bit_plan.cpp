#include "activations/bit_plan.h"

#include <algorithm>

#include "core/error.h"

namespace agoq {
namespace {

constexpr SavePolicy kPolicies[] = {SavePolicy::kKeep, SavePolicy::kExact, SavePolicy::kAgoq,
                                    SavePolicy::kRecompute, SavePolicy::kUniform};

bool is_statistic(SlotRole role) { return role == SlotRole::kRstd || role == SlotRole::kLogSumExp; }

/// The plan of one slot when its layer is not run again.
SlotPlan plan_slot(const SaveSlot& slot, const ActivationConfig& config) {
  const QuantFormat exact = exact_format(slot.type);
  SlotPlan plan{SlotAction::kKeep, exact};
  switch (config.policy) {
    case SavePolicy::kKeep:
    case SavePolicy::kRecompute:  // a layer that is not run again, such as the final norm
      break;
    case SavePolicy::kExact:
    case SavePolicy::kAgoq:
      switch (slot.role) {
        case SlotRole::kNormInput:
          // The first block's: a function of the token ids.
          if (!slot.recomputed_from.empty()) plan.action = SlotAction::kRecompute;
          [[fallthrough]];
        case SlotRole::kGateUp:
          if (config.policy == SavePolicy::kAgoq) plan.format = config.format;
          break;
        case SlotRole::kQkv:
        case SlotRole::kAttentionOutput:
        case SlotRole::kLogSumExp: break;
        case SlotRole::kNormOutput:
        case SlotRole::kMlpHidden: plan.action = SlotAction::kRecompute; break;
        case SlotRole::kRstd:
          if (!config.keep_rstd) plan.action = SlotAction::kRecompute;
          break;
      }
      break;
    case SavePolicy::kUniform:
      if (!is_statistic(slot.role)) plan.format = config.format;
      break;
  }
  const auto& chosen = config.role_format[static_cast<std::size_t>(slot.role)];
  if (chosen && plan.action == SlotAction::kKeep) plan.format = *chosen;
  return plan;
}

/// A layer that keeps its input, exactly, and is run again.
LayerPlan plan_recomputed_layer(const LayerSlots& slots) {
  LayerPlan plan;
  plan.recompute_layer = true;
  plan.slots.assign(slots.size(), {SlotAction::kRecompute, {}});
  plan.slots[kLayerInput] = {SlotAction::kKeep, exact_format(slots[kLayerInput].type)};
  return plan;
}

}  // namespace

std::string_view name_of(SlotRole role) {
  switch (role) {
    case SlotRole::kNormInput: return "norm_input";
    case SlotRole::kNormOutput: return "norm_output";
    case SlotRole::kRstd: return "rstd";
    case SlotRole::kQkv: return "qkv";
    case SlotRole::kAttentionOutput: return "attention_output";
    case SlotRole::kLogSumExp: return "log_sum_exp";
    case SlotRole::kGateUp: return "gate_up";
    case SlotRole::kMlpHidden: return "mlp_hidden";
  }
  return "?";
}

std::string_view name_of(SavePolicy policy) {
  switch (policy) {
    case SavePolicy::kKeep: return "keep";
    case SavePolicy::kExact: return "exact";
    case SavePolicy::kAgoq: return "agoq";
    case SavePolicy::kRecompute: return "recompute";
    case SavePolicy::kUniform: return "uniform";
  }
  return "?";
}

SavePolicy parse_save_policy(std::string_view text) {
  for (const SavePolicy policy : kPolicies) {
    if (name_of(policy) == text) return policy;
  }
  fail_input("a save policy is one of keep, exact, agoq, recompute, uniform; '{}' is none of them",
             text);
}

BitPlan make_bit_plan(const std::vector<LayerSlots>& layers, const ActivationConfig& config) {
  for (int role = 0; role < kSlotRoles; ++role) {
    check_input(!config.role_format[static_cast<std::size_t>(role)] ||
                    !is_statistic(static_cast<SlotRole>(role)),
                "{} is a statistic and always exact: remove its format",
                name_of(static_cast<SlotRole>(role)));
  }
  BitPlan plan;
  const auto blocks = static_cast<std::int64_t>(layers.size()) - 1;
  check_input(0 <= config.recompute_layers && config.recompute_layers <= blocks,
              "activations.recompute_layers is from 0 to the {} layers of the model; {} was given",
              blocks, config.recompute_layers);
  for (std::int64_t l = 0; l < static_cast<std::int64_t>(layers.size()); ++l) {
    const LayerSlots& slots = layers[static_cast<std::size_t>(l)];
    const bool is_block = l < blocks;
    if (is_block && (config.policy == SavePolicy::kRecompute || l < config.recompute_layers)) {
      plan.layers.push_back(plan_recomputed_layer(slots));
      continue;
    }
    LayerPlan layer;
    for (const SaveSlot& slot : slots) layer.slots.push_back(plan_slot(slot, config));
    plan.layers.push_back(std::move(layer));
  }
  return plan;
}

BitPlan make_forward_only_plan(const std::vector<LayerSlots>& layers) {
  BitPlan plan;
  for (const LayerSlots& slots : layers) {
    LayerPlan layer;
    layer.slots.assign(slots.size(), {SlotAction::kRecompute, {}});
    plan.layers.push_back(std::move(layer));
  }
  return plan;
}

std::int64_t saved_bytes(const LayerSlots& slots, const LayerPlan& plan, std::int64_t tokens) {
  std::int64_t bytes = 0;
  for (std::size_t s = 0; s < slots.size(); ++s) {
    if (plan.slots[s].action == SlotAction::kKeep) {
      bytes += payload_bytes(plan.slots[s].format, grid_of(slots[s], tokens));
    }
  }
  return bytes;
}

}  // namespace agoq

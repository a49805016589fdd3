// BitPlan: for every slot of every layer, whether it is kept, and in which format, or recomputed.
// Made by a pure function of slots and settings, without any device; printed by `agoq plan`, written
// as plan.json, and the one thing the ActivationStore obeys.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "activations/save_slot.h"

namespace agoq {

/// The named save policies; every memory ratio names the one it is against.
enum class SavePolicy : std::uint8_t {
  kKeep,       // every slot exact: what a usual trainer keeps
  kExact,      // the slots AGoQ keeps, exact; the rest recomputed from them
  kAgoq,       // norm inputs and gate/up quantised; attention exact; the rest recomputed
  kRecompute,  // each layer's input only; the layer is run again in backward
  kUniform,    // every slot of `keep` quantised, attention included (an ablation)
};
std::string_view name_of(SavePolicy policy);
/// Throws Error (kInput) that lists the policies.
SavePolicy parse_save_policy(std::string_view text);

struct ActivationConfig {
  SavePolicy policy = SavePolicy::kAgoq;
  /// The format of quantised slots under `agoq` and `uniform`.
  QuantFormat format{Code::kNf4, 32, ScaleType::kTwoLevel, Rounding::kNearest};
  /// A format for one role, whatever the policy says about quantising it. Not for rstd and
  /// log-sum-exp, which are statistics and always exact.
  std::array<std::optional<QuantFormat>, kSlotRoles> role_format{};
  /// Keep rstd of the norms (exact) under `exact` and `agoq` instead of recomputing it.
  bool keep_rstd = false;
  /// The first layers of the model that keep their input only and are run again in backward.
  std::int64_t recompute_layers = 0;

  bool operator==(const ActivationConfig&) const = default;
};

enum class SlotAction : std::uint8_t { kKeep, kRecompute };

struct SlotPlan {
  SlotAction action = SlotAction::kKeep;
  QuantFormat format;  // of a kept slot
};

struct LayerPlan {
  std::vector<SlotPlan> slots;   // in the order of the layer's slots
  bool recompute_layer = false;  // run the layer's forward again before its backward
};

struct BitPlan {
  std::vector<LayerPlan> layers;
};

/// The plan for one layer list. layers[l] are the slots of layer l; the last entry is the final norm.
BitPlan make_bit_plan(const std::vector<LayerSlots>& layers, const ActivationConfig& config);

/// A plan that keeps nothing, for passes without a backward.
BitPlan make_forward_only_plan(const std::vector<LayerSlots>& layers);

/// Bytes of codes, scales and statistics that a layer keeps for `tokens` tokens (payload,
/// without alignment).
std::int64_t saved_bytes(const LayerSlots& slots, const LayerPlan& plan, std::int64_t tokens);

}  // namespace agoq

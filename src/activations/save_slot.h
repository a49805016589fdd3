// SaveSlot: one tensor that a layer may keep from forward to backward. A layer lists its slots in
// `saves(config)` above its forward and backward; that list is the one source for the bit plan, the
// store, the memory report and the backward pass. A slot that the plan does not keep is recomputed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/element_type.h"
#include "quant/format.h"
#include "quant/quant_tensor.h"

namespace agoq {

/// What a slot holds; formats and policies are chosen per role.
enum class SlotRole : std::uint8_t {
  kNormInput,        // residual stream: input of a normalisation
  kNormOutput,       // input of the QKV or gate/up GEMM
  kRstd,             // 1 / standard deviation of a norm's rows
  kQkv,              // q, k, v after RoPE
  kAttentionOutput,  // input of the output projection
  kLogSumExp,        // of the attention rows
  kGateUp,           // gate and up projections
  kMlpHidden,        // silu(gate) * up: input of the down projection
};
inline constexpr int kSlotRoles = 8;
std::string_view name_of(SlotRole role);

struct SaveSlot {
  std::string name;  // "norm1_input"
  SlotRole role;
  std::int64_t width;     // elements per token
  std::int64_t segments;  // of a row's block grid: where tensor parallelism may cut it
  ElementType type;       // of the tensor that is saved
  /// How the layer gets it back when it is not kept, for the reader of a plan ("norm of norm1_input");
  /// empty: only by running the whole layer again.
  std::string recomputed_from;
};

/// The slots of one layer, in the order of its slot enum; the first is the layer's input.
using LayerSlots = std::vector<SaveSlot>;

inline constexpr std::size_t kLayerInput = 0;

/// The block grid of `slot` for `tokens` tokens.
inline BlockGrid grid_of(const SaveSlot& slot, std::int64_t tokens) {
  return {tokens, slot.width, slot.segments};
}

}  // namespace agoq

// Batch: the tokens of one micro-batch, in backend memory.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "core/tensor.h"

namespace agoq {

/// N = sequences * sequence length tokens, sequences one after another.
struct Batch {
  Tensor tokens;     // int32 [N]
  Tensor targets;    // int32 [N]: the token that follows
  Tensor weights;    // fp32 [N]: the loss weight of each target; 0 where there is none
  Tensor positions;  // int32 [N]: position within the document, for RoPE
  Documents documents;
};

}  // namespace agoq

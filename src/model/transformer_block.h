// One LLaMA block: attention and gated MLP, each behind a norm, both added to the residual stream.
//
//   x += delta_in                       (the previous block's MLP output)
//   n1 = norm1(x);  qkv = rope(n1 Wqkv^T);  o = attention(qkv)
//   x += o Wo^T
//   n2 = norm2(x);  gate_up = n2 Wgu^T;  hidden = silu(gate) * up
//   delta_out = hidden Wdown^T
//
// The additions to x are left to the norm that follows, which is fused with them.
#pragma once

#include "activations/activation_store.h"
#include "gradients/main_gradients.h"
#include "model/batch.h"
#include "model/model_config.h"
#include "model/parameters.h"

namespace agoq {

/// What a block computes with, beside its activations.
struct BlockCall {
  const ModelConfig& config;
  const std::vector<Tensor>& weights;  // of the whole model
  const BlockParameters& parameters;
  const Batch& batch;
  const Tensor& rope_table;
  const Tensor& embedding;  // [V, H]: what the first block's input is recomputed from
};

/// What a block may keep from forward to backward.
LayerSlots block_saves(const ModelConfig& config);

/// x [N, H] is updated in place; delta_in [N, H] is optional; delta_out [N, H] may be delta_in.
void block_forward(const Context&, const BlockCall&, const Tensor& x, const Tensor& delta_in,
                   const Tensor& delta_out, LayerFrame frame);

/// dx [N, H]: the gradient of x + delta_out at the block's end in, of x at its start out.
void block_backward(const Context&, const BlockCall&, const Tensor& dx, LayerFrame frame,
                    MainGradients& gradients);

}  // namespace agoq

#include "model/transformer_block.h"

namespace agoq {
namespace {

/// The slots of a block: `block_saves` lists them in this order.
enum Slot : int {
  kNorm1Input,
  kNorm1Rstd,
  kNorm1Output,
  kQkv,
  kLogSumExp,
  kAttentionOutput,
  kNorm2Input,
  kNorm2Rstd,
  kNorm2Output,
  kGateUp,
  kMlpHidden,
};

/// A parameter's tensor, not given where the model has none (norms without weights).
Tensor weight_of(const BlockCall& call, std::size_t parameter) {
  return parameter == kNoParameter ? Tensor{} : call.weights[parameter];
}

Tensor vector_gradient(const MainGradients& gradients, std::size_t parameter) {
  return parameter == kNoParameter ? Tensor{} : gradients.vector(parameter);
}

/// The norm output that fed a GEMM: kept, or recomputed from the norm's input.
Tensor norm_output(const Context& context, const BlockCall& call, LayerFrame& frame, int output_slot,
                   const QuantTensor& input, std::size_t weight) {
  if (frame.kept(output_slot)) return frame.load(context, output_slot);
  const Tensor output =
      context.workspace.take(call.config.dtype, Shape{input.rows(), call.config.hidden});
  context.backend.norm_forward_saved(context, call.config.norm, input, weight_of(call, weight),
                                     call.config.norm_epsilon, output);
  return output;
}

/// The input of the first norm: kept, or, in the first block, the embedding of the tokens once more.
QuantTensor norm1_input(const Context& context, const BlockCall& call, LayerFrame& frame) {
  if (frame.kept(kNorm1Input)) return frame.saved(kNorm1Input);
  const Tensor& tokens = call.batch.tokens;
  const Tensor x = context.workspace.take(call.config.dtype, Shape{tokens.count(), call.config.hidden});
  context.backend.embedding_forward(context, tokens, call.embedding, x);
  return as_quant_tensor(x);
}

void mlp_backward(const Context& context, const BlockCall& call, const Tensor& dx, LayerFrame& frame,
                  MainGradients& gradients) {
  Backend& backend = context.backend;
  const ModelConfig& config = call.config;
  const std::int64_t tokens = dx.rows();
  const Arena::Scope scope(context.workspace);

  // delta_out = hidden Wdown^T; hidden is kept, or recomputed with the gradient of gate_up.
  const Tensor dhidden = context.workspace.take(config.dtype, Shape{tokens, config.feed_forward});
  backend.matmul(context, dx, Transpose::kNo, call.weights[call.parameters.down], Transpose::kNo,
                 dhidden);
  const Tensor dgate_up = context.workspace.take(config.dtype, Shape{tokens, 2 * config.feed_forward});
  {
    const Arena::Scope hidden_scope(context.workspace);
    const bool kept = frame.kept(kMlpHidden);
    const Tensor hidden =
        kept ? frame.load(context, kMlpHidden) : context.workspace.take(config.dtype, dhidden.shape);
    backend.swiglu_backward_saved(context, dhidden, frame.saved(kGateUp), dgate_up,
                                  kept ? Tensor{} : hidden);
    gradients.add_weight_gradient(context, call.parameters.down, dx, hidden);
  }
  // gate_up = n2 Wgu^T.
  {
    const Arena::Scope norm_scope(context.workspace);
    const Tensor n2 =
        norm_output(context, call, frame, kNorm2Output, frame.saved(kNorm2Input), call.parameters.norm2);
    gradients.add_weight_gradient(context, call.parameters.gate_up, dgate_up, n2);
  }
  const Tensor dn2 = context.workspace.take(config.dtype, dx.shape);
  backend.matmul(context, dgate_up, Transpose::kNo, call.weights[call.parameters.gate_up],
                 Transpose::kNo, dn2);
  backend.norm_backward_saved(context, config.norm, dn2, frame.saved(kNorm2Input),
                              weight_of(call, call.parameters.norm2), config.norm_epsilon,
                              frame.load_if_kept(context, kNorm2Rstd), dx,
                              vector_gradient(gradients, call.parameters.norm2));
}

void attention_block_backward(const Context& context, const BlockCall& call, const Tensor& dx,
                              LayerFrame& frame, MainGradients& gradients) {
  Backend& backend = context.backend;
  const ModelConfig& config = call.config;
  const AttentionShape attention = config.attention();
  const std::int64_t tokens = dx.rows();
  const Arena::Scope scope(context.workspace);

  const Tensor dqkv = context.workspace.take(config.dtype, Shape{tokens, attention.qkv_width()});
  {
    // x += o Wo^T. One copy of o serves this weight gradient and the attention's backward.
    const Arena::Scope attention_scope(context.workspace);
    const Tensor o = frame.load(context, kAttentionOutput);
    gradients.add_weight_gradient(context, call.parameters.o, dx, o);
    const Tensor d_o = context.workspace.take(config.dtype, Shape{tokens, attention.output_width()});
    backend.matmul(context, dx, Transpose::kNo, call.weights[call.parameters.o], Transpose::kNo, d_o);
    backend.attention_backward(context, attention, d_o, frame.load(context, kQkv), o,
                               frame.load(context, kLogSumExp), call.batch.documents, dqkv);
  }
  backend.rope(context, attention, dqkv, call.batch.positions, call.rope_table, /*inverse=*/true);
  // qkv = n1 Wqkv^T.
  const QuantTensor input = norm1_input(context, call, frame);
  {
    const Arena::Scope norm_scope(context.workspace);
    const Tensor n1 = norm_output(context, call, frame, kNorm1Output, input, call.parameters.norm1);
    gradients.add_weight_gradient(context, call.parameters.qkv, dqkv, n1);
  }
  const Tensor dn1 = context.workspace.take(config.dtype, dx.shape);
  backend.matmul(context, dqkv, Transpose::kNo, call.weights[call.parameters.qkv], Transpose::kNo, dn1);
  backend.norm_backward_saved(context, config.norm, dn1, input, weight_of(call, call.parameters.norm1),
                              config.norm_epsilon, frame.load_if_kept(context, kNorm1Rstd), dx,
                              vector_gradient(gradients, call.parameters.norm1));
}

}  // namespace

LayerSlots block_saves(const ModelConfig& config) {
  const ElementType type = config.dtype;
  const ElementType statistic = statistics_type(type);
  const AttentionShape attention = config.attention();
  // gate and up are two rows of I elements, each cut like the feed-forward dimension.
  return {
      {"norm1_input", SlotRole::kNormInput, config.hidden, 1, type, ""},
      {"norm1_rstd", SlotRole::kRstd, 1, 1, statistic, "norm1_input"},
      {"norm1_output", SlotRole::kNormOutput, config.hidden, 1, type, "norm of norm1_input"},
      {"qkv", SlotRole::kQkv, attention.qkv_width(), 1, type, ""},
      {"log_sum_exp", SlotRole::kLogSumExp, attention.heads, 1, statistic, ""},
      {"attention_output", SlotRole::kAttentionOutput, attention.output_width(), 1, type, ""},
      {"norm2_input", SlotRole::kNormInput, config.hidden, 1, type, ""},
      {"norm2_rstd", SlotRole::kRstd, 1, 1, statistic, "norm2_input"},
      {"norm2_output", SlotRole::kNormOutput, config.hidden, 1, type, "norm of norm2_input"},
      {"gate_up", SlotRole::kGateUp, 2 * config.feed_forward, 2 * config.segments, type, ""},
      {"mlp_hidden", SlotRole::kMlpHidden, config.feed_forward, config.segments, type,
       "silu(gate) * up of gate_up"},
  };
}

void block_forward(const Context& context, const BlockCall& call, const Tensor& x,
                   const Tensor& delta_in, const Tensor& delta_out, LayerFrame frame) {
  Backend& backend = context.backend;
  const ModelConfig& config = call.config;
  const AttentionShape attention = config.attention();
  const Arena::Scope scope(context.workspace);

  {
    const Arena::Scope attention_scope(context.workspace);
    const Tensor n1 = frame.output(context, kNorm1Output);
    backend.residual_norm_forward(context, config.norm, x, delta_in,
                                  weight_of(call, call.parameters.norm1), config.norm_epsilon, n1,
                                  frame.output(context, kNorm1Rstd), frame.destination(kNorm1Input, x),
                                  frame.key(context, kNorm1Input), frame.counters(kNorm1Input));
    frame.save(context, kNorm1Output, n1);

    const Tensor qkv = frame.output(context, kQkv);
    backend.matmul(context, n1, Transpose::kNo, call.weights[call.parameters.qkv], Transpose::kYes, qkv);
    backend.rope(context, attention, qkv, call.batch.positions, call.rope_table, /*inverse=*/false);
    const Tensor o = frame.output(context, kAttentionOutput);
    backend.attention_forward(context, attention, qkv, call.batch.documents, o,
                              frame.output(context, kLogSumExp));
    frame.save(context, kQkv, qkv);
    frame.save(context, kAttentionOutput, o);
    // delta_in has been added to x: its memory may serve for the attention's output.
    backend.matmul(context, o, Transpose::kNo, call.weights[call.parameters.o], Transpose::kYes,
                   delta_out);
  }

  const Tensor n2 = frame.output(context, kNorm2Output);
  backend.residual_norm_forward(context, config.norm, x, delta_out,
                                weight_of(call, call.parameters.norm2), config.norm_epsilon, n2,
                                frame.output(context, kNorm2Rstd), frame.destination(kNorm2Input, x),
                                frame.key(context, kNorm2Input), frame.counters(kNorm2Input));
  frame.save(context, kNorm2Output, n2);

  const Tensor gate_up = frame.output(context, kGateUp);
  backend.matmul(context, n2, Transpose::kNo, call.weights[call.parameters.gate_up], Transpose::kYes,
                 gate_up);
  const Tensor hidden = frame.output(context, kMlpHidden);
  backend.swiglu_forward_save(context, gate_up, hidden, frame.destination(kGateUp, gate_up),
                              frame.key(context, kGateUp), frame.counters(kGateUp));
  frame.save(context, kMlpHidden, hidden);
  backend.matmul(context, hidden, Transpose::kNo, call.weights[call.parameters.down], Transpose::kYes,
                 delta_out);
}

void block_backward(const Context& context, const BlockCall& call, const Tensor& dx, LayerFrame frame,
                    MainGradients& gradients) {
  mlp_backward(context, call, dx, frame, gradients);
  attention_block_backward(context, call, dx, frame, gradients);
}

}  // namespace agoq

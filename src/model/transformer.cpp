#include "model/transformer.h"

#include <algorithm>

#include "model/rope_table.h"
#include "model/transformer_block.h"

namespace agoq {
namespace {

/// The slots of the final norm, listed by transformer_saves in this order.
enum FinalSlot : int { kFinalNormInput = static_cast<int>(kLayerInput), kFinalNormRstd };

}  // namespace

std::vector<LayerSlots> transformer_saves(const ModelConfig& config) {
  std::vector<LayerSlots> layers(static_cast<std::size_t>(config.layers), block_saves(config));
  // The first block's input is a function of the token ids. Keeping it quantised would also cost more
  // than elsewhere: a token's rounding error is the same wherever it stands, so it does not average out
  // over the batch (docs/method.md).
  layers.front()[kLayerInput].recomputed_from = "embedding of the tokens";
  // The head's weight gradient is taken in the forward pass, from the exact output of the final norm.
  layers.push_back({
      {"final_norm_input", SlotRole::kNormInput, config.hidden, 1, config.dtype, ""},
      {"final_norm_rstd", SlotRole::kRstd, 1, 1, statistics_type(config.dtype), "final_norm_input"},
  });
  return layers;
}

Transformer::Transformer(const Context& context, const ModelConfig& config, Arena& weights,
                         Arena& tables, std::int64_t positions)
    : config_(config), parameters_(parameters_of(config)), index_(index_parameters(config)) {
  config_.check();
  for (const Parameter& parameter : parameters_) {
    weights_.push_back(weights.take(config_.dtype, Shape{parameter.rows, parameter.columns}));
  }
  rope_table_ =
      make_rope_table(context, tables, config_.rope, config_.head_size, positions, config_.dtype);
}

Tensor Transformer::final_norm_weight() const {
  return index_.final_norm == kNoParameter ? Tensor{} : weights_[index_.final_norm];
}

void Transformer::forward(const Context& context, const Batch& batch, ActivationStore& store,
                          std::size_t frame, MainGradients& gradients, const Tensor& token_loss,
                          const Tensor& doutput) const {
  forward_to_norm(context, batch, store, frame, doutput);
  head_and_loss(context, batch, doutput, token_loss, &gradients);
}

void Transformer::backward(const Context& context, const Batch& batch, ActivationStore& store,
                           std::size_t frame, MainGradients& gradients, const Tensor& doutput) const {
  const Arena::Scope scope(context.workspace);
  const Tensor dx = context.workspace.take(config_.dtype, doutput.shape);
  context.backend.zero(context, dx.data, dx.bytes());
  {
    LayerFrame final_frame = store.layer(frame, index_.blocks.size());
    context.backend.norm_backward_saved(
        context, config_.norm, doutput, final_frame.saved(kFinalNormInput), final_norm_weight(),
        config_.norm_epsilon, final_frame.load_if_kept(context, kFinalNormRstd), dx,
        index_.final_norm == kNoParameter ? Tensor{} : gradients.vector(index_.final_norm));
    if (index_.final_norm != kNoParameter) gradients.complete(context, index_.final_norm);
  }
  for (std::size_t l = index_.blocks.size(); l-- > 0;) {
    const BlockCall call{config_, weights_,    index_.blocks[l],
                         batch,   rope_table_, weights_[index_.embedding]};
    if (!store.plan().layers[l].recompute_layer) {
      block_backward(context, call, dx, store.layer(frame, l), gradients);
      complete_block(context, l, gradients);
      continue;
    }
    // Whole-layer recomputation: run the layer again from its input, into the scratch layer. doutput
    // is free by now and stands in for the MLP output, which nobody needs.
    LayerFrame scratch = store.recomputed_layer(l);
    {
      const Arena::Scope input_scope(context.workspace);
      LayerFrame kept = store.layer(frame, l);
      const Tensor input = context.workspace.take(config_.dtype, dx.shape);
      context.backend.copy(context, kept.load(context, kLayerInput), input);
      block_forward(context, call, input, {}, doutput, scratch);
    }
    block_backward(context, call, dx, scratch, gradients);
    complete_block(context, l, gradients);
  }
  gradients.add_embedding(context, index_.embedding, batch.tokens, dx);
  gradients.complete(context, index_.embedding);
}

void Transformer::use(const Context& context, std::size_t parameter) const {
  if (before_use_ && parameter != kNoParameter) before_use_(context, parameter);
}

void Transformer::use_block(const Context& context, std::size_t block) const {
  for (const std::size_t parameter : parameters_of_block(index_.blocks[block])) use(context, parameter);
}

void Transformer::complete_block(const Context& context, std::size_t block,
                                 const MainGradients& gradients) const {
  for (const std::size_t parameter : parameters_of_block(index_.blocks[block])) {
    gradients.complete(context, parameter);
  }
}

std::vector<std::size_t> Transformer::completion_order() const {
  std::vector<std::size_t> order;
  if (index_.head != index_.embedding) order.push_back(index_.head);
  if (index_.final_norm != kNoParameter) order.push_back(index_.final_norm);
  for (std::size_t l = index_.blocks.size(); l-- > 0;) {
    const std::vector<std::size_t> of_block = parameters_of_block(index_.blocks[l]);
    order.insert(order.end(), of_block.begin(), of_block.end());
  }
  order.push_back(index_.embedding);
  return order;
}

std::optional<std::size_t> Transformer::token_table() const {
  if (index_.head == index_.embedding) return std::nullopt;
  return index_.embedding;
}

void Transformer::evaluate(const Context& context, const Batch& batch, ActivationStore& store,
                           const Tensor& token_loss) const {
  const Arena::Scope scope(context.workspace);
  const Tensor output =
      context.workspace.take(config_.dtype, Shape{batch.tokens.count(), config_.hidden});
  const std::size_t frame = store.open();
  forward_to_norm(context, batch, store, frame, output);
  store.close(frame);
  head_and_loss(context, batch, output, token_loss, nullptr);
}

void Transformer::logits(const Context& context, const Batch& batch, ActivationStore& store,
                         std::int64_t first, std::int64_t last, const Tensor& logits) const {
  const Arena::Scope scope(context.workspace);
  const Tensor output =
      context.workspace.take(config_.dtype, Shape{batch.tokens.count(), config_.hidden});
  const std::size_t frame = store.open();
  forward_to_norm(context, batch, store, frame, output);
  store.close(frame);
  use(context, index_.head);
  context.backend.matmul(context, output.slice_rows(first, last), Transpose::kNo, weights_[index_.head],
                         Transpose::kYes, logits);
}

std::size_t Transformer::loss_workspace(const Context& context, std::int64_t tokens,
                                        MainGradients& gradients) const {
  Arena workspace = Arena::measuring("loss chunk");
  Arena operands = Arena::measuring("operands");
  const Context measuring{context.backend, context.stream, workspace, context.random};
  Batch batch;
  batch.targets = operands.take(ElementType::kInt32, Shape{tokens});
  batch.weights = operands.take(ElementType::kFp32, Shape{tokens});
  const Tensor token_loss = operands.take(statistics_type(config_.dtype), Shape{tokens});
  head_and_loss(measuring, batch, operands.take(config_.dtype, Shape{tokens, config_.hidden}),
                token_loss, &gradients);
  return workspace.high_water();
}

void Transformer::forward_to_norm(const Context& context, const Batch& batch, ActivationStore& store,
                                  std::size_t frame, const Tensor& output) const {
  const Arena::Scope scope(context.workspace);
  const Tensor x = context.workspace.take(config_.dtype, output.shape);
  const Tensor delta = context.workspace.take(config_.dtype, output.shape);
  use(context, index_.embedding);
  context.backend.embedding_forward(context, batch.tokens, weights_[index_.embedding], x);
  for (std::size_t l = 0; l < index_.blocks.size(); ++l) {
    use_block(context, l);
    const BlockCall call{config_, weights_,    index_.blocks[l],
                         batch,   rope_table_, weights_[index_.embedding]};
    block_forward(context, call, x, l == 0 ? Tensor{} : delta, delta, store.layer(frame, l));
  }
  use(context, index_.final_norm);
  LayerFrame frame_of_norm = store.layer(frame, index_.blocks.size());
  context.backend.residual_norm_forward(
      context, config_.norm, x, delta, final_norm_weight(), config_.norm_epsilon, output,
      frame_of_norm.output(context, kFinalNormRstd), frame_of_norm.destination(kFinalNormInput, x),
      frame_of_norm.key(context, kFinalNormInput), frame_of_norm.counters(kFinalNormInput));
}

void Transformer::head_and_loss(const Context& context, const Batch& batch, const Tensor& output,
                                const Tensor& token_loss, MainGradients* gradients) const {
  use(context, index_.head);
  Backend& backend = context.backend;
  const Tensor& head = weights_[index_.head];
  const std::int64_t tokens = output.rows();
  const std::int64_t chunk = std::min(config_.loss_chunk, tokens);
  const ElementType compute = statistics_type(config_.dtype);
  const Arena::Scope scope(context.workspace);
  // The weight gradient accumulates over the chunks in the compute type and touches the main gradient
  // once per micro-batch.
  Tensor dhead;
  if (gradients != nullptr) dhead = context.workspace.take(compute, Shape{head.rows(), head.width()});
  const Tensor logits_memory = context.workspace.take(compute, Shape{chunk, config_.vocabulary});
  // The gradient of the logits feeds matrix products, and so has the model's type.
  const Tensor dlogits_memory = gradients == nullptr || compute == config_.dtype
                                    ? logits_memory
                                    : context.workspace.take(config_.dtype, logits_memory.shape);
  for (std::int64_t first = 0; first < tokens; first += chunk) {
    const std::int64_t last = std::min(first + chunk, tokens);
    const Tensor rows = output.slice_rows(first, last);
    const Tensor logits = logits_memory.slice_rows(0, last - first);
    const auto part = [&](const Tensor& vector) {
      return vector.reshaped(Shape{tokens, 1}).slice_rows(first, last).reshaped(Shape{last - first});
    };
    backend.matmul(context, rows, Transpose::kNo, head, Transpose::kYes, logits);
    const Tensor dlogits = gradients == nullptr ? Tensor{} : dlogits_memory.slice_rows(0, last - first);
    backend.cross_entropy(context, logits, part(batch.targets), part(batch.weights), part(token_loss),
                          dlogits);
    if (gradients == nullptr) continue;
    backend.matmul(context, dlogits, Transpose::kYes, rows, Transpose::kNo, dhead, first > 0);
    backend.matmul(context, dlogits, Transpose::kNo, head, Transpose::kNo, rows);
  }
  if (gradients == nullptr) return;
  gradients->add(context, index_.head, dhead);
  // A tied head's gradient is complete when the embedding's is.
  if (index_.head != index_.embedding) gradients->complete(context, index_.head);
}

}  // namespace agoq

// Transformer: embedding, blocks, final norm, head and loss, over weights that it owns.
//
// The head never holds the logits of a whole sequence: it works through chunks of tokens, and when a
// backward pass follows it leaves the gradient of the final norm's output, computed chunk by chunk
// beside the loss. The gradient is that of the *sum* of weighted token losses.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "activations/activation_store.h"
#include "gradients/main_gradients.h"
#include "model/batch.h"
#include "model/model_config.h"
#include "model/parameters.h"

namespace agoq {

/// The slots of every block and, last, of the final norm.
std::vector<LayerSlots> transformer_saves(const ModelConfig& config);

class Transformer {
 public:
  /// Weights from `weights`, uninitialised; a RoPE table for `positions` positions from `tables`.
  Transformer(const Context&, const ModelConfig& config, Arena& weights, Arena& tables,
              std::int64_t positions);

  const ModelConfig& config() const { return config_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  const ParameterIndex& index() const { return index_; }
  /// One tensor per parameter, [rows, columns].
  const std::vector<Tensor>& weights() const { return weights_; }

  /// Runs a micro-batch forward, saving into `frame` of `store`. Writes each token's weighted loss
  /// into token_loss (compute type [N]) and the gradient of the final norm's output into
  /// doutput [N, H]; the head's weight gradient is added to `gradients` here.
  void forward(const Context&, const Batch&, ActivationStore& store, std::size_t frame,
               MainGradients& gradients, const Tensor& token_loss, const Tensor& doutput) const;
  /// The backward pass of that micro-batch; doutput is overwritten. Tells `gradients` of each parameter
  /// that is complete, in the order of completion_order(); the head already in forward().
  void backward(const Context&, const Batch&, ActivationStore& store, std::size_t frame,
                MainGradients& gradients, const Tensor& doutput) const;

  /// From now on calls use(context, parameter) before a forward pass queues the first operation that
  /// reads the parameter's weight: for weights that are still on their way.
  void before_use(std::function<void(const Context&, std::size_t parameter)> use) {
    before_use_ = std::move(use);
  }

  /// All parameters, in the order in which a micro-batch completes their gradients.
  std::vector<std::size_t> completion_order() const;
  /// The parameter whose gradient is zero but in the rows of a micro-batch's tokens: the embedding,
  /// unless it is the head too.
  std::optional<std::size_t> token_table() const;

  /// Losses without saving anything; `store` follows make_forward_only_plan.
  void evaluate(const Context&, const Batch&, ActivationStore& store, const Tensor& token_loss) const;
  /// The logits, compute type [last - first, V], of tokens [first, last) of the batch.
  void logits(const Context&, const Batch&, ActivationStore& store, std::int64_t first,
              std::int64_t last, const Tensor& logits) const;

  /// Workspace bytes that the head and loss of forward take for `tokens` tokens. For the memory plan.
  std::size_t loss_workspace(const Context&, std::int64_t tokens, MainGradients& gradients) const;

 private:
  /// Everything up to and including the final norm: output [N, H].
  void forward_to_norm(const Context&, const Batch&, ActivationStore& store, std::size_t frame,
                       const Tensor& output) const;
  /// Losses of `output`; with `gradients`, replaces output by its gradient.
  void head_and_loss(const Context&, const Batch&, const Tensor& output, const Tensor& token_loss,
                     MainGradients* gradients) const;
  Tensor final_norm_weight() const;
  void use(const Context&, std::size_t parameter) const;
  void use_block(const Context&, std::size_t block) const;
  void complete_block(const Context&, std::size_t block, const MainGradients& gradients) const;

  ModelConfig config_;
  std::vector<Parameter> parameters_;
  ParameterIndex index_;
  std::vector<Tensor> weights_;
  Tensor rope_table_;
  std::function<void(const Context&, std::size_t)> before_use_;
};

}  // namespace agoq

// Trainer: the state of a training run on one rank, and one step of it.
//
//   begin_step; for each of the rank's micro-batches: forward and backward, gradients accumulate; then
//   finish_step: reduction over the ranks, norm, clip, update. The accumulated gradient is that of the
//   sum of token losses; it is divided once, in the update, by the number of valid tokens of the whole
//   step.
//
// The micro-batches of a step are shared out: rank r of W has numbers r, r + W, r + 2 W, ... So a step
// sees the same tokens, and rounds with the same random numbers, for every W, also where W does not
// divide their number and some ranks have one more than others, or none.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "activations/activation_store.h"
#include "comm/communicator.h"
#include "gradients/gradient_reducer.h"
#include "gradients/main_gradients.h"
#include "model/transformer.h"
#include "optim/adamw.h"
#include "train/batch_buffers.h"
#include "train/run_arenas.h"
#include "train/run_config.h"

namespace agoq {

struct StepReport {
  std::int64_t step = 0;  // counts from 1
  double loss = 0;        // mean over valid tokens, nats
  double gradient_norm = 0;
  double learning_rate = 0;
  std::int64_t valid_tokens = 0;
  std::vector<NamedCounts> numerics;  // tensors that counted anything, over all ranks
  /// From when the last of the ranks has ended its backward pass to the reduced gradients: of all ranks'
  /// times (GradientReducer::exposed_seconds) the shortest, that of the one which waits for no other.
  double exposed_communication_seconds = 0;
  /// How long the first of the ranks has waited for the last before that: they are not equally fast.
  double rank_wait_seconds = 0;
};

class Trainer {
 public:
  /// Lays everything out in `arenas` and sets the backend's mode (run.deterministic), which one backend
  /// has one of at a time. With measuring arenas every method computes nothing and only takes its
  /// memory. `ranks` share the step.
  Trainer(const RunConfig& config, Backend& backend, RunArenas& arenas, Communicator& ranks);
  /// Alone.
  Trainer(const RunConfig& config, Backend& backend, RunArenas& arenas);

  /// Initial weights from config.run.seed.
  void initialise();

  // --- one step ---
  void begin_step();
  /// How many micro-batches of a step this rank has, and the number of its `index`-th in the step.
  std::int64_t own_micro_batches() const;
  std::int64_t micro_batch_number(std::int64_t index) const;
  /// Forward and backward of the rank's next micro-batch of the step.
  void micro_batch(const HostBatch& batch);
  /// Updates the weights. Collective, like the two below; every rank returns the same report or throws
  /// the same Error. Throws Error (kNotFinite), with all state as it was, when the loss or a
  /// gradient is not finite; the tensor in which that was counted is named.
  StepReport finish_step();
  /// Goes on to the next step without an update: for a step that finish_step refused. The skipped step
  /// counts in the bias correction of the moments.
  void skip_step() { ++step_; }
  /// The first of the weights, then of the tensors of this micro-batch's forward pass in their order,
  /// that holds NaN or Inf; nothing when all are finite. Waits for every operation.
  std::optional<std::string> first_not_finite(const HostBatch& batch);

  /// Sum of weighted token losses of a micro-batch, nothing saved or changed.
  double evaluate(const HostBatch& batch);
  /// Forward and backward of one micro-batch into zeroed gradients, without an update: for
  /// comparisons of gradients. `between` is called when forward has saved and backward not yet begun.
  using Between = std::function<void(ActivationStore& store, std::size_t frame)>;
  void gradients_of(const HostBatch& batch, const Between& between = {});

  /// Workspace that head and loss take, for the memory plan.
  std::size_t loss_workspace();

  std::int64_t step() const { return step_; }
  void set_step(std::int64_t step) { step_ = step; }
  Context context();
  /// With all its weights: those of the last update may still have been on their way to this rank.
  const Transformer& model();
  const MainGradients& gradients() const { return gradients_; }
  const GradientReducer& reducer() const { return reducer_; }
  Communicator& ranks() const { return ranks_; }
  const AdamW& optimizer() const { return optimizer_; }
  AdamW& optimizer() { return optimizer_; }
  const ActivationStore& activations() const { return store_; }

 private:
  Trainer(const RunConfig& config, Backend& backend, RunArenas& arenas,
          std::unique_ptr<Communicator> alone, Communicator* ranks);
  void forward_and_backward(const HostBatch& batch, const Between& between);

  const RunConfig& config_;
  Backend& backend_;
  std::unique_ptr<Communicator> alone_;  // where no ranks were given
  Communicator& ranks_;
  Arena& workspace_;
  std::int64_t tokens_;  // of a micro-batch
  Transformer model_;
  MainGradients gradients_;
  GradientReducer reducer_;
  AdamW optimizer_;
  ActivationStore store_;
  ActivationStore forward_only_;
  BatchBuffers buffers_;
  Tensor token_loss_;              // compute type [tokens]
  Tensor loss_sums_;               // fp64 [micro_batches]
  std::int64_t step_ = 0;          // completed
  std::int64_t micro_batch_ = 0;   // of this rank, in the step under way
  std::int64_t valid_tokens_ = 0;  // of this rank
};

}  // namespace agoq

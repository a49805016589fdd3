// GradientReducer: from the main gradients of every rank to what the optimizer reads (QuanGrad).
//
//   kQuanGrad    precision-preserving: shards of codes and scales to their ranks, sum in FP32 in rank
//                order, requantised, to all (comm/quantized_reduction.h)
//   kLibrary     the library's sum of FP32 or BF16 gradients: a control
//   kNaiveFp8    one scale for all ranks and sums rounded to FP8 at every addition, after the backward
//   pass:
//                the control that the method is better than
//
// Every gradient is that of the sum of token losses over its rank's micro-batches, so ranks weigh in by
// their tokens, and the one division by all valid tokens is left to the optimizer's gradient_scale.
//
// With the optimizer replicated every rank ends with the whole sum. With it sharded (ZeRO-1) a rank ends
// with the pieces of its own rows, which stand where the rows it sent away stood; their sum is made
// where it is needed, for the norm and again in the update, and exists nowhere.
//
// Buckets leave in the order in which the backward pass completes their parameters. The sums do not
// depend on the buckets, nor on whether they leave during the backward pass or after it. In the first
// step they leave after it: there a backend chooses algorithms by timing, which nothing is to disturb.
//
// The token embedding's gradient is complete last, so that nothing is left to hide its way behind, and
// it is zero but in the rows of the step's tokens, which the host knows before the last backward pass.
// Where those of all ranks together are less than half of the table (kQuanGrad, replicated, the table
// not tied to the head) they alone are gathered, reduced and scattered back: the sum of zeros is zero,
// and a row's sum does not depend on the others, so the bits are those of the whole table's reduction.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "comm/quantized_reduction.h"
#include "core/memory.h"
#include "gradients/main_gradients.h"
#include "gradients/row_union.h"

namespace agoq {

enum class GradientReduction : std::uint8_t { kQuanGrad, kLibrary, kNaiveFp8 };

struct ReductionConfig {
  GradientReduction kind = GradientReduction::kQuanGrad;
  bool sharded = false;            // ZeRO-1
  bool requantise_shards = false;  // sharded: the sum is requantised, as a replicated optimizer reads it
  bool overlap = true;             // with the backward pass of the last micro-batch
  bool sparse_embedding = true;    // reduce the rows of the step's tokens alone
  std::int64_t bucket_elements = std::int64_t{1} << 27;  // over all ranks' shards

  bool operator==(const ReductionConfig&) const = default;
};

/// A parameter whose gradient is zero but in the rows of a step's tokens.
struct TokenTable {
  std::size_t parameter = 0;
  std::int64_t tokens = 0;  // of a step, over all ranks
};

class GradientReducer {
 public:
  /// For `gradients` (made with slots = ranks.size() if sharded), completed in `order`. Staging and sums
  /// in `memory`. table: where there is one; add_tokens() has to tell of all that is added to it.
  GradientReducer(Backend& backend, MainGradients& gradients, const std::vector<std::size_t>& order,
                  Communicator& ranks, const ReductionConfig& config, Arena& memory,
                  const std::optional<TokenTable>& table = {});
  ~GradientReducer() { gradients_.observe({}); }
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  // --- one step; collective ---
  /// sums: of the step, the same on all ranks; stochastic rounding of sums is keyed by it.
  void begin_step(const RandomKey& sums);
  /// The tokens of a micro-batch of this rank, in host memory; before begin_last() for the last one.
  void add_tokens(std::span<const std::int32_t> tokens);
  /// Before the forward pass of this rank's last micro-batch: from then on buckets leave when they are
  /// full. The ranks agree on the rows of the token table: while the device works on what is queued.
  void begin_last(const Context&);
  /// After it, or without one: the rest leaves, and what is queued on the context's stream from now on
  /// finds the reduced gradients.
  void finish(const Context&);

  /// Square root of the sum of squares over all parameters, times `scale`; partial sums in double
  /// precision, in parameter order, then rank order. Throws Error (kNotFinite) naming the parameter when
  /// one is not finite: by its counter where the format cannot store NaN and Inf, by its sum where it
  /// can. 0 when measuring. Collective.
  double norm(const Context&, double scale) const;
  /// Of the rows that this rank updates, all or, if sharded, its own: the gradient is their sum.
  std::span<const QuantTensor> pieces(std::size_t parameter) const { return pieces_[parameter]; }
  const std::vector<Parameter>& parameters() const { return gradients_.parameters(); }

  /// Where the optimizer is sharded: queues beside the context's stream, behind what it holds now, that
  /// every rank's rows of a parameter's weight go to all. Collective. The weight is whole for what is
  /// queued on a context's stream after await_weight() or finish_gathering(), which waits for all of
  /// them: so the first layers of the next forward pass run while the weights of the last are under way.
  void gather_weight(const Context&, std::size_t parameter, const Tensor& weight);
  void await_weight(const Context&, std::size_t parameter);
  void finish_gathering(const Context&);

  /// Of the last step, on the device: from the end of this rank's backward pass to that of the
  /// reduction.
  double exposed_seconds() const { return exposed_seconds_; }
  /// What this rank has sent of its quantised gradients and their sums since construction; 0 where the
  /// library sums them.
  std::size_t sent_bytes() const { return reduction_ ? reduction_->sent_bytes() : 0; }

 private:
  /// The token table and its rows that are reduced in its place.
  struct SparseTable {
    std::size_t parameter;
    RowUnion met;              // by the tokens of the step
    QuantTensor memory;        // [most rows that are reduced so, columns]
    Tensor numbers_memory;     // int32 [of as many, 1]
    QuantTensor rows = {};     // of the step under way; not given: the whole table is reduced
    Tensor numbers = {};       // of these rows in the table
    bool is_agreed = false;    // on the rows
    bool is_gathered = false;  // into `rows`
  };

  void prepare_table(const TokenTable& table, Arena& memory);
  void agree_on_rows(const Context&);
  void gather_table(const Context&);
  void scatter_table(const Context&);
  void complete(const Context&, std::size_t parameter);
  void send_full_buckets(const Context&);
  void send(const Context&, std::size_t bucket);
  /// The context with the key of sums: a bucket may leave while a micro-batch's key is in it.
  Context summing(const Context& context) const {
    return {context.backend, context.stream, context.workspace, sum_key_};
  }
  void agree_on_scales(const Context&);
  void sum_squares(const Context&) const;
  void sum_by_library(const Context&, std::size_t parameter);
  /// The context on the side stream, after what is queued on its own; and back.
  Context beside(const Context&);
  void rejoin(const Context&);
  bool is_alone() const { return ranks_.size() == 1; }

  Backend& backend_;
  MainGradients& gradients_;
  Communicator& ranks_;
  ReductionConfig config_;
  std::vector<std::size_t> order_;
  std::optional<QuantizedReduction> reduction_;  // kQuanGrad
  std::optional<SparseTable> table_;
  std::vector<std::size_t> filled_by_;  // bucket by bucket: so many completed parameters fill it
  std::vector<std::vector<QuantTensor>> pieces_;
  // What norm() squares of every parameter: alone the whole gradient; else the rows that this rank owns,
  // by themselves also where it holds all of them, so that the norm is the same with the optimizer
  // replicated and sharded.
  std::vector<QuantTensor> squared_;
  std::vector<TensorPieces> squared_pieces_;
  RandomKey sum_key_;          // of the step under way
  Tensor sums_;                // fp64 [parameters]
  std::int64_t steps_ = 0;     // that have begun
  std::size_t completed_ = 0;  // parameters, in order
  std::size_t next_bucket_ = 0;
  std::vector<float> scales_;  // kNaiveFp8: of every parameter, the largest of any rank
  // Kept from call to call: nothing is allocated inside a step.
  std::vector<Message> sends_, receives_;
  std::vector<bool> under_way_;  // weights that were gathered and not awaited
  double exposed_seconds_ = 0;
};

}  // namespace agoq

// MainGradients: the gradient of the sum of token losses over the micro-batches of a step, held in
// the configured format (8-bit blocks by default, FP32 and BF16 as settings).
//
// Every micro-batch is added in higher precision and requantised with fresh block scales
// (QuanGrad's local accumulation). One-dimensional parameters keep FP32. In 8-bit mode a gradient
// in higher precision exists for one parameter at a time, in the workspace.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "core/memory.h"
#include "gradients/parameter.h"
#include "quant/format.h"

namespace agoq {

struct GradientConfig {
  QuantFormat format{Code::kE4m3, 128, ScaleType::kFp32, Rounding::kNearest};

  bool operator==(const GradientConfig&) const = default;
};

class MainGradients {
 public:
  /// One main gradient per parameter, in `arena`. model_type decides the type of vectors' gradients.
  /// slots: room for a multiple of so many rows each, whose content is the caller's (comm/
  /// quantized_reduction.h).
  MainGradients(Arena& arena, std::vector<Parameter> parameters, const GradientConfig& config,
                ElementType model_type, int slots = 1);

  /// Sets all gradients and counters to zero: the start of a step.
  void zero(const Context&);
  /// += dy^T x.  dy [N, rows], x [N, columns].
  void add_weight_gradient(const Context&, std::size_t parameter, const Tensor& dy, const Tensor& x);
  /// += addend [rows, columns].
  void add(const Context&, std::size_t parameter, const Tensor& addend);
  /// += the rows of the tokens present.  tokens int32 [N], dout [N, columns].
  void add_embedding(const Context&, std::size_t parameter, const Tensor& tokens, const Tensor& dout);
  /// The gradient of a one-dimensional parameter, to be added to directly.
  Tensor vector(std::size_t parameter) const;

  /// Says that the backward pass under way has added all that it adds to `parameter`: calls the
  /// observer.
  void complete(const Context& context, std::size_t parameter) const {
    if (observer_) observer_(context, parameter);
  }
  using Observer = std::function<void(const Context&, std::size_t parameter)>;
  /// Is called until another one is given; {} for none.
  void observe(Observer observer) { observer_ = std::move(observer); }

  const QuantTensor& gradient(std::size_t parameter) const { return gradients_[parameter]; }
  /// With the rows that there is room for beyond its own.
  const QuantTensor& with_room(std::size_t parameter) const { return with_room_[parameter]; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  std::size_t bytes() const { return bytes_; }

  /// The counters of a parameter since zero(), int64 [kQuantCounters], to be added to.
  Tensor counters(std::size_t parameter) const;
  const Tensor& all_counters() const { return counters_; }  // int64 [parameters, kQuantCounters]
  /// Of all parameters.
  std::vector<QuantCounts> read_counts(const Context&) const;
  /// Parameters that counted anything since zero().
  std::vector<NamedCounts> read_counters(const Context&) const;

 private:
  std::vector<Parameter> parameters_;
  std::vector<QuantTensor> gradients_;
  std::vector<QuantTensor> with_room_;
  Observer observer_;
  Tensor counters_;  // int64 [parameters, kQuantCounters]
  std::size_t bytes_ = 0;
};

}  // namespace agoq

// AdamW (Loshchilov & Hutter, 2019) on main gradients of any format, with FP32 or block-wise 8-bit
// moments (Dettmers et al., 2022: dynamic map, block 256) and the master weights of MasterKind.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "backend/backend.h"
#include "gradients/gradient_reducer.h"
#include "gradients/parameter.h"

namespace agoq {

enum class ScheduleKind : std::uint8_t {
  kCosine,             // warm-up, then half a cosine down to final_fraction at the last step
  kLinear,             // warm-up, then a line
  kWarmupStableDecay,  // warm-up, constant, and a line over the last decay_steps
};

struct OptimizerConfig {
  double learning_rate = 3e-4;  // peak
  ScheduleKind schedule = ScheduleKind::kCosine;
  std::int64_t warmup_steps = 0;
  std::int64_t decay_steps = 0;  // of kWarmupStableDecay
  double final_fraction = 0.1;   // of the peak, at the last step
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;  // not for one-dimensional parameters
  double clip_norm = 1.0;     // global gradient norm; 0: no clipping
  bool moments_8bit = true;   // tensors under kSmallTensor elements stay FP32
  MasterKind master = MasterKind::kRemainder;

  bool operator==(const OptimizerConfig&) const = default;
};

/// Whole tensors with fewer elements keep FP32 moments, whatever the sharding.
inline constexpr std::int64_t kSmallTensor = 4096;

/// The learning rate of step 1..total_steps.
double learning_rate_at(const OptimizerConfig& config, std::int64_t step, std::int64_t total_steps);

/// Which rows of every parameter an optimizer updates: those of its rank's slot (own_rows), with one
/// rank all of them.
struct OptimizerShare {
  int rank = 0;
  int ranks = 1;
};

class AdamW {
 public:
  /// State of every parameter, of the rows of `share`: moments in `moments`, master weights in
  /// `masters`. An FP32 or FP64 model is its own master (MasterKind::kNone without rounding).
  AdamW(Arena& moments, Arena& masters, const std::vector<Parameter>& parameters,
        const OptimizerConfig& config, ElementType model_type, const OptimizerShare& share = {});

  /// Moments to zero, masters from FP32 initial values: sets `weight` and the master of `parameter`
  /// from `initial` (fp32 [rows, columns], backend memory).
  void initialise(const Context&, std::size_t parameter, const Tensor& initial, const Tensor& weight);

  /// Updates its rows of all weights. gradient_scale: 1 / valid tokens. Clips by the global norm, which
  /// it returns (before clipping, scaled). step counts from 1. Throws Error (kNotFinite), with all state
  /// as it was, when the norm is not finite or too large for the second moments. Calls
  /// updated(parameter) when the update of one is queued. Collective.
  double update(const Context&, const std::vector<Tensor>& weights, const GradientReducer& gradients,
                double learning_rate, double gradient_scale, std::int64_t step,
                const std::function<void(std::size_t)>& updated = {});

  /// The rows of a parameter that this object updates and holds state of.
  OwnRows rows(std::size_t parameter) const { return rows_[parameter]; }
  /// State for checkpoints: views of what update reads and writes, of those rows.
  const QuantTensor& first_moment(std::size_t parameter) const { return first_[parameter]; }
  const QuantTensor& second_moment(std::size_t parameter) const { return second_[parameter]; }
  const Tensor& master(std::size_t parameter) const { return masters_[parameter]; }
  MasterKind master_kind() const { return master_kind_; }
  std::size_t moment_bytes() const { return moment_bytes_; }
  std::size_t master_bytes() const { return master_bytes_; }

 private:
  OptimizerConfig config_;
  MasterKind master_kind_;
  std::vector<OwnRows> rows_;
  std::vector<QuantTensor> first_;
  std::vector<QuantTensor> second_;
  std::vector<Tensor> masters_;
  std::size_t moment_bytes_ = 0;
  std::size_t master_bytes_ = 0;
};

}  // namespace agoq

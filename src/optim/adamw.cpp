// The optimizer's state and the step over all parameters; the arithmetic is Backend::adamw_update.
#include "optim/adamw.h"

namespace agoq {
namespace {

constexpr QuantFormat kFirstMomentFormat{Code::kDynamic8, 256, ScaleType::kFp32, Rounding::kNearest};
constexpr QuantFormat kSecondMomentFormat{Code::kDynamic8Unsigned, 256, ScaleType::kFp32,
                                          Rounding::kNearest};

// A scaled gradient above this would square to an FP32 second moment of Inf.
constexpr double kLargestNorm = 1e19;

void check_config(const OptimizerConfig& config) {
  check_input(0 <= config.beta1 && config.beta1 < 1 && 0 <= config.beta2 && config.beta2 < 1,
              "optimizer.beta1 and beta2 are at least 0 and under 1; they are {} and {}", config.beta1,
              config.beta2);
  check_input(config.epsilon > 0,
              "optimizer.epsilon must be above 0, or a weight without gradient becomes 0 / 0; it is {}",
              config.epsilon);
  check_input(config.weight_decay >= 0, "optimizer.weight_decay must not be negative; it is {}",
              config.weight_decay);
  check_input(config.clip_norm >= 0, "optimizer.clip_norm is above 0, or 0 for no clipping; it is {}",
              config.clip_norm);
}

}  // namespace

AdamW::AdamW(Arena& moments, Arena& masters, const std::vector<Parameter>& parameters,
             const OptimizerConfig& config, ElementType model_type, const OptimizerShare& share)
    : config_(config),
      master_kind_(model_type == ElementType::kBf16 ? config.master : MasterKind::kNone) {
  check_config(config);
  check_input(model_type == ElementType::kBf16 || model_type == ElementType::kFp32 ||
                  model_type == ElementType::kFp64,
              "the optimizer updates bf16, fp32 or fp64 weights; the model's are {}",
              name_of(model_type));
  const QuantFormat exact = exact_format(statistics_type(model_type));
  for (const Parameter& parameter : parameters) {
    const bool quantised = config.moments_8bit && parameter.count() >= kSmallTensor;
    const QuantFormat first_format = quantised ? kFirstMomentFormat : exact;
    const QuantFormat second_format = quantised ? kSecondMomentFormat : exact;
    const OwnRows rows = own_rows(parameter.rows, share.ranks, share.rank);
    BlockGrid grid = parameter.grid();
    grid.rows = rows.last - rows.first;
    rows_.push_back(rows);
    first_.push_back(take(moments, first_format, grid));
    second_.push_back(take(moments, second_format, grid));
    // Rounding is keyed by the element of the whole tensor.
    first_.back().first_row = second_.back().first_row = rows.first;
    moment_bytes_ += storage_bytes(first_format, grid) + storage_bytes(second_format, grid);
    Tensor master;
    if (master_kind_ != MasterKind::kNone) {
      const ElementType type =
          master_kind_ == MasterKind::kFp32 ? ElementType::kFp32 : ElementType::kInt16;
      master = masters.take(type, Shape{grid.rows, parameter.columns});
      master_bytes_ += master.bytes();
    }
    masters_.push_back(master);
  }
}

void AdamW::initialise(const Context& context, std::size_t parameter, const Tensor& initial,
                       const Tensor& weight) {
  check(initial.type == ElementType::kFp32 && initial.shape == weight.shape &&
            initial.shape.rank() == 2 && initial.width() == first_.at(parameter).width() &&
            rows_[parameter].last <= initial.rows(),
        "initial values of parameter {} must be fp32 rows of {}, as many as the weight has; they are {} "
        "{} "
        "for a weight {}",
        parameter, first_.at(parameter).width(), name_of(initial.type), initial.shape.to_string(),
        weight.shape.to_string());
  const OwnRows rows = rows_[parameter];
  const auto set = [&](std::int64_t first, std::int64_t last, MasterKind kind, const Tensor& master) {
    if (first == last) return;
    context.backend.initialise_weight(context, initial.slice_rows(first, last), kind,
                                      weight.slice_rows(first, last), master);
  };
  // Weights start from the same values under every kind of master: rows of other ranks need none.
  set(0, rows.first, MasterKind::kNone, {});
  set(rows.last, initial.rows(), MasterKind::kNone, {});
  set(rows.first, rows.last, master_kind_, masters_[parameter]);
  if (rows.first == rows.last) return;
  zero_planes(context, first_[parameter]);
  zero_planes(context, second_[parameter]);
}

double AdamW::update(const Context& context, const std::vector<Tensor>& weights,
                     const GradientReducer& gradients, double learning_rate, double gradient_scale,
                     std::int64_t step, const std::function<void(std::size_t)>& updated) {
  const std::vector<Parameter>& parameters = gradients.parameters();
  check(weights.size() == first_.size() && parameters.size() == first_.size(),
        "the optimizer holds state for {} parameters; it was given {} weights and {} gradients",
        first_.size(), weights.size(), parameters.size());
  check(step >= 1, "optimizer steps count from 1; step {} was asked for", step);

  const double norm = gradients.norm(context, gradient_scale);
  const bool clip = config_.clip_norm > 0 && norm > config_.clip_norm;
  const double clip_factor = clip ? config_.clip_norm / norm : 1.0;
  check_finite(
      norm * clip_factor <= kLargestNorm,
      "the gradient norm must be at most {} for its square to fit the second moment; it is {}: set "
      "optimizer.clip_norm or lower the learning rate",
      kLargestNorm, norm);

  AdamwStep scalars;
  scalars.master = master_kind_;
  scalars.learning_rate = learning_rate;
  scalars.beta1 = config_.beta1;
  scalars.beta2 = config_.beta2;
  scalars.epsilon = config_.epsilon;
  scalars.gradient_scale = gradient_scale * clip_factor;
  scalars.step = step;
  for (std::size_t parameter = 0; parameter < first_.size(); ++parameter) {
    scalars.weight_decay = parameters[parameter].is_vector() ? 0.0 : config_.weight_decay;
    // The update belongs to the step, whichever micro-batch the context saw last.
    RandomKey key =
        context.random.with(RandomPurpose::kWeightRounding, static_cast<std::uint32_t>(parameter));
    key.step = static_cast<std::uint32_t>(step);
    key.micro_batch = 0;
    const OwnRows rows = rows_[parameter];
    if (rows.first < rows.last) {
      context.backend.adamw_update_pieces(context, gradients.pieces(parameter),
                                          {weights[parameter].slice_rows(rows.first, rows.last),
                                           masters_[parameter],
                                           {},
                                           first_[parameter],
                                           second_[parameter]},
                                          scalars, key);
    }
    if (updated) updated(parameter);
  }
  return norm;
}

}  // namespace agoq

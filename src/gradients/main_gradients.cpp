// Storage of the main gradients and the operations on them; the arithmetic is the backend's:
//
//   gradient = Q(Q^-1(gradient) + addend)        accumulate, accumulate_weight_gradient,
//   embedding_backward norm     = scale * sqrt(sum over parameters of sum of squares of Q^-1(gradient))
//
// Rounding is keyed by step and micro-batch (from the context) and the parameter's index, which is the
// same for every parallel layout.
#include "gradients/main_gradients.h"

#include <cmath>
#include <utility>

namespace agoq {
namespace {

std::int64_t as_row(std::size_t parameter) { return static_cast<std::int64_t>(parameter); }

RandomKey rounding_key(const Context& context, std::size_t parameter) {
  return context.random.with(RandomPurpose::kGradientRounding, static_cast<std::uint32_t>(parameter));
}

}  // namespace

MainGradients::MainGradients(Arena& arena, std::vector<Parameter> parameters,
                             const GradientConfig& config, ElementType model_type)
    : parameters_(std::move(parameters)) {
  gradients_.reserve(parameters_.size());
  for (const Parameter& parameter : parameters_) {
    const QuantFormat format =
        parameter.is_vector() ? exact_format(statistics_type(model_type)) : config.format;
    gradients_.push_back(take(arena, format, parameter.grid()));
    bytes_ += storage_bytes(format, parameter.grid());
  }
  counters_ = arena.take(ElementType::kInt64, Shape{as_row(parameters_.size()), kQuantCounters});
  sums_ = arena.take(ElementType::kFp64, Shape{as_row(parameters_.size()), 1});
}

void MainGradients::zero(const Context& context) {
  for (const QuantTensor& gradient : gradients_) zero_planes(context, gradient);
  context.backend.zero(context, counters_.data, counters_.bytes());
}

void MainGradients::add_weight_gradient(const Context& context, std::size_t parameter, const Tensor& dy,
                                        const Tensor& x) {
  context.backend.accumulate_weight_gradient(
      context, dy, x, gradients_.at(parameter), rounding_key(context, parameter),
      counters_.slice_rows(as_row(parameter), as_row(parameter) + 1));
}

void MainGradients::add(const Context& context, std::size_t parameter, const Tensor& addend) {
  context.backend.accumulate(context, addend, gradients_.at(parameter), rounding_key(context, parameter),
                             counters_.slice_rows(as_row(parameter), as_row(parameter) + 1));
}

void MainGradients::add_embedding(const Context& context, std::size_t parameter, const Tensor& tokens,
                                  const Tensor& dout) {
  context.backend.embedding_backward(context, tokens, dout, gradients_.at(parameter),
                                     rounding_key(context, parameter),
                                     counters_.slice_rows(as_row(parameter), as_row(parameter) + 1));
}

Tensor MainGradients::vector(std::size_t parameter) const {
  check(parameters_.at(parameter).is_vector(),
        "the gradient of '{}' was asked for as a vector, but it has {} rows: add to it with add() or "
        "add_weight_gradient()",
        parameters_[parameter].name, parameters_[parameter].rows);
  return gradients_[parameter].exact().reshaped(Shape{parameters_[parameter].columns});
}

double MainGradients::norm(const Context& context, double scale) const {
  for (std::size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    context.backend.sum_of_squares(
        context, gradients_[parameter],
        sums_.slice_rows(as_row(parameter), as_row(parameter) + 1).reshaped(Shape{1}));
  }
  if (context.workspace.is_measuring()) return 0.0;

  std::vector<double> sums(parameters_.size());
  context.backend.read(context, sums_.data, sums.data(), sums_.bytes());
  // A quantised format stores NaN as zero and Inf as its largest value: there only the counter tells.
  // From the last parameter, whose gradient backward computes first: those before it may have it from
  // there.
  const std::vector<QuantCounts> counts = read_counts(context, counters_);
  for (std::size_t parameter = parameters_.size(); parameter-- > 0;) {
    check_finite(
        counts[parameter].non_finite == 0,
        "the gradient of '{}' must be finite, but {} NaN or Inf elements were added to it: look "
        "for the overflow in that layer's activations, or lower the learning rate",
        parameters_[parameter].name, counts[parameter].non_finite);
    check_finite(std::isfinite(sums[parameter]),
                 "the gradient of '{}' must be finite, but its sum of squares is {}: look for the "
                 "overflow in that layer's activations, or lower the learning rate",
                 parameters_[parameter].name, sums[parameter]);
  }
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return std::sqrt(total) * scale;
}

std::vector<NamedCounts> MainGradients::read_counters(const Context& context) const {
  const std::vector<QuantCounts> counts = read_counts(context, counters_);
  std::vector<NamedCounts> counted;
  for (std::size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    if (counts[parameter].any()) counted.push_back({parameters_[parameter].name, counts[parameter]});
  }
  return counted;
}

}  // namespace agoq

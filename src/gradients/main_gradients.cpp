// Storage of the main gradients and the operations on them; the arithmetic is the backend's:
//
//   gradient = Q(Q^-1(gradient) + addend)   accumulate, accumulate_weight_gradient, embedding_backward
//
// Rounding is keyed by step and micro-batch (from the context) and the parameter's index, which is the
// same for every parallel layout.
#include "gradients/main_gradients.h"

#include <utility>

namespace agoq {
namespace {

std::int64_t as_row(std::size_t parameter) { return static_cast<std::int64_t>(parameter); }

RandomKey rounding_key(const Context& context, std::size_t parameter) {
  return context.random.with(RandomPurpose::kGradientRounding, static_cast<std::uint32_t>(parameter));
}

}  // namespace

MainGradients::MainGradients(Arena& arena, std::vector<Parameter> parameters,
                             const GradientConfig& config, ElementType model_type, int slots)
    : parameters_(std::move(parameters)) {
  gradients_.reserve(parameters_.size());
  for (const Parameter& parameter : parameters_) {
    const QuantFormat format =
        parameter.is_vector() ? exact_format(statistics_type(model_type)) : config.format;
    BlockGrid roomy = parameter.grid();
    roomy.rows = (roomy.rows + slots - 1) / slots * slots;
    with_room_.push_back(take(arena, format, roomy));
    gradients_.push_back(with_room_.back().slice_rows(0, parameter.rows));
    bytes_ += storage_bytes(format, roomy);
  }
  counters_ = arena.take(ElementType::kInt64, Shape{as_row(parameters_.size()), kQuantCounters});
}

void MainGradients::zero(const Context& context) {
  for (const QuantTensor& gradient : gradients_) zero_planes(context, gradient);
  context.backend.zero(context, counters_.data, counters_.bytes());
}

void MainGradients::add_weight_gradient(const Context& context, std::size_t parameter, const Tensor& dy,
                                        const Tensor& x) {
  context.backend.accumulate_weight_gradient(context, dy, x, gradients_.at(parameter),
                                             rounding_key(context, parameter), counters(parameter));
}

void MainGradients::add(const Context& context, std::size_t parameter, const Tensor& addend) {
  context.backend.accumulate(context, addend, gradients_.at(parameter), rounding_key(context, parameter),
                             counters(parameter));
}

void MainGradients::add_embedding(const Context& context, std::size_t parameter, const Tensor& tokens,
                                  const Tensor& dout) {
  context.backend.embedding_backward(context, tokens, dout, gradients_.at(parameter),
                                     rounding_key(context, parameter), counters(parameter));
}

Tensor MainGradients::vector(std::size_t parameter) const {
  check(parameters_.at(parameter).is_vector(),
        "the gradient of '{}' was asked for as a vector, but it has {} rows: add to it with add() or "
        "add_weight_gradient()",
        parameters_[parameter].name, parameters_[parameter].rows);
  return gradients_[parameter].exact().reshaped(Shape{parameters_[parameter].columns});
}

Tensor MainGradients::counters(std::size_t parameter) const {
  return counters_.slice_rows(as_row(parameter), as_row(parameter) + 1);
}

std::vector<QuantCounts> MainGradients::read_counts(const Context& context) const {
  return agoq::read_counts(context, counters_);
}

std::vector<NamedCounts> MainGradients::read_counters(const Context& context) const {
  const std::vector<QuantCounts> counts = read_counts(context);
  std::vector<NamedCounts> counted;
  for (std::size_t parameter = 0; parameter < parameters_.size(); ++parameter) {
    if (counts[parameter].any()) counted.push_back({parameters_[parameter].name, counts[parameter]});
  }
  return counted;
}

}  // namespace agoq

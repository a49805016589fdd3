// The default bodies of fused operations: the composition of plain ones that specifies them.
#include "backend/backend.h"

#include "core/error.h"

namespace agoq {

void zero_planes(const Context& context, const QuantTensor& tensor) {
  const RowBytes bytes = row_bytes(tensor.format, tensor.grid);
  const auto zero_plane = [&](std::byte* plane, std::int64_t plane_row_bytes) {
    if (plane_row_bytes == 0) return;
    context.backend.zero(context, plane, static_cast<std::size_t>(plane_row_bytes * tensor.rows()));
  };
  zero_plane(tensor.codes, bytes.codes);
  zero_plane(tensor.bits, bytes.bits);
  zero_plane(tensor.scales, bytes.scales);
  zero_plane(tensor.super, bytes.super);
}

Tensor Backend::materialise(const Context& context, const QuantTensor& saved, ElementType type) {
  if (saved.format.is_exact() && element_type_of(saved.format) == type) return saved.exact();
  const Tensor tensor = context.workspace.take(type, Shape{saved.rows(), saved.width()});
  dequantize(context, saved, tensor);
  return tensor;
}

std::vector<QuantCounts> read_counts(const Context& context, const Tensor& counters) {
  check(counters.type == ElementType::kInt64 && counters.width() == kQuantCounters,
        "read_counts: a table of counters is int64 [rows, {}]; {} {} was given", kQuantCounters,
        name_of(counters.type), counters.shape.to_string());
  std::vector<std::int64_t> values(static_cast<std::size_t>(counters.count()));
  context.backend.read(context, counters.data, values.data(), counters.bytes());
  std::vector<QuantCounts> rows;
  for (std::size_t first = 0; first < values.size(); first += kQuantCounters) {
    const auto value = [&](QuantCounter counter) {
      return values[first + static_cast<std::size_t>(counter)];
    };
    rows.push_back({value(QuantCounter::kNonFinite), value(QuantCounter::kSaturated),
                    value(QuantCounter::kFlushedBlocks)});
  }
  return rows;
}

void Backend::residual_norm_forward(const Context& context, NormKind kind, const Tensor& x,
                                    const Tensor& delta, const Tensor& weight, double epsilon,
                                    const Tensor& y, const Tensor& rstd, const QuantTensor& saved,
                                    const RandomKey& key, const Tensor& counters) {
  if (delta) add(context, x, delta, x);
  if (saved) quantize(context, x, saved, key, counters);
  norm_forward(context, kind, x, weight, epsilon, y, rstd);
}

void Backend::norm_forward_saved(const Context& context, NormKind kind, const QuantTensor& x,
                                 const Tensor& weight, double epsilon, const Tensor& y) {
  const Arena::Scope scope(context.workspace);
  norm_forward(context, kind, materialise(context, x, y.type), weight, epsilon, y, {});
}

void Backend::norm_backward_saved(const Context& context, NormKind kind, const Tensor& dy,
                                  const QuantTensor& x, const Tensor& weight, double epsilon,
                                  const Tensor& rstd, const Tensor& dx, const Tensor& dweight) {
  const Arena::Scope scope(context.workspace);
  norm_backward(context, kind, dy, materialise(context, x, dy.type), weight, epsilon, rstd, dx, dweight);
}

void Backend::swiglu_forward_save(const Context& context, const Tensor& gate_up, const Tensor& hidden,
                                  const QuantTensor& saved, const RandomKey& key,
                                  const Tensor& counters) {
  if (saved) quantize(context, gate_up, saved, key, counters);
  swiglu_forward(context, gate_up, hidden);
}

void Backend::swiglu_backward_saved(const Context& context, const Tensor& dhidden,
                                    const QuantTensor& gate_up, const Tensor& dgate_up,
                                    const Tensor& hidden) {
  const Arena::Scope scope(context.workspace);
  swiglu_backward(context, dhidden, materialise(context, gate_up, dhidden.type), dgate_up, hidden);
}

void Backend::accumulate_weight_gradient(const Context& context, const Tensor& dy, const Tensor& x,
                                         const QuantTensor& main, const RandomKey& key,
                                         const Tensor& counters) {
  const ElementType compute = statistics_type(dy.type);
  if (main.format.is_exact() && element_type_of(main.format) == compute) {
    matmul(context, dy, Transpose::kYes, x, Transpose::kNo, main.exact(), true);
    return;
  }
  const Arena::Scope scope(context.workspace);
  const Tensor product = context.workspace.take(compute, Shape{main.rows(), main.width()});
  matmul(context, dy, Transpose::kYes, x, Transpose::kNo, product, false);
  accumulate(context, product, main, key, counters);
}

}  // namespace agoq

// The default bodies of fused operations: the composition of plain ones that specifies them.
#include "backend/backend.h"

#include <algorithm>

#include "backend/operand_checks.h"
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

namespace {

// Rows of an FP32 sum of pieces that exist at a time in the default bodies: about so many elements.
constexpr std::int64_t kSumElements = std::int64_t{1} << 22;

ElementType type_of_sum(const QuantTensor& piece) {
  return piece.format.code == Code::kFp64 ? ElementType::kFp64 : ElementType::kFp32;
}

/// Calls use(first, last, sum of rows [first, last)) for all rows of the pieces, some at a time.
template <typename Use>
void for_each_sum(const Context& context, std::span<const QuantTensor> pieces, std::int64_t rows_at_once,
                  Use use) {
  const std::int64_t rows = pieces.front().rows();
  const std::int64_t width = pieces.front().width();
  const ElementType type = type_of_sum(pieces.front());
  const Arena::Scope scope(context.workspace);
  const Tensor sum_memory = context.workspace.take(type, Shape{rows_at_once, width});
  const Tensor addend_memory = context.workspace.take(type, Shape{rows_at_once, width});
  for (std::int64_t first = 0; first < rows; first += rows_at_once) {
    const std::int64_t last = std::min(first + rows_at_once, rows);
    const Tensor sum = sum_memory.slice_rows(0, last - first);
    const Tensor addend = addend_memory.slice_rows(0, last - first);
    context.backend.dequantize(context, pieces.front().slice_rows(first, last), sum);
    for (const QuantTensor& piece : pieces.subspan(1)) {
      context.backend.dequantize(context, piece.slice_rows(first, last), addend);
      context.backend.add(context, sum, addend, sum);
    }
    use(first, last, sum);
  }
}

std::int64_t rows_of_a_sum(const QuantTensor& piece) {
  return std::clamp<std::int64_t>(kSumElements / std::max<std::int64_t>(piece.width(), 1), 1,
                                  std::max<std::int64_t>(piece.rows(), 1));
}

}  // namespace

void Backend::add_pieces(const Context& context, std::span<const QuantTensor> pieces,
                         const QuantTensor& sum, const RandomKey& key, const Tensor& counters,
                         const Tensor& row_numbers) {
  expect_pieces("add_pieces", pieces, sum.grid);
  expect_row_numbers(sum, row_numbers);
  std::vector<std::int32_t> numbers;
  if (row_numbers && sum.format.rounding == Rounding::kStochastic) {
    numbers.resize(static_cast<std::size_t>(sum.rows()));
    read(context, row_numbers.data, numbers.data(), row_numbers.bytes());
  }
  for_each_sum(context, pieces, rows_of_a_sum(sum),
               [&](std::int64_t first, std::int64_t last, const Tensor& values) {
                 if (numbers.empty()) {
                   quantize(context, values, sum.slice_rows(first, last), key, counters);
                   return;
                 }
                 for (std::int64_t row = first; row < last; ++row) {
                   QuantTensor of_row = sum.slice_rows(row, row + 1);
                   of_row.first_row = numbers[static_cast<std::size_t>(row)];
                   quantize(context, values.slice_rows(row - first, row - first + 1), of_row, key,
                            counters);
                 }
               });
}

void Backend::adamw_update_pieces(const Context& context, std::span<const QuantTensor> gradients,
                                  const AdamwTensors& tensors, const AdamwStep& step,
                                  const RandomKey& key) {
  expect_pieces("adamw_update_pieces", gradients, tensors.first_moment.grid);
  const QuantTensor& shape = gradients.front();
  if (gradients.size() == 1) {
    AdamwTensors of_one = tensors;
    of_one.gradient = shape;
    return adamw_update(context, of_one, step, key);
  }
  const Tensor weight = tensors.weight.reshaped(Shape{shape.rows(), shape.width()});
  const Tensor master =
      tensors.master ? tensors.master.reshaped(Shape{shape.rows(), shape.width()}) : Tensor{};
  for_each_sum(context, gradients, rows_of_a_sum(shape),
               [&](std::int64_t first, std::int64_t last, const Tensor& values) {
                 QuantTensor gradient = as_quant_tensor(values);
                 gradient.grid.segments = shape.grid.segments;
                 adamw_update(
                     context,
                     {weight.slice_rows(first, last), master ? master.slice_rows(first, last) : Tensor{},
                      gradient, tensors.first_moment.slice_rows(first, last),
                      tensors.second_moment.slice_rows(first, last)},
                     step, key);
               });
}

}  // namespace agoq

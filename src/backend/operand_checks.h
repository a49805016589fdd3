// Checks of operands that every backend makes alike: a mismatch throws Error naming the operation.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "backend/backend.h"
#include "core/error.h"
#include "core/tensor.h"
#include "quant/quant_counters.h"
#include "quant/quant_tensor.h"

namespace agoq {

/// Throws unless `tensor` is given and is `type` [rows(), width()] = [rows, width].
inline void expect(std::string_view operation, std::string_view name, const Tensor& tensor,
                   ElementType type, std::int64_t rows, std::int64_t width) {
  check(static_cast<bool>(tensor), "{}: {} ({} [{}, {}]) is required and was not given", operation, name,
        name_of(type), rows, width);
  check(tensor.type == type && tensor.width() == width && tensor.count() == rows * width,
        "{}: {} must be {} [{}, {}] and is {} {}", operation, name, name_of(type), rows, width,
        name_of(tensor.type), tensor.shape.to_string());
}

/// The same for a tensor of which only the number of elements matters: one value per row or column.
inline void expect(std::string_view operation, std::string_view name, const Tensor& tensor,
                   ElementType type, std::int64_t count) {
  check(static_cast<bool>(tensor), "{}: {} ({} [{}]) is required and was not given", operation, name,
        name_of(type), count);
  check(tensor.type == type && tensor.count() == count, "{}: {} must be {} [{}] and is {} {}", operation,
        name, name_of(type), count, name_of(tensor.type), tensor.shape.to_string());
}

/// Throws unless `tensor` has the rows and the width of `quantised`.
inline void expect_same_shape(std::string_view operation, const Tensor& tensor,
                              const QuantTensor& quantised) {
  check(tensor.rows() == quantised.rows() && tensor.width() == quantised.width(),
        "{}: a tensor of shape {} was given for a quantised one of [{}, {}]", operation,
        tensor.shape.to_string(), quantised.rows(), quantised.width());
}

/// Throws unless `counters` is not given or int64 [kQuantCounters].
inline void expect_counters(std::string_view operation, const Tensor& counters) {
  check(!counters || (counters.type == ElementType::kInt64 && counters.count() == kQuantCounters),
        "{}: counters are int64 [{}]; {} {} was given", operation, kQuantCounters,
        name_of(counters.type), counters.shape.to_string());
}

/// Throws unless there is a piece and all have one format and one grid.
inline void expect_pieces(std::string_view operation, std::span<const QuantTensor> pieces) {
  check(!pieces.empty(), "{}: at least one piece was expected; none was given", operation);
  const QuantTensor& first = pieces.front();
  for (const QuantTensor& piece : pieces) {
    check(piece.grid == first.grid && piece.format == first.format,
          "{}: pieces of one format and one grid were expected; the first is {} [{}, {}], one is {} "
          "[{}, {}]",
          operation, first.format.to_string(), first.rows(), first.width(), piece.format.to_string(),
          piece.rows(), piece.width());
  }
}

/// Throws unless they do and `sum` has the same grid.
inline void expect_pieces(std::string_view operation, std::span<const QuantTensor> pieces,
                          const BlockGrid& sum) {
  expect_pieces(operation, pieces);
  check(pieces.front().grid == sum, "{}: pieces of [{}, {}] were given for [{}, {}]", operation,
        pieces.front().rows(), pieces.front().width(), sum.rows, sum.row_length);
}

/// Throws unless row_numbers is not given or int32, one for every row of `sum`.
inline void expect_row_numbers(const QuantTensor& sum, const Tensor& row_numbers) {
  if (row_numbers) {
    expect("add_pieces", "row_numbers", row_numbers, ElementType::kInt32, sum.rows());
  }
}

/// Throws unless rows of `whole`, which `rows` numbers, and those of `some` are alike.
inline void expect_rows_of(std::string_view operation, const QuantTensor& whole, const Tensor& rows,
                           const QuantTensor& some) {
  check(whole.format == some.format && whole.width() == some.width() &&
            whole.grid.segments == some.grid.segments,
        "{}: rows of one format and length were expected; {} [{}, {}] and {} [{}, {}] were given",
        operation, whole.format.to_string(), whole.rows(), whole.width(), some.format.to_string(),
        some.rows(), some.width());
  expect(operation, "rows", rows, ElementType::kInt32, some.rows());
}

/// The same for pieces and a sum of e4m3 under fp32 scales.
inline void expect_naive_pieces(std::span<const QuantTensor> pieces, const QuantTensor& sum) {
  expect_pieces("add_pieces_naively", pieces, sum.grid);
  for (const QuantFormat& format : {pieces.front().format, sum.format}) {
    check(format.code == Code::kE4m3 && format.scale == ScaleType::kFp32,
          "add_pieces_naively: e4m3 under fp32 scales was expected; {} was given", format.to_string());
  }
}

/// Throws unless `totals` has room for `count` sums in double precision.
inline void check_totals(std::string_view operation, const Tensor& totals, std::size_t count) {
  check(totals.type == ElementType::kFp64 && totals.count() == static_cast<std::int64_t>(count),
        "{}: totals are {} fp64 elements; {} {} was given", operation, count, name_of(totals.type),
        totals.shape.to_string());
}
inline Tensor total_of(const Tensor& totals, std::size_t index) {
  const auto row = static_cast<std::int64_t>(index);
  return totals.reshaped(Shape{totals.count(), 1}).slice_rows(row, row + 1).reshaped(Shape{1});
}

/// Throws unless RMSNorm is given a weight of one value per column and LayerNorm none.
inline void expect_norm_weight(std::string_view operation, NormKind kind, const Tensor& weight,
                               ElementType type, std::int64_t width) {
  check(width > 0, "{}: rows have no elements", operation);
  if (kind == NormKind::kRmsNorm) {
    expect(operation, "weight", weight, type, width);
  } else {
    check(!weight, "{}: LayerNorm has no parameters here, and a weight was given: leave it out",
          operation);
  }
}

/// The same for the weight's gradient.
inline void expect_norm_weight_gradient(std::string_view operation, NormKind kind, const Tensor& dweight,
                                        ElementType type, std::int64_t width) {
  if (kind == NormKind::kRmsNorm) {
    expect(operation, "dweight", dweight, type, width);
  } else {
    check(!dweight, "{}: LayerNorm has no parameters here, and dweight was given: leave it out",
          operation);
  }
}

/// Throws unless gate_up is [N, 2I] for a `hidden` (or its gradient, by its name) of [N, I]. Returns I.
inline std::int64_t expect_gate_up(std::string_view operation, const Tensor& gate_up,
                                   const Tensor& hidden, std::string_view name) {
  const std::int64_t width = hidden.width();
  expect(operation, "gate_up", gate_up, gate_up.type, gate_up.rows(), 2 * width);
  expect(operation, name, hidden, gate_up.type, gate_up.rows(), width);
  return width;
}

}  // namespace agoq

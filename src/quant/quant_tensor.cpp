#include "quant/quant_tensor.h"

#include "core/error.h"

namespace agoq {
namespace {

constexpr std::int64_t ceil_divide(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int64_t bytes_per_scale(ScaleType scale) {
  switch (scale) {
    case ScaleType::kNone: return 0;
    case ScaleType::kFp32: return 4;
    case ScaleType::kBf16: return 2;
    case ScaleType::kTwoLevel: return 1;
  }
  return 0;
}

std::size_t aligned(std::int64_t bytes) {
  return static_cast<std::size_t>(ceil_divide(bytes, kPlaneAlignment)) * kPlaneAlignment;
}

}  // namespace

RowBytes row_bytes(const QuantFormat& format, const BlockGrid& grid) {
  check(grid.segments > 0 && grid.row_length % grid.segments == 0,
        "a row of {} elements cannot be divided into {} equal segments: choose a divisor",
        grid.row_length, grid.segments);
  RowBytes bytes;
  const CodeTraits& traits = traits_of(format.code);
  if (traits.exact) {
    bytes.codes = grid.row_length * traits.bits / 8;
    return bytes;
  }
  // Called for every row that is encoded or decoded: no text is made unless it is needed.
  if (format.block <= 0 || format.scale == ScaleType::kNone) {
    fail("the quantised format {} needs a block size and a scale type", format.to_string());
  }
  const std::int64_t length = grid.segment_length();
  if (traits.bits == 8) {
    bytes.codes = grid.row_length;
  } else {
    bytes.codes = grid.segments * ceil_divide(length, 2);
    bytes.bits = grid.segments * ceil_divide(length, 8) * (traits.bits - 4);
  }
  bytes.scales = grid.segments * ceil_divide(length, format.block) * bytes_per_scale(format.scale);
  if (format.scale == ScaleType::kTwoLevel) {
    bytes.super = grid.segments * ceil_divide(length, kSuperBlock) * 2;
  }
  return bytes;
}

std::int64_t payload_bytes(const QuantFormat& format, const BlockGrid& grid) {
  return grid.rows * row_bytes(format, grid).total();
}

std::size_t storage_bytes(const QuantFormat& format, const BlockGrid& grid) {
  const RowBytes row = row_bytes(format, grid);
  return aligned(grid.rows * row.codes) + aligned(grid.rows * row.bits) +
         aligned(grid.rows * row.scales) + aligned(grid.rows * row.super);
}

QuantTensor place(const QuantFormat& format, const BlockGrid& grid, std::byte* memory) {
  const RowBytes row = row_bytes(format, grid);
  QuantTensor tensor;
  tensor.format = format;
  tensor.grid = grid;
  tensor.codes = memory;
  tensor.bits = tensor.codes + aligned(grid.rows * row.codes);
  tensor.scales = tensor.bits + aligned(grid.rows * row.bits);
  tensor.super = tensor.scales + aligned(grid.rows * row.scales);
  return tensor;
}

QuantTensor take(Arena& arena, const QuantFormat& format, const BlockGrid& grid) {
  return place(format, grid, arena.take(storage_bytes(format, grid)));
}

QuantTensor QuantTensor::slice_rows(std::int64_t begin, std::int64_t end) const {
  check(0 <= begin && begin <= end && end <= grid.rows,
        "rows [{}, {}) of a quantised tensor with {} rows", begin, end, grid.rows);
  const RowBytes row = row_bytes(format, grid);
  QuantTensor slice = *this;
  slice.grid.rows = end - begin;
  slice.codes += begin * row.codes;
  slice.bits += begin * row.bits;
  slice.scales += begin * row.scales;
  slice.super += begin * row.super;
  slice.first_row += begin;
  return slice;
}

Tensor QuantTensor::exact() const {
  return {codes, element_type_of(format), Shape{grid.rows, grid.row_length}};
}

QuantTensor as_quant_tensor(const Tensor& tensor) {
  return place(exact_format(tensor.type), {tensor.rows(), tensor.width(), 1}, tensor.data);
}

}  // namespace agoq

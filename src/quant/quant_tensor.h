// QuantTensor: a view of a tensor in any QuantFormat.
//
// Layout. The tensor is [rows, row_length]. A row is divided into `segments` equal segments
// (row_length / segments elements; tensor parallelism may cut a row only between segments), a
// segment into blocks from its start, the last one short. Blocks and super-blocks restart at each
// segment, so the codes do not depend on the parallel layout. Four planes, each [rows, bytes]:
//   codes   4-bit and 8-bit codes (element 2i in the low half of byte i); exact elements as they are
//   bits    one plane per bit beyond the fourth for 5- and 6-bit codes: [rows, extra bits, bytes]
//   scales  one scale per block: FP32, BF16, or E4M3 under two-level scales
//   super   one BF16 scale per super-block (two-level formats only)
// Every segment starts on a byte in the codes and bits planes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/memory.h"
#include "core/tensor.h"
#include "quant/format.h"

namespace agoq {

/// The block grid of a tensor: it belongs to the tensor, not to its shard.
struct BlockGrid {
  std::int64_t rows = 0;
  std::int64_t row_length = 0;  // elements; a multiple of `segments`
  std::int64_t segments = 1;

  bool operator==(const BlockGrid&) const = default;
  std::int64_t count() const { return rows * row_length; }
  std::int64_t segment_length() const { return row_length / segments; }
};

/// Bytes per row of each plane of `format` over `grid`.
struct RowBytes {
  std::int64_t codes = 0;
  std::int64_t bits = 0;  // all extra bit planes together
  std::int64_t scales = 0;
  std::int64_t super = 0;
  std::int64_t total() const { return codes + bits + scales + super; }
};
RowBytes row_bytes(const QuantFormat& format, const BlockGrid& grid);

/// Bytes of codes and scales, without alignment between planes: what a report counts per token.
std::int64_t payload_bytes(const QuantFormat& format, const BlockGrid& grid);

struct QuantTensor {
  QuantFormat format;
  BlockGrid grid;
  std::byte* codes = nullptr;
  std::byte* bits = nullptr;
  std::byte* scales = nullptr;
  std::byte* super = nullptr;
  /// Where row 0 stands in the whole tensor that this is a slice of: stochastic rounding is keyed by the
  /// element of the whole tensor, so that slicing does not change it.
  std::int64_t first_row = 0;

  /// False for a default-constructed QuantTensor, which stands for "not given" in operations.
  explicit operator bool() const { return codes != nullptr; }
  std::int64_t rows() const { return grid.rows; }
  std::int64_t width() const { return grid.row_length; }
  /// Rows [begin, end) with the same formats and grid.
  QuantTensor slice_rows(std::int64_t begin, std::int64_t end) const;
  /// The elements of an exact format as a Tensor [rows, row_length]; throws for any other.
  Tensor exact() const;
};

/// Bytes a QuantTensor takes in memory: its planes, each rounded up to kPlaneAlignment.
inline constexpr std::size_t kPlaneAlignment = 16;
std::size_t storage_bytes(const QuantFormat& format, const BlockGrid& grid);

/// Lays a QuantTensor's planes into `memory` (storage_bytes, aligned to kPlaneAlignment).
QuantTensor place(const QuantFormat& format, const BlockGrid& grid, std::byte* memory);

/// Takes a QuantTensor from an arena; its content is uninitialised.
QuantTensor take(Arena& arena, const QuantFormat& format, const BlockGrid& grid);

/// An exact tensor seen as a QuantTensor [rows(), width()].
QuantTensor as_quant_tensor(const Tensor& tensor);

}  // namespace agoq

// RowUnion: the rows of a table that the tokens of any rank name in a step.
//
// Every rank marks the rows of its own tokens in a bitmap, one bit per row; the bitmaps of all ranks are
// gathered and joined. The union has the same rows, in the same order, on every rank.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.h"

namespace agoq {

class RowUnion {
 public:
  /// Of a table of `rows` rows, over the ranks of a group of `size`.
  RowUnion(std::int64_t rows, int size);

  /// Unmarks all rows.
  void clear();
  /// Marks these rows; what is no row of the table is passed over, as it is where gradients are added.
  void mark(std::span<const std::int32_t> rows);
  /// The rows that any rank has marked, ascending; valid until the next call. Collective.
  const std::vector<std::int32_t>& join(Communicator& ranks);

 private:
  std::int64_t rows_;
  // Kept from call to call: nothing is allocated inside a step.
  std::vector<std::uint64_t> own_, of_ranks_;
  std::vector<std::int32_t> joined_;
};

}  // namespace agoq

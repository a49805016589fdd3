#include "gradients/row_union.h"

#include <algorithm>
#include <bit>

namespace agoq {
namespace {

constexpr std::int64_t kWordBits = 64;

}  // namespace

RowUnion::RowUnion(std::int64_t rows, int size)
    : rows_(rows),
      own_(static_cast<std::size_t>((rows + kWordBits - 1) / kWordBits)),
      of_ranks_(own_.size() * static_cast<std::size_t>(size)) {
  joined_.reserve(static_cast<std::size_t>(rows));
}

void RowUnion::clear() { std::fill(own_.begin(), own_.end(), 0); }

void RowUnion::mark(std::span<const std::int32_t> rows) {
  for (const std::int32_t row : rows) {
    if (row < 0 || row >= rows_) continue;
    own_[static_cast<std::size_t>(row / kWordBits)] |= std::uint64_t{1} << (row % kWordBits);
  }
}

const std::vector<std::int32_t>& RowUnion::join(Communicator& ranks) {
  ranks.gather(own_.data(), of_ranks_.data(), own_.size() * sizeof(own_[0]));
  joined_.clear();
  for (std::size_t w = 0; w < own_.size(); ++w) {
    std::uint64_t word = 0;
    for (std::size_t at = w; at < of_ranks_.size(); at += own_.size()) word |= of_ranks_[at];
    for (; word != 0; word &= word - 1) {
      joined_.push_back(static_cast<std::int32_t>(w * kWordBits) + std::countr_zero(word));
    }
  }
  return joined_;
}

}  // namespace agoq

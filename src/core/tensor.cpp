#include "core/tensor.h"

namespace agoq {

Shape::Shape(std::initializer_list<std::int64_t> extents) {
  check(extents.size() <= kMaxRank, "a shape has at most {} extents; {} were given",
        static_cast<int>(kMaxRank), extents.size());
  for (const std::int64_t extent : extents) {
    check(extent >= 0, "extents are not negative; {} was given", extent);
    extents_[static_cast<std::size_t>(rank_++)] = extent;
  }
}

std::int64_t Shape::count() const {
  std::int64_t count = 1;
  for (int axis = 0; axis < rank_; ++axis) count *= (*this)[axis];
  return count;
}

bool Shape::operator==(const Shape& other) const {
  if (rank_ != other.rank_) return false;
  for (int axis = 0; axis < rank_; ++axis) {
    if ((*this)[axis] != other[axis]) return false;
  }
  return true;
}

std::string Shape::to_string() const {
  std::string text = "[";
  for (int axis = 0; axis < rank_; ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string((*this)[axis]);
  }
  return text + "]";
}

Tensor Tensor::slice_rows(std::int64_t begin, std::int64_t end) const {
  check(0 <= begin && begin <= end && end <= rows(), "rows [{}, {}) of a tensor with {} rows", begin,
        end, rows());
  const auto row_bytes = static_cast<std::size_t>(width()) * size_of(type);
  return {data + static_cast<std::size_t>(begin) * row_bytes, type, Shape{end - begin, width()}};
}

Tensor Tensor::reshaped(Shape other) const {
  check(other.count() == count(), "a tensor of shape {} cannot be seen as {}", shape.to_string(),
        other.to_string());
  return {data, type, other};
}

}  // namespace agoq

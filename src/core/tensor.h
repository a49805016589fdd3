// Tensor: a view of contiguous, row-major memory that somebody else owns (an Arena or a Buffer).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "core/element_type.h"
#include "core/error.h"
#include "core/small_float.h"

namespace agoq {

/// Up to four extents, outermost first. A Shape of rank 0 has one element.
class Shape {
 public:
  static constexpr int kMaxRank = 4;
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> extents);

  int rank() const { return rank_; }
  std::int64_t operator[](int axis) const { return extents_[static_cast<std::size_t>(axis)]; }
  std::int64_t count() const;
  bool operator==(const Shape& other) const;
  std::string to_string() const;  // "[2, 1024, 256]"

 private:
  std::array<std::int64_t, kMaxRank> extents_{};
  int rank_ = 0;
};

template <typename T>
struct ElementTypeOf;
template <>
struct ElementTypeOf<double> {
  static constexpr ElementType value = ElementType::kFp64;
};
template <>
struct ElementTypeOf<float> {
  static constexpr ElementType value = ElementType::kFp32;
};
template <>
struct ElementTypeOf<Bf16> {
  static constexpr ElementType value = ElementType::kBf16;
};
template <>
struct ElementTypeOf<Fp16> {
  static constexpr ElementType value = ElementType::kFp16;
};
template <>
struct ElementTypeOf<std::int64_t> {
  static constexpr ElementType value = ElementType::kInt64;
};
template <>
struct ElementTypeOf<std::int32_t> {
  static constexpr ElementType value = ElementType::kInt32;
};
template <>
struct ElementTypeOf<std::int16_t> {
  static constexpr ElementType value = ElementType::kInt16;
};
template <>
struct ElementTypeOf<std::uint8_t> {
  static constexpr ElementType value = ElementType::kUint8;
};

struct Tensor {
  std::byte* data = nullptr;
  ElementType type = ElementType::kFp32;
  Shape shape;

  /// False for a default-constructed Tensor, which stands for "not given" in operations.
  explicit operator bool() const { return data != nullptr; }
  std::int64_t count() const { return shape.count(); }
  std::size_t bytes() const { return static_cast<std::size_t>(count()) * size_of(type); }
  /// The last extent; 1 for rank 0.
  std::int64_t width() const { return shape.rank() == 0 ? 1 : shape[shape.rank() - 1]; }
  /// The product of all extents but the last.
  std::int64_t rows() const { return width() == 0 ? 0 : count() / width(); }

  /// The elements as T; T must be the element type.
  template <typename T>
  T* as() const {
    check(ElementTypeOf<T>::value == type, "a tensor of {} was read as {}", name_of(type),
          name_of(ElementTypeOf<T>::value));
    return reinterpret_cast<T*>(data);
  }
  /// Rows [begin, end) of the tensor seen as [rows(), width()].
  Tensor slice_rows(std::int64_t begin, std::int64_t end) const;
  /// The same elements under another shape of equal count.
  Tensor reshaped(Shape other) const;
};

}  // namespace agoq

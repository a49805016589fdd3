// The element types of unquantised tensors, their sizes and names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace agoq {

enum class ElementType : std::uint8_t { kFp64, kFp32, kBf16, kFp16, kInt64, kInt32, kInt16, kUint8 };

/// Bytes per element.
constexpr std::size_t size_of(ElementType type) {
  switch (type) {
    case ElementType::kFp64:
    case ElementType::kInt64: return 8;
    case ElementType::kFp32:
    case ElementType::kInt32: return 4;
    case ElementType::kBf16:
    case ElementType::kFp16:
    case ElementType::kInt16: return 2;
    case ElementType::kUint8: return 1;
  }
  return 0;
}

/// The name used in configurations and messages: "fp64", "fp32", "bf16", "fp16", "int64", ...
constexpr std::string_view name_of(ElementType type) {
  switch (type) {
    case ElementType::kFp64: return "fp64";
    case ElementType::kFp32: return "fp32";
    case ElementType::kBf16: return "bf16";
    case ElementType::kFp16: return "fp16";
    case ElementType::kInt64: return "int64";
    case ElementType::kInt32: return "int32";
    case ElementType::kInt16: return "int16";
    case ElementType::kUint8: return "uint8";
  }
  return "?";
}

/// The type in which row statistics (rstd, log-sum-exp) and one-dimensional gradients of a model
/// with tensors of `type` are held: FP32, or FP64 for the double-precision test models.
constexpr ElementType statistics_type(ElementType type) {
  return type == ElementType::kFp64 ? ElementType::kFp64 : ElementType::kFp32;
}

}  // namespace agoq

// Checks of operands that every backend makes alike: a mismatch throws Error naming the operation.
#pragma once

#include <cstdint>
#include <string_view>

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

}  // namespace agoq

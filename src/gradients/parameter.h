// Parameter: what gradients, optimizer and checkpoint know of a model's parameter.
#pragma once

#include <cstdint>
#include <string>

#include "quant/quant_tensor.h"

namespace agoq {

/// Kinds of parameters: what a report groups by.
enum class ParameterKind : std::uint8_t {
  kEmbedding,
  kNorm,
  kQkv,
  kAttentionOutput,
  kGateUp,
  kDown,
  kHead
};
constexpr std::string_view name_of(ParameterKind kind) {
  switch (kind) {
    case ParameterKind::kEmbedding: return "embedding";
    case ParameterKind::kNorm: return "norm";
    case ParameterKind::kQkv: return "qkv";
    case ParameterKind::kAttentionOutput: return "o";
    case ParameterKind::kGateUp: return "gate_up";
    case ParameterKind::kDown: return "down";
    case ParameterKind::kHead: return "head";
  }
  return "?";
}

struct Parameter {
  std::string name;  // "layers.3.gate_up"
  ParameterKind kind;
  std::int64_t rows;      // output features; 1 for one-dimensional parameters
  std::int64_t columns;   // input features
  std::int64_t segments;  // of a row: where tensor parallelism may cut the input features

  bool is_vector() const { return rows == 1; }
  std::int64_t count() const { return rows * columns; }
  BlockGrid grid() const { return {rows, columns, segments}; }
};

}  // namespace agoq

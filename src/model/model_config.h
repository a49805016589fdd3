// The shape of a LLaMA-style model.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "core/element_type.h"

namespace agoq {

enum class RopeScaling : std::uint8_t {
  kPlain,
  kLinear,  // positions divided by factor
  kLlama3,  // long wavelengths divided by factor, short ones kept, a ramp between (Llama 3.1)
};

struct RopeConfig {
  double theta = 10000.0;
  RopeScaling scaling = RopeScaling::kPlain;
  double factor = 1.0;                     // kLinear, kLlama3
  double low_frequency_factor = 1.0;       // kLlama3
  double high_frequency_factor = 4.0;      // kLlama3
  std::int64_t original_positions = 8192;  // kLlama3

  bool operator==(const RopeConfig&) const = default;
};

struct ModelConfig {
  std::int64_t hidden = 256;
  std::int64_t layers = 5;
  int heads = 4;
  int kv_heads = 2;
  int head_size = 64;
  std::int64_t feed_forward = 704;
  std::int64_t vocabulary = 257;
  NormKind norm = NormKind::kRmsNorm;
  double norm_epsilon = 1e-5;
  RopeConfig rope;
  bool tied_embeddings = false;
  ElementType dtype = ElementType::kBf16;  // of weights and activations
  /// Segments into which dimensions that tensor parallelism may cut are divided (quant_tensor.h).
  std::int64_t segments = 16;
  /// Tokens whose logits exist at once in the loss.
  std::int64_t loss_chunk = 256;
  /// Standard deviation of initial weights; the two projections back into the residual stream are
  /// divided by sqrt(2 layers).
  double initial_deviation = 0.02;

  AttentionShape attention() const { return {heads, kv_heads, head_size}; }
  /// Throws Error (kInput) naming the key that does not fit.
  void check() const;

  bool operator==(const ModelConfig&) const = default;
};

}  // namespace agoq

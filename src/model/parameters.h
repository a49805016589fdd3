// The parameters of a model, in the order in which gradients, optimizer and checkpoints hold them:
// embedding, the blocks, the final norm, the head (absent when it is tied to the embedding).
#pragma once

#include <cstddef>
#include <limits>
#include <vector>

#include "backend/backend.h"
#include "gradients/parameter.h"
#include "model/model_config.h"

namespace agoq {

/// Stands for a parameter that the model does not have (norm weights of kLayerNorm).
inline constexpr std::size_t kNoParameter = std::numeric_limits<std::size_t>::max();

struct BlockParameters {
  std::size_t norm1;    // [H]
  std::size_t qkv;      // [(heads + 2 kv_heads) head_size, H]: query, key, value heads
  std::size_t o;        // [H, heads head_size]
  std::size_t norm2;    // [H]
  std::size_t gate_up;  // [2I, H]: gate rows, then up rows
  std::size_t down;     // [H, I]
};

/// Where each parameter stands in parameters_of().
struct ParameterIndex {
  std::size_t embedding;  // [V, H]
  std::vector<BlockParameters> blocks;
  std::size_t final_norm;  // [H]
  std::size_t head;        // [V, H]; equal to embedding when tied
};

std::vector<Parameter> parameters_of(const ModelConfig& config);
ParameterIndex index_parameters(const ModelConfig& config);

/// Those that the block has, from its end to its start: about as its backward pass meets them.
std::vector<std::size_t> parameters_of_block(const BlockParameters& block);

/// Elements of all parameters.
std::int64_t parameter_count(const ModelConfig& config);

/// Writes the initial values of parameter `index` into `values`, fp32 [rows, columns]: norms are one,
/// the rest normal with config.initial_deviation (o and down divided by sqrt(2 layers)), from
/// counter-based random numbers of the context's seed.
void initial_values(const Context& context, const ModelConfig& config, const Parameter& parameter,
                    std::size_t index, const Tensor& values);

}  // namespace agoq

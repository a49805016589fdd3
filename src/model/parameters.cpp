#include "model/parameters.h"

#include <cmath>

#include "core/random.h"

namespace agoq {
namespace {

/// Calls visit(parameter) for each parameter in order and fills in the index on the way.
template <typename Visit>
ParameterIndex walk_parameters(const ModelConfig& config, Visit visit) {
  std::size_t next = 0;
  const auto add = [&](std::string name, ParameterKind kind, std::int64_t rows, std::int64_t columns,
                       std::int64_t segments) {
    visit(Parameter{std::move(name), kind, rows, columns, segments});
    return next++;
  };
  const auto add_norm = [&](std::string name) {
    if (config.norm == NormKind::kLayerNorm) return kNoParameter;
    return add(std::move(name), ParameterKind::kNorm, 1, config.hidden, 1);
  };
  const AttentionShape attention = config.attention();
  ParameterIndex index{};
  // Tensor parallelism cuts the rows of the embedding, QKV and gate/up, and the columns of the output
  // and down projections: only those rows are divided into segments.
  index.embedding = add("embedding", ParameterKind::kEmbedding, config.vocabulary, config.hidden, 1);
  for (std::int64_t l = 0; l < config.layers; ++l) {
    const std::string prefix = fmt::format("layers.{}.", l);
    BlockParameters block{};
    block.norm1 = add_norm(prefix + "norm1");
    block.qkv = add(prefix + "qkv", ParameterKind::kQkv, attention.qkv_width(), config.hidden, 1);
    block.o = add(prefix + "o", ParameterKind::kAttentionOutput, config.hidden, attention.output_width(),
                  config.segments);
    block.norm2 = add_norm(prefix + "norm2");
    block.gate_up =
        add(prefix + "gate_up", ParameterKind::kGateUp, 2 * config.feed_forward, config.hidden, 1);
    block.down =
        add(prefix + "down", ParameterKind::kDown, config.hidden, config.feed_forward, config.segments);
    index.blocks.push_back(block);
  }
  index.final_norm = add_norm("final_norm");
  index.head = config.tied_embeddings
                   ? index.embedding
                   : add("head", ParameterKind::kHead, config.vocabulary, config.hidden, 1);
  return index;
}

}  // namespace

std::vector<Parameter> parameters_of(const ModelConfig& config) {
  std::vector<Parameter> parameters;
  walk_parameters(config, [&](Parameter parameter) { parameters.push_back(std::move(parameter)); });
  return parameters;
}

ParameterIndex index_parameters(const ModelConfig& config) {
  return walk_parameters(config, [](const Parameter&) {});
}

std::vector<std::size_t> parameters_of_block(const BlockParameters& block) {
  std::vector<std::size_t> parameters;
  for (const std::size_t parameter :
       {block.down, block.gate_up, block.norm2, block.o, block.qkv, block.norm1}) {
    if (parameter != kNoParameter) parameters.push_back(parameter);
  }
  return parameters;
}

std::int64_t parameter_count(const ModelConfig& config) {
  std::int64_t count = 0;
  for (const Parameter& parameter : parameters_of(config)) count += parameter.count();
  return count;
}

void initial_values(const Context& context, const ModelConfig& config, const Parameter& parameter,
                    std::size_t index, const Tensor& values) {
  if (parameter.kind == ParameterKind::kNorm) {
    const std::vector<float> ones(static_cast<std::size_t>(parameter.count()), 1.0f);
    context.backend.upload(context, ones.data(), values.data, values.bytes());
    return;
  }
  double deviation = config.initial_deviation;
  if (parameter.kind == ParameterKind::kAttentionOutput || parameter.kind == ParameterKind::kDown) {
    deviation /= std::sqrt(2.0 * static_cast<double>(config.layers));
  }
  RandomKey key;
  key.seed = context.random.seed;
  context.backend.fill_normal(context,
                              key.with(RandomPurpose::kInitialWeight, static_cast<std::uint32_t>(index)),
                              deviation, values);
}

}  // namespace agoq

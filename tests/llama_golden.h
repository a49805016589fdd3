// Loads a golden file of scripts/make_llama_golden.py: a tiny Hugging Face model with tokens, targets,
// losses, logits and the gradient of the summed token loss.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "checkpoint/hugging_face.h"
#include "checkpoint/safetensors.h"
#include "core/small_float.h"
#include "model/parameters.h"

namespace agoq {

struct LlamaGolden {
  std::string versions;  // of what made it
  ModelConfig config;    // dtype fp64
  std::vector<Parameter> parameters;
  std::int64_t sequences = 0;
  std::int64_t sequence = 0;  // tokens
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> targets;
  double loss_sum = 0;
  double loss_mean = 0;
  std::vector<double> logits;                  // [sequences, sequence, V]
  std::vector<std::vector<double>> weights;    // per parameter, [rows, columns]
  std::vector<std::vector<double>> gradients;  // likewise
};

/// The elements of an F64 or F32 tensor, or of an F32 tensor widened.
inline std::vector<double> read_as_double(const SafetensorsReader& file, const SafetensorsEntry& entry) {
  std::vector<double> values(static_cast<std::size_t>(entry.shape.count()));
  if (entry.type == ElementType::kFp64) {
    file.read(entry, values.data());
    return values;
  }
  check_input(entry.type == ElementType::kFp32, "'{}': tensor '{}' is neither F64 nor F32", file.path(),
              entry.name);
  std::vector<float> narrow(values.size());
  file.read(entry, narrow.data());
  values.assign(narrow.begin(), narrow.end());
  return values;
}

inline LlamaGolden load_llama_golden(const std::string& path) {
  const SafetensorsReader file(path);
  LlamaGolden golden;
  golden.versions =
      "torch " + file.metadata().at("torch") + ", transformers " + file.metadata().at("transformers");
  golden.config = parse_config_json(file.metadata().at("config"), path).model;
  golden.config.dtype = ElementType::kFp64;
  golden.parameters = parameters_of(golden.config);

  const SafetensorsEntry& tokens = file.entry("tokens");
  golden.sequences = tokens.shape[0];
  golden.sequence = tokens.shape[1];
  golden.tokens.resize(static_cast<std::size_t>(tokens.shape.count()));
  golden.targets.resize(golden.tokens.size());
  file.read(file.entry("tokens", ElementType::kInt32, tokens.shape), golden.tokens.data());
  file.read(file.entry("targets", ElementType::kInt32, tokens.shape), golden.targets.data());
  golden.loss_sum = read_as_double(file, file.entry("loss_sum")).at(0);
  golden.loss_mean = read_as_double(file, file.entry("loss_mean")).at(0);
  golden.logits = read_as_double(file, file.entry("logits"));

  golden.weights.resize(golden.parameters.size());
  golden.gradients.resize(golden.parameters.size());
  // The rows of a parameter follow one another in the order of its tensors.
  for (const HuggingFaceTensor& tensor : hugging_face_tensors(golden.config, golden.parameters)) {
    const auto append = [&](const char* kind, std::vector<double>& all) {
      const SafetensorsEntry& entry = file.entry(kind + tensor.name, ElementType::kFp32, tensor.shape);
      const std::vector<double> values = read_as_double(file, entry);
      all.insert(all.end(), values.begin(), values.end());
    };
    append("weight/", golden.weights[tensor.parameter]);
    append("gradient/", golden.gradients[tensor.parameter]);
  }
  return golden;
}

}  // namespace agoq

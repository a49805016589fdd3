#include "checkpoint/hugging_face.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "backend/backend.h"
#include "checkpoint/durable_file.h"
#include "checkpoint/json_text.h"
#include "checkpoint/strict_json.h"
#include "comm/quantized_reduction.h"
#include "core/error.h"
#include "model/parameters.h"

namespace agoq {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::size_t kLargestConfig = 1 << 20;
constexpr std::size_t kLargestIndex = 100'000'000;
constexpr int kDeepestConfig = 8;
constexpr int kDeepestIndex = 2;
// Beyond any model, and small enough that products of two of them fit into int64.
constexpr std::int64_t kLargestExtent = std::int64_t{1} << 28;
constexpr std::int64_t kMostLayers = 1 << 16;
// OlmoForCausalLM has it in its code and not in its configuration.
constexpr double kOlmoEpsilon = 1e-5;

struct DtypeName {
  ElementType type;
  std::string_view name;
};
constexpr std::array<DtypeName, 4> kTorchTypes = {{
    {ElementType::kFp64, "float64"},
    {ElementType::kFp32, "float32"},
    {ElementType::kBf16, "bfloat16"},
    {ElementType::kFp16, "float16"},
}};

// --- config.json ---

/// One object of config.json. Remembers which keys were asked for, so that the others can be refused.
/// A key whose value is null counts as absent, as in transformers.
class Section {
 public:
  Section(const Json& object, std::string source, std::string prefix)
      : object_(object), source_(std::move(source)), prefix_(std::move(prefix)) {
    check_input(object_.is_object(), "'{}': {} is not a JSON object", source_,
                prefix_.empty() ? "the content" : prefix_.substr(0, prefix_.size() - 1));
  }

  const Json* find(const char* key) {
    asked_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  /// From 1 to `largest`.
  std::int64_t integer(const char* key, std::optional<std::int64_t> otherwise,
                       std::int64_t largest = kLargestExtent) {
    const Json* value = find(key);
    if (value == nullptr) {
      check_input(otherwise.has_value(), "'{}' does not give {}{}", source_, prefix_, key);
      return *otherwise;
    }
    check_input(value->is_number_unsigned() && value->get<std::uint64_t>() >= 1 &&
                    value->get<std::uint64_t>() <= static_cast<std::uint64_t>(largest),
                "'{}': {}{} must be an integer from 1 to {}; {} was given", source_, prefix_, key,
                largest, shown(*value));
    return static_cast<std::int64_t>(value->get<std::uint64_t>());
  }

  double number(const char* key, std::optional<double> otherwise) {
    const Json* value = find(key);
    if (value == nullptr) {
      check_input(otherwise.has_value(), "'{}' does not give {}{}", source_, prefix_, key);
      return *otherwise;
    }
    check_input(value->is_number() && std::isfinite(value->get<double>()) && value->get<double>() >= 0,
                "'{}': {}{} must be a number that is not negative; {} was given", source_, prefix_, key,
                shown(*value));
    return value->get<double>();
  }

  bool boolean(const char* key, bool otherwise) {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    check_input(value->is_boolean(), "'{}': {}{} must be true or false; {} was given", source_, prefix_,
                key, shown(*value));
    return value->get<bool>();
  }

  std::string text(const char* key, std::optional<std::string> otherwise) {
    const Json* value = find(key);
    if (value == nullptr) {
      check_input(otherwise.has_value(), "'{}' does not give {}{}", source_, prefix_, key);
      return *otherwise;
    }
    check_input(value->is_string(), "'{}': {}{} must be a text; {} was given", source_, prefix_, key,
                shown(*value));
    return value->get<std::string>();
  }

  /// A key that may only have the value that means "not used".
  void refuse_unless(const char* key, const Json& unused, std::string_view why) {
    const Json* value = find(key);
    check_input(value == nullptr || *value == unused, "'{}': {}{} = {} is not supported: {}", source_,
                prefix_, key, value == nullptr ? "" : shown(*value), why);
  }

  /// Refuses every key that was not asked for and says something. `ignored(key)` names keys that do
  /// not change what the model computes.
  template <typename Ignored>
  void refuse_others(Ignored ignored) const {
    for (const auto& [key, value] : object_.items()) {
      const bool silent = value.is_null() || value == false || value == 0 || value.empty();
      check_input(
          asked_.count(key) > 0 || silent || ignored(key),
          "'{}': {}{} = {} is not known: remove it if it does not change what the model computes",
          source_, prefix_, printable(key), shown(value));
    }
  }

  const std::string& source() const { return source_; }

  static std::string shown(const Json& value) { return printable_json(value); }

 private:
  const Json& object_;
  std::string source_;
  std::string prefix_;
  std::set<std::string> asked_;
};

// What files of this architecture carry that does not change training: bookkeeping, generation.
bool is_bookkeeping(std::string_view key) {
  static const std::set<std::string_view> keys = {"_name_or_path",
                                                  "_attn_implementation",
                                                  "_attn_implementation_autoset",
                                                  "attn_implementation",
                                                  "architectures",
                                                  "bos_token_id",
                                                  "decoder_start_token_id",
                                                  "do_sample",
                                                  "id2label",
                                                  "is_llama_config",
                                                  "label2id",
                                                  "max_length",
                                                  "max_new_tokens",
                                                  "name_or_path",
                                                  "num_labels",
                                                  "output_attentions",
                                                  "output_hidden_states",
                                                  "pad_token_id",
                                                  "pretraining_tp",
                                                  "repetition_penalty",
                                                  "return_dict",
                                                  "sep_token_id",
                                                  "task_specific_params",
                                                  "temperature",
                                                  "tokenizer_class",
                                                  "top_k",
                                                  "top_p",
                                                  "transformers_version",
                                                  "use_cache"};
  return keys.count(key) > 0 || key.rfind("transformers.js", 0) == 0 || key.rfind("unsloth_", 0) == 0;
}

RopeConfig parse_rope(Section& root, const std::string& source) {
  RopeConfig rope;
  rope.theta = root.number("rope_theta", rope.theta);
  root.refuse_unless("partial_rotary_factor", 1.0, "all of a head is rotated here");
  const Json* older = root.find("rope_scaling");
  const Json* newer = root.find("rope_parameters");
  if (older == nullptr && newer == nullptr) return rope;
  const char* prefix = newer == nullptr ? "rope_scaling." : "rope_parameters.";
  Section section(newer == nullptr ? *older : *newer, source, prefix);
  rope.theta = section.number("rope_theta", rope.theta);
  section.refuse_unless("partial_rotary_factor", 1.0, "all of a head is rotated here");
  const std::string type = section.text("rope_type", section.text("type", "default"));
  if (type == "default") {
    rope.scaling = RopeScaling::kPlain;
  } else if (type == "linear") {
    rope.scaling = RopeScaling::kLinear;
    rope.factor = section.number("factor", {});
  } else if (type == "llama3") {
    rope.scaling = RopeScaling::kLlama3;
    rope.factor = section.number("factor", {});
    rope.low_frequency_factor = section.number("low_freq_factor", {});
    rope.high_frequency_factor = section.number("high_freq_factor", {});
    rope.original_positions = section.find("original_max_position_embeddings") != nullptr
                                  ? section.integer("original_max_position_embeddings", {})
                                  : root.integer("max_position_embeddings", {});
    check_input(
        rope.low_frequency_factor > 0 && rope.high_frequency_factor > rope.low_frequency_factor,
        "'{}': {}high_freq_factor must be above low_freq_factor, and that above 0; {} and {} were given",
        source, prefix, rope.high_frequency_factor, rope.low_frequency_factor);
  } else {
    fail_input("'{}': {}rope_type '{}' is not supported: default, linear and llama3 are", source, prefix,
               printable(type));
  }
  check_input(rope.theta > 0 && rope.factor > 0, "'{}': rope_theta and {}factor must be above 0", source,
              prefix);
  // Keys of other scalings that a plain or linear one may carry without effect are refused as well:
  // they would be a sign that the type is not what was meant.
  section.refuse_others([&](std::string_view) { return false; });
  return rope;
}

/// The largest power of two up to 16 that divides what tensor parallelism may cut.
std::int64_t fitting_segments(const ModelConfig& model) {
  std::int64_t segments = ModelConfig{}.segments;
  while (model.feed_forward % segments != 0 || model.attention().output_width() % segments != 0)
    segments /= 2;
  return segments;
}

ElementType parse_dtype(Section& root) {
  const std::string newer = root.text("dtype", root.text("torch_dtype", "float32"));
  root.find("torch_dtype");
  for (const DtypeName& known : kTorchTypes) {
    if (known.name != newer) continue;
    return known.type == ElementType::kFp16 ? ElementType::kBf16 : known.type;
  }
  fail_input("'{}': dtype '{}' is not supported: float32, bfloat16, float16 and float64 are",
             root.source(), printable(newer));
}

}  // namespace

std::string to_config_json(const HuggingFaceConfig& config) {
  const ModelConfig& model = config.model;
  const bool is_olmo = model.norm == NormKind::kLayerNorm;
  Json json = {
      {"architectures", {is_olmo ? "OlmoForCausalLM" : "LlamaForCausalLM"}},
      {"model_type", is_olmo ? "olmo" : "llama"},
      {"hidden_size", model.hidden},
      {"num_hidden_layers", model.layers},
      {"num_attention_heads", model.heads},
      {"num_key_value_heads", model.kv_heads},
      {"head_dim", model.head_size},
      {"intermediate_size", model.feed_forward},
      {"vocab_size", model.vocabulary},
      {"max_position_embeddings", config.positions},
      {"hidden_act", "silu"},
      {"attention_bias", false},
      {"attention_dropout", 0.0},
      {"initializer_range", model.initial_deviation},
      {"rope_theta", model.rope.theta},
      {"rope_scaling", nullptr},
      {"tie_word_embeddings", model.tied_embeddings},
      {"use_cache", true},
      {"bos_token_id", nullptr},
      {"pad_token_id", nullptr},
      {"eos_token_id", nullptr},
      {"agoq", {{"segments", model.segments}}},
  };
  if (is_olmo) {
    json["clip_qkv"] = nullptr;
    json["agoq"]["norm_epsilon"] = model.norm_epsilon;
  } else {
    json["rms_norm_eps"] = model.norm_epsilon;
    json["mlp_bias"] = false;
  }
  if (config.end_of_document >= 0) json["eos_token_id"] = config.end_of_document;
  for (const DtypeName& known : kTorchTypes) {
    if (known.type == model.dtype) json["torch_dtype"] = known.name;
  }
  switch (model.rope.scaling) {
    case RopeScaling::kPlain: break;
    case RopeScaling::kLinear:
      json["rope_scaling"] = {{"rope_type", "linear"}, {"factor", model.rope.factor}};
      break;
    case RopeScaling::kLlama3:
      json["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", model.rope.factor},
                              {"low_freq_factor", model.rope.low_frequency_factor},
                              {"high_freq_factor", model.rope.high_frequency_factor},
                              {"original_max_position_embeddings", model.rope.original_positions}};
      break;
  }
  return to_text(json) + "\n";
}

HuggingFaceConfig parse_config_json(std::string_view text, const std::string& source) {
  const Json json = parse_strict_json(text, source, kDeepestConfig);
  Section root(json, source, "");
  HuggingFaceConfig config;
  ModelConfig& model = config.model;

  const std::string kind = root.text("model_type", {});
  check_input(kind == "llama" || kind == "olmo",
              "'{}': model_type '{}' is not supported: llama and olmo are", source, printable(kind));
  const bool is_olmo = kind == "olmo";
  root.refuse_unless("quantization_config", {}, "export the weights unquantised");
  root.refuse_unless("hidden_act", "silu", "the feed-forward layer is silu(gate) * up");
  root.refuse_unless("attention_bias", false, "projections have no bias here");
  root.refuse_unless("mlp_bias", false, "projections have no bias here");
  root.refuse_unless("attention_dropout", 0.0, "there is no dropout here; set it to 0");
  root.refuse_unless("sliding_window", {}, "attention reaches back to the start of the document");
  root.refuse_unless("use_sliding_window", false, "attention reaches back to the start of the document");
  root.refuse_unless("clip_qkv", {}, "queries, keys and values are not clipped here");
  root.refuse_unless("rope_interleaved", false, "rotary pairs are (i, i + head size / 2) here");
  if (const Json* types = root.find("layer_types")) {
    for (const Json& type : *types) {
      check_input(type == "full_attention", "'{}': layer type {} is not supported: full_attention is",
                  source, Section::shown(type));
    }
  }

  model.hidden = root.integer("hidden_size", {});
  model.layers = root.integer("num_hidden_layers", {}, kMostLayers);
  model.heads = static_cast<int>(root.integer("num_attention_heads", {}));
  model.kv_heads = static_cast<int>(root.integer("num_key_value_heads", model.heads));
  if (root.find("head_dim") == nullptr) {
    check_input(model.hidden % model.heads == 0,
                "'{}' gives no head_dim, and hidden_size {} is not a multiple of num_attention_heads {}",
                source, model.hidden, model.heads);
  }
  model.head_size = static_cast<int>(root.integer("head_dim", model.hidden / model.heads));
  model.feed_forward = root.integer("intermediate_size", {});
  model.vocabulary = root.integer("vocab_size", {});
  config.positions = root.integer("max_position_embeddings", config.positions);
  model.tied_embeddings = root.boolean("tie_word_embeddings", false);
  model.initial_deviation = root.number("initializer_range", 0.02);
  model.rope = parse_rope(root, source);
  model.dtype = parse_dtype(root);
  model.norm = is_olmo ? NormKind::kLayerNorm : NormKind::kRmsNorm;
  model.norm_epsilon = is_olmo ? kOlmoEpsilon : root.number("rms_norm_eps", 1e-6);
  // Several ends may be listed; the first is the one that training puts behind a document.
  const Json* end = root.find("eos_token_id");
  if (end != nullptr && end->is_array()) end = end->empty() ? nullptr : &(*end)[0];
  if (end != nullptr && end->is_number_unsigned()) {
    config.end_of_document = static_cast<std::int64_t>(std::min<std::uint64_t>(
        end->get<std::uint64_t>(), std::uint64_t{std::numeric_limits<std::int32_t>::max()}));
  }

  model.segments = fitting_segments(model);
  if (const Json* own = root.find("agoq")) {
    Section section(*own, source, "agoq.");
    model.segments = section.integer("segments", model.segments);
    if (is_olmo) model.norm_epsilon = section.number("norm_epsilon", model.norm_epsilon);
    section.refuse_others([](std::string_view) { return false; });
  }
  root.refuse_others(is_bookkeeping);
  try {
    model.check();
  } catch (const Error& error) {
    fail_input("'{}': {}", source, error.what());
  }
  return config;
}

HuggingFaceConfig read_config(const std::string& path) {
  std::error_code error;
  const std::string file =
      fs::is_directory(path, error) ? (fs::path(path) / "config.json").string() : path;
  return parse_config_json(read_text(file, kLargestConfig), file);
}

ModelConfig read_model_config(const std::string& path) { return read_config(path).model; }

void write_config(const std::string& path, const HuggingFaceConfig& config) {
  write_durably(path, to_config_json(config));
}

std::string describe_differences(const ModelConfig& first, const ModelConfig& second) {
  std::string text;
  const auto compare = [&](const char* name, const auto& a, const auto& b) {
    if (a != b) text += fmt::format("{}{} {} against {}", text.empty() ? "" : ", ", name, a, b);
  };
  const auto norm_name = [](NormKind kind) {
    return kind == NormKind::kRmsNorm ? "rms-norm" : "layer-norm";
  };
  const auto scaling_name = [](RopeScaling scaling) {
    return scaling == RopeScaling::kPlain    ? "plain"
           : scaling == RopeScaling::kLinear ? "linear"
                                             : "llama3";
  };
  compare("hidden", first.hidden, second.hidden);
  compare("layers", first.layers, second.layers);
  compare("heads", first.heads, second.heads);
  compare("kv_heads", first.kv_heads, second.kv_heads);
  compare("head_size", first.head_size, second.head_size);
  compare("feed_forward", first.feed_forward, second.feed_forward);
  compare("vocabulary", first.vocabulary, second.vocabulary);
  compare("norm", std::string(norm_name(first.norm)), std::string(norm_name(second.norm)));
  compare("norm_epsilon", first.norm_epsilon, second.norm_epsilon);
  compare("rope_theta", first.rope.theta, second.rope.theta);
  compare("rope_scaling", std::string(scaling_name(first.rope.scaling)),
          std::string(scaling_name(second.rope.scaling)));
  if (first.rope.scaling == second.rope.scaling && first.rope.scaling != RopeScaling::kPlain) {
    compare("rope_factor", first.rope.factor, second.rope.factor);
    if (first.rope.scaling == RopeScaling::kLlama3) {
      compare("rope_low_frequency_factor", first.rope.low_frequency_factor,
              second.rope.low_frequency_factor);
      compare("rope_high_frequency_factor", first.rope.high_frequency_factor,
              second.rope.high_frequency_factor);
      compare("rope_original_positions", first.rope.original_positions, second.rope.original_positions);
    }
  }
  compare("tied_embeddings", first.tied_embeddings, second.tied_embeddings);
  compare("dtype", name_of(first.dtype), name_of(second.dtype));
  compare("segments", first.segments, second.segments);
  return text;
}

// --- weights ---

std::vector<HuggingFaceTensor> hugging_face_tensors(const ModelConfig& config,
                                                    const std::vector<Parameter>& parameters) {
  std::vector<HuggingFaceTensor> tensors;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    std::int64_t row = 0;
    const auto add = [&](std::string name, std::int64_t rows) {
      const Shape shape = parameter.kind == ParameterKind::kNorm ? Shape{parameter.columns}
                                                                 : Shape{rows, parameter.columns};
      tensors.push_back({std::move(name), i, row, row + rows, shape});
      row += rows;
    };
    // "layers.3.qkv" -> "model.layers.3." and "qkv".
    const std::size_t dot = parameter.name.rfind('.');
    const std::string layer =
        dot == std::string::npos ? "" : "model." + parameter.name.substr(0, dot + 1);
    const std::string role = parameter.name.substr(dot == std::string::npos ? 0 : dot + 1);
    switch (parameter.kind) {
      case ParameterKind::kEmbedding: add("model.embed_tokens.weight", config.vocabulary); break;
      case ParameterKind::kNorm:
        if (role == "final_norm") {
          add("model.norm.weight", 1);
        } else {
          add(layer + (role == "norm1" ? "input_layernorm.weight" : "post_attention_layernorm.weight"),
              1);
        }
        break;
      case ParameterKind::kQkv:
        add(layer + "self_attn.q_proj.weight", std::int64_t{config.heads} * config.head_size);
        add(layer + "self_attn.k_proj.weight", std::int64_t{config.kv_heads} * config.head_size);
        add(layer + "self_attn.v_proj.weight", std::int64_t{config.kv_heads} * config.head_size);
        break;
      case ParameterKind::kAttentionOutput: add(layer + "self_attn.o_proj.weight", config.hidden); break;
      case ParameterKind::kGateUp:
        add(layer + "mlp.gate_proj.weight", config.feed_forward);
        add(layer + "mlp.up_proj.weight", config.feed_forward);
        break;
      case ParameterKind::kDown: add(layer + "mlp.down_proj.weight", config.hidden); break;
      case ParameterKind::kHead: add("lm_head.weight", config.vocabulary); break;
    }
    check(row == parameter.rows,
          "the parameter '{}' has {} rows and the model's configuration gives it {}", parameter.name,
          parameter.rows, row);
  }
  return tensors;
}

void read_through(const Context& context, const std::byte* source, std::size_t bytes,
                  const ByteSink& sink) {
  std::vector<std::byte> piece(std::min(bytes, kTransferBytes));
  for (std::size_t at = 0; at < bytes; at += piece.size()) {
    const std::size_t count = std::min(piece.size(), bytes - at);
    context.backend.read(context, source + at, piece.data(), count);
    sink(piece.data(), count);
  }
}

std::vector<SafetensorsSource> weight_sources(const Context& context, const ModelConfig& config,
                                              const std::vector<Parameter>& parameters,
                                              const std::vector<Tensor>& weights, int ranks, int rank) {
  check(weights.size() == parameters.size(), "{} weights were given for {} parameters", weights.size(),
        parameters.size());
  std::vector<SafetensorsSource> sources;
  for (const HuggingFaceTensor& tensor : hugging_face_tensors(config, parameters)) {
    const Tensor& weight = weights[tensor.parameter];
    const Parameter& parameter = parameters[tensor.parameter];
    check(weight.count() == parameter.count(), "the weight of '{}' has shape {}; [{}, {}] is needed",
          parameter.name, weight.shape.to_string(), parameter.rows, parameter.columns);
    const std::size_t row_bytes = static_cast<std::size_t>(parameter.columns) * size_of(weight.type);
    const OwnRows own = own_rows(parameter.rows, ranks, rank);
    const auto first = static_cast<std::size_t>(std::clamp(own.first, tensor.row_begin, tensor.row_end) -
                                                tensor.row_begin);
    const auto last = static_cast<std::size_t>(std::clamp(own.last, tensor.row_begin, tensor.row_end) -
                                               tensor.row_begin);
    const ByteRange part{first * row_bytes, last * row_bytes};
    const std::byte* begin =
        weight.data + static_cast<std::size_t>(tensor.row_begin) * row_bytes + part.begin;
    SafetensorsSource source{tensor.name, weight.type, tensor.shape,
                             [&context, begin, part](const ByteSink& sink) {
                               read_through(context, begin, part.end - part.begin, sink);
                             }};
    if (ranks > 1) source.part = part;
    sources.push_back(std::move(source));
  }
  return sources;
}

// transformers refuses a file that does not name the framework whose tensors it holds.
SafetensorsMetadata weight_metadata() { return {{"format", "pt"}}; }

void write_weights(const Context& context, const std::string& path, const ModelConfig& config,
                   const std::vector<Parameter>& parameters, const std::vector<Tensor>& weights) {
  write_safetensors(path, weight_sources(context, config, parameters, weights), weight_metadata());
}

void write_model(const Context& context, const std::string& directory, const HuggingFaceConfig& config,
                 const std::vector<Parameter>& parameters, const std::vector<Tensor>& weights) {
  const ModelConfig& model = config.model;
  check_input(
      model.norm != NormKind::kLayerNorm || model.norm_epsilon == kOlmoEpsilon,
      "OlmoForCausalLM computes with a norm_epsilon of {}; this model has {} and cannot be exported",
      kOlmoEpsilon, model.norm_epsilon);
  check_input(
      model.hidden % model.heads == 0,
      "transformers requires hidden to be a multiple of heads; {} is not a multiple of {}: this model "
      "cannot be exported",
      model.hidden, model.heads);
  std::error_code error;
  fs::create_directories(directory, error);
  check_input(!error, "cannot make the directory '{}': {}", directory, error.message());
  write_weights(context, (fs::path(directory) / "model.safetensors").string(), model, parameters,
                weights);
  write_config((fs::path(directory) / "config.json").string(), config);
}

namespace {

template <typename From>
double widened(From value) {
  if constexpr (std::is_same_v<From, double> || std::is_same_v<From, float>) {
    return value;
  } else {
    return to_float(value);
  }
}

template <typename To>
To narrowed(double value) {
  if constexpr (std::is_same_v<To, Bf16>) {
    return to_bf16(static_cast<float>(value));
  } else {
    return static_cast<To>(value);
  }
}

template <typename From, typename To>
void convert(const std::byte* source, std::byte* destination, std::size_t count) {
  const auto* from = reinterpret_cast<const From*>(source);
  auto* to = reinterpret_cast<To*>(destination);
  for (std::size_t i = 0; i < count; ++i) to[i] = narrowed<To>(widened(from[i]));
}

using Convert = void (*)(const std::byte*, std::byte*, std::size_t);

template <typename To>
Convert conversion_from(ElementType from) {
  switch (from) {
    case ElementType::kFp64: return convert<double, To>;
    case ElementType::kFp32: return convert<float, To>;
    case ElementType::kBf16: return convert<Bf16, To>;
    case ElementType::kFp16: return convert<Fp16, To>;
    default: return nullptr;
  }
}

/// Null if weights are not converted between these types.
Convert conversion(ElementType from, ElementType to) {
  switch (to) {
    case ElementType::kFp64: return conversion_from<double>(from);
    case ElementType::kFp32: return conversion_from<float>(from);
    case ElementType::kBf16: return conversion_from<Bf16>(from);
    default: return nullptr;
  }
}

/// Tensors that older exports carry and that are computed from the configuration.
bool is_derived(std::string_view name) {
  constexpr std::string_view kEnd = ".rotary_emb.inv_freq";
  return name.size() >= kEnd.size() && name.substr(name.size() - kEnd.size()) == kEnd;
}

}  // namespace

HuggingFaceModel::HuggingFaceModel(const std::string& directory) : directory_(directory) {
  config_ = read_config((fs::path(directory) / "config.json").string());
  parameters_ = parameters_of(config_.model);
  stored_.resize(parameters_.size());
  auto found = open_files();
  for (const HuggingFaceTensor& tensor : hugging_face_tensors(config_.model, parameters_)) {
    const auto place = found.find(tensor.name);
    check_input(place != found.end(),
                "the model in '{}' has no tensor '{}', which its config.json calls for", directory,
                tensor.name);
    const auto [reader, entry] = place->second;
    check_input(entry->shape == tensor.shape, "'{}': tensor '{}' has shape {}; by config.json it has {}",
                reader->path(), tensor.name, entry->shape.to_string(), tensor.shape.to_string());
    check_input(conversion(entry->type, ElementType::kFp32) != nullptr,
                "'{}': tensor '{}' is {}; weights are F64, F32, BF16 or F16", reader->path(),
                tensor.name, safetensors_dtype(entry->type));
    stored_[tensor.parameter].push_back({reader, entry, tensor.row_begin});
    found.erase(place);
  }
  for (const auto& [name, place] : found) {
    // With tied embeddings transformers takes no notice of a head that is there.
    const bool unused_head = config_.model.tied_embeddings && name == "lm_head.weight";
    check_input(unused_head || is_derived(name),
                "'{}' has a tensor '{}' that a model of its config.json does not have",
                place.first->path(), printable(name));
  }
}

std::map<std::string, std::pair<const SafetensorsReader*, const SafetensorsEntry*>>
HuggingFaceModel::open_files() {
  std::map<std::string, std::pair<const SafetensorsReader*, const SafetensorsEntry*>> found;
  const fs::path directory(directory_);
  const fs::path index_path = directory / "model.safetensors.index.json";
  std::error_code error;
  if (fs::exists(directory / "model.safetensors", error)) {
    readers_.emplace_back((directory / "model.safetensors").string());
    for (const SafetensorsEntry& entry : readers_.back().entries()) {
      found[entry.name] = {&readers_.back(), &entry};
    }
    return found;
  }
  check_input(fs::exists(index_path, error),
              "'{}' has neither model.safetensors nor model.safetensors.index.json: save the model with "
              "transformers' save_pretrained",
              directory_);
  const std::string index = index_path.string();
  const Json json = parse_strict_json(read_text(index, kLargestIndex), index, kDeepestIndex);
  check_input(json.is_object() && json.contains("weight_map") && json["weight_map"].is_object(),
              "'{}' has no object weight_map", index);
  std::map<std::string, const SafetensorsReader*> readers;
  for (const auto& [name, file] : json["weight_map"].items()) {
    check_input(file.is_string(), "'{}': weight_map gives no file name for '{}'", index,
                printable(name));
    const auto& file_name = file.get_ref<const std::string&>();
    // A shard lies beside its index; a path that leads elsewhere is not followed.
    check_input(!file_name.empty() && file_name != ".." && file_name != "." &&
                    file_name.find_first_of(std::string_view("/\0", 2)) == std::string::npos,
                "'{}': weight_map names the file '{}', which is not a file beside it", index,
                printable(file_name));
    const SafetensorsReader*& reader = readers[file_name];
    if (reader == nullptr) {
      readers_.emplace_back((directory / file_name).string());
      reader = &readers_.back();
    }
    found[name] = {reader, &reader->entry(name)};
  }
  return found;
}

bool HuggingFaceModel::is_stored_as(std::size_t parameter, ElementType type) const {
  return std::all_of(stored_.at(parameter).begin(), stored_.at(parameter).end(),
                     [&](const Stored& stored) { return stored.entry->type == type; });
}

void HuggingFaceModel::read(const Context& context, std::size_t index, const Tensor& destination) const {
  const Parameter& parameter = parameters_.at(index);
  check(destination.count() == parameter.count(), "'{}' was read into shape {}; [{}, {}] is needed",
        parameter.name, destination.shape.to_string(), parameter.rows, parameter.columns);
  const std::size_t to_size = size_of(destination.type);
  // Both sides of a conversion share kTransferBytes.
  const std::size_t elements = kTransferBytes / 2 / sizeof(double);
  std::vector<std::byte> from(elements * sizeof(double));
  std::vector<std::byte> to(elements * sizeof(double));
  for (const Stored& stored : stored_[index]) {
    const Convert converted = conversion(stored.entry->type, destination.type);
    check(converted != nullptr, "weights cannot be read as {}: fp64, fp32 and bf16 can be asked for",
          name_of(destination.type));
    const std::size_t from_size = size_of(stored.entry->type);
    std::byte* place =
        destination.data + static_cast<std::size_t>(stored.row_begin * parameter.columns) * to_size;
    const auto total = static_cast<std::size_t>(stored.entry->shape.count());
    for (std::size_t at = 0; at < total; at += elements) {
      const std::size_t count = std::min(elements, total - at);
      stored.reader->read_bytes(*stored.entry, at * from_size, (at + count) * from_size, from.data());
      const bool same = stored.entry->type == destination.type;
      if (!same) converted(from.data(), to.data(), count);
      context.backend.upload(context, same ? from.data() : to.data(), place + at * to_size,
                             count * to_size);
    }
  }
}

void read_model(const Context& context, const std::string& directory, const ModelConfig& config,
                const std::vector<Parameter>& parameters, const std::vector<Tensor>& weights) {
  const HuggingFaceModel model(directory);
  ModelConfig stored = model.config().model;
  // Weights are converted, and segments cut no weight.
  stored.dtype = config.dtype;
  stored.segments = config.segments;
  const std::string differences = describe_differences(config, stored);
  check_input(differences.empty(),
              "the model in '{}' is not the configured one (configured against stored): {}", directory,
              differences);
  check(parameters.size() == model.parameters().size() && weights.size() == parameters.size(),
        "{} parameters and {} weights were given for a model of {}", parameters.size(), weights.size(),
        model.parameters().size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    check(parameters[i].name == model.parameters()[i].name, "parameter {} is '{}'; '{}' was expected", i,
          parameters[i].name, model.parameters()[i].name);
    model.read(context, i, weights[i]);
  }
}

}  // namespace agoq

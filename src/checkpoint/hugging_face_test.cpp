#include "checkpoint/hugging_face.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "backend/backend.h"
#include "checkpoint/durable_file.h"
#include "core/random.h"
#include "model/parameters.h"

namespace agoq {
namespace {

namespace fs = std::filesystem;

ModelConfig tiny_config() {
  ModelConfig config;
  config.hidden = 12;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_size = 6;
  config.feed_forward = 16;
  config.vocabulary = 11;
  config.segments = 8;
  config.norm_epsilon = 3e-6;
  config.dtype = ElementType::kFp32;
  return config;
}

/// Weights in an arena, each element another value that BF16 and FP16 represent.
struct Weights {
  explicit Weights(const ModelConfig& config) : parameters(parameters_of(config)) {
    std::uint32_t next = 1;
    for (const Parameter& parameter : parameters) {
      tensors.push_back(memory.take(config.dtype, Shape{parameter.rows, parameter.columns}));
      for (std::int64_t i = 0; i < parameter.count(); ++i) {
        // 128 values per binade, over 30 binades.
        const float value = std::ldexp(1.0f + static_cast<float>(next % 128) / 128,
                                       static_cast<int>(next / 128) % 24 - 12);
        ++next;
        if (config.dtype == ElementType::kFp64) tensors.back().as<double>()[i] = value;
        if (config.dtype == ElementType::kFp32) tensors.back().as<float>()[i] = value;
        if (config.dtype == ElementType::kBf16) tensors.back().as<Bf16>()[i] = to_bf16(value);
      }
    }
  }
  void clear() {
    for (const Tensor& tensor : tensors) std::memset(tensor.data, 0xFF, tensor.bytes());
  }
  std::vector<double> values(std::size_t p) const {
    std::vector<double> result;
    for (std::int64_t i = 0; i < tensors[p].count(); ++i) {
      switch (tensors[p].type) {
        case ElementType::kFp64: result.push_back(tensors[p].as<double>()[i]); break;
        case ElementType::kFp32: result.push_back(static_cast<double>(tensors[p].as<float>()[i])); break;
        default: result.push_back(static_cast<double>(to_float(tensors[p].as<Bf16>()[i])));
      }
    }
    return result;
  }

  Arena memory{"weights", host_allocator(), std::size_t{1} << 20};
  std::vector<Parameter> parameters;
  std::vector<Tensor> tensors;
};

class HuggingFace : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ =
        fs::path(testing::TempDir()) / fmt::format("hugging_face_{}_{}", info->name(), ::getpid());
    fs::create_directories(directory_);
  }
  void TearDown() override { fs::remove_all(directory_); }

  std::string path(const char* name) const { return (directory_ / name).string(); }
  void write(const ModelConfig& config, const Weights& weights) const {
    write_model(context_, directory_.string(), {config, 64, 10}, weights.parameters, weights.tensors);
  }
  void read(const ModelConfig& config, const Weights& weights) const {
    read_model(context_, directory_.string(), config, weights.parameters, weights.tensors);
  }
  std::string error_of_reading(const ModelConfig& config, const Weights& weights) const {
    try {
      read(config, weights);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos) << error.what();
      return error.what();
    }
    ADD_FAILURE() << "the directory was accepted";
    return "";
  }

  fs::path directory_;
  Arena workspace_{"workspace", host_allocator(), 4096};
  Context context_{cpu_backend(), {}, workspace_, {}};
};

std::string error_of_parsing(const std::string& json) {
  try {
    parse_config_json(json, "config.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput) << json;
    EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos) << error.what();
    EXPECT_NE(std::string_view(error.what()).find("config.json"), std::string_view::npos)
        << error.what();
    return error.what();
  }
  ADD_FAILURE() << "accepted: " << json;
  return "";
}

/// A LLaMA configuration with `more` keys.
std::string llama_json(const std::string& more) {
  return R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 96, "vocab_size": 100)" +
         (more.empty() ? "" : ", " + more) + "}";
}

TEST(HuggingFaceConfigJson, ReadsBackWhatItWrites) {
  std::vector<ModelConfig> configs(5, tiny_config());
  configs[1].rope = {500000.0, RopeScaling::kLinear, 2.5, 1, 4, 8192};
  configs[2].rope = {500000.0, RopeScaling::kLlama3, 32, 1.5, 4.5, 4096};
  configs[2].tied_embeddings = true;
  configs[3].norm = NormKind::kLayerNorm;
  configs[3].dtype = ElementType::kBf16;
  configs[4].dtype = ElementType::kFp64;
  configs[4].initial_deviation = 0.017;
  for (const ModelConfig& config : configs) {
    const HuggingFaceConfig read = parse_config_json(to_config_json({config, 777, 256}), "config.json");
    EXPECT_EQ(describe_differences(config, read.model), "");
    EXPECT_EQ(read.model.initial_deviation, config.initial_deviation);
    EXPECT_EQ(read.positions, 777);
    EXPECT_EQ(read.end_of_document, 256);
  }
  EXPECT_EQ(parse_config_json(to_config_json({tiny_config()}), "config.json").end_of_document, -1);
}

TEST(HuggingFaceConfigJson, FillsInTransformersDefaults) {
  const ModelConfig model = parse_config_json(llama_json(""), "config.json").model;
  EXPECT_EQ(model.kv_heads, 4);
  EXPECT_EQ(model.head_size, 16);
  EXPECT_EQ(model.norm_epsilon, 1e-6);
  EXPECT_EQ(model.rope.theta, 10000.0);
  EXPECT_EQ(model.rope.scaling, RopeScaling::kPlain);
  EXPECT_EQ(model.dtype, ElementType::kFp32);
  EXPECT_FALSE(model.tied_embeddings);
  EXPECT_EQ(model.segments, 16);
  // 88 is a multiple of 8 and not of 16.
  EXPECT_EQ(parse_config_json(R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
      "num_attention_heads": 4, "intermediate_size": 88, "vocab_size": 100})",
                              "config.json")
                .model.segments,
            8);
}

TEST(HuggingFaceConfigJson, ReadsBothSpellingsOfRopeAndDtype) {
  const std::string scaling =
      R"("factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192)";
  const std::string older[] = {
      R"("rope_theta": 500000.0, "torch_dtype": "bfloat16", "rope_scaling": {"rope_type": "llama3", )" +
          scaling + "}",
      R"("rope_theta": 500000.0, "torch_dtype": "float16", "rope_scaling": {"type": "llama3", )" +
          scaling + "}"};
  const std::string newer =
      R"("dtype": "bfloat16", "rope_scaling": null, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", )" +
      scaling + "}";
  const ModelConfig model = parse_config_json(llama_json(newer), "config.json").model;
  EXPECT_EQ(model.rope.theta, 500000.0);
  EXPECT_EQ(model.rope.scaling, RopeScaling::kLlama3);
  EXPECT_EQ(model.rope.factor, 8.0);
  EXPECT_EQ(model.rope.original_positions, 8192);
  EXPECT_EQ(model.dtype, ElementType::kBf16);
  for (const std::string& spelling : older) {
    EXPECT_EQ(describe_differences(parse_config_json(llama_json(spelling), "config.json").model, model),
              "");
  }
}

TEST(HuggingFaceConfigJson, AcceptsWhatRealFilesCarry) {
  EXPECT_NO_THROW(
      parse_config_json(llama_json(R"("_name_or_path": "x", "architectures": ["LlamaForCausalLM"],
      "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000, "eos_token_id": [128001, 128008],
      "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 131072, "mlp_bias": false,
      "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "torch_dtype": "bfloat16",
      "transformers_version": "4.43.0", "use_cache": true, "quantization_config": null, "pad_token_id": null)"),
                        "config.json"));
}

TEST(HuggingFaceConfigJson, RefusesWhatIsNotComputedHere) {
  const auto expect = [](const std::string& more, const std::string& part) {
    const std::string text = error_of_parsing(llama_json(more));
    EXPECT_NE(text.find(part), std::string::npos) << more << " gave: " << text;
  };
  expect(R"("attention_bias": true)", "attention_bias = true");
  expect(R"("mlp_bias": true)", "mlp_bias = true");
  expect(R"("hidden_act": "gelu")", "hidden_act = \"gelu\"");
  expect(R"("sliding_window": 4096)", "sliding_window = 4096");
  expect(R"("attention_dropout": 0.1)", "attention_dropout = 0.1");
  expect(R"("clip_qkv": 8.0)", "clip_qkv = 8.0");
  expect(R"("layer_types": ["full_attention", "sliding_attention"])", "sliding_attention");
  expect(R"("quantization_config": {"quant_method": "awq"})", "quantization_config");
  expect(R"("rope_scaling": {"rope_type": "yarn", "factor": 4.0})", "rope_type 'yarn'");
  expect(R"("rope_scaling": {"rope_type": "linear"})", "does not give rope_scaling.factor");
  expect(R"("rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32})",
         "rope_scaling.beta_fast");
  expect(
      R"("rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
           "original_max_position_embeddings": 8192})",
      "high_freq_factor must be above");
  expect(R"("rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5})",
         "partial_rotary_factor");
  expect(R"("rope_theta": 0)", "rope_theta");
  expect(R"("use_qk_norm": true)", "use_qk_norm = true is not known");
  expect(R"("dtype": "float8_e4m3fn")", "dtype 'float8_e4m3fn'");
  expect(R"("head_dim": 15)", "even");
  expect(R"("num_key_value_heads": 3)", "multiple");
  expect(R"("num_key_value_heads": 0)", "num_key_value_heads");
  expect(R"("tie_word_embeddings": 1)", "tie_word_embeddings");
  expect(R"("rms_norm_eps": "small")", "rms_norm_eps");
  expect(R"("rms_norm_eps": 0)", "norm_epsilon");
  expect(R"("hidden_size": 64)", "'hidden_size' stands twice");
  expect(R"("head_dim": 4294967296)", "head_dim");
  expect(R"("agoq": {"segments": 5})", "segments");
  EXPECT_NE(error_of_parsing(R"({"model_type": "mistral"})").find("model_type 'mistral'"),
            std::string::npos);
  EXPECT_NE(error_of_parsing(R"({"model_type": "llama"})").find("does not give hidden_size"),
            std::string::npos);
  EXPECT_NE(error_of_parsing("[1]").find("not a JSON object"), std::string::npos);
  EXPECT_NE(error_of_parsing("{").find("broken"), std::string::npos);
  EXPECT_NE(error_of_parsing(std::string(100'000, '[')).find("nested"), std::string::npos);
}

TEST(HuggingFaceConfigJson, SaysWhatDiffers) {
  ModelConfig other = tiny_config();
  other.hidden = 24;
  other.rope.scaling = RopeScaling::kLinear;
  other.tied_embeddings = true;
  EXPECT_EQ(
      describe_differences(tiny_config(), other),
      "hidden 12 against 24, rope_scaling plain against linear, tied_embeddings false against true");
}

TEST_F(HuggingFace, NamesAndCutsTensorsAsLlamaForCausalLMDoes) {
  const ModelConfig config = tiny_config();
  const Weights weights(config);
  write(config, weights);
  const SafetensorsReader file(path("model.safetensors"));
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.entries().size(), 3u + 2u * 9u);
  const ParameterIndex index = index_parameters(config);
  // Where each tensor's first element stands in our parameters.
  const auto expect = [&](const std::string& name, Shape shape, std::size_t parameter,
                          std::int64_t row) {
    const SafetensorsEntry& entry = file.entry(name, ElementType::kFp32, shape);
    std::vector<float> values(static_cast<std::size_t>(shape.count()));
    file.read(entry, values.data());
    const float* expected =
        weights.tensors[parameter].as<float>() + row * weights.tensors[parameter].width();
    EXPECT_EQ(std::memcmp(values.data(), expected, entry.bytes()), 0) << name;
  };
  expect("model.embed_tokens.weight", {11, 12}, index.embedding, 0);
  expect("lm_head.weight", {11, 12}, index.head, 0);
  expect("model.norm.weight", {12}, index.final_norm, 0);
  for (std::size_t l = 0; l < 2; ++l) {
    const std::string layer = fmt::format("model.layers.{}.", l);
    const BlockParameters& block = index.blocks[l];
    expect(layer + "input_layernorm.weight", {12}, block.norm1, 0);
    expect(layer + "self_attn.q_proj.weight", {24, 12}, block.qkv, 0);
    expect(layer + "self_attn.k_proj.weight", {12, 12}, block.qkv, 24);
    expect(layer + "self_attn.v_proj.weight", {12, 12}, block.qkv, 36);
    expect(layer + "self_attn.o_proj.weight", {12, 24}, block.o, 0);
    expect(layer + "post_attention_layernorm.weight", {12}, block.norm2, 0);
    expect(layer + "mlp.gate_proj.weight", {16, 12}, block.gate_up, 0);
    expect(layer + "mlp.up_proj.weight", {16, 12}, block.gate_up, 16);
    expect(layer + "mlp.down_proj.weight", {12, 16}, block.down, 0);
  }
}

TEST_F(HuggingFace, ReadsBackEveryTypeIntoEveryType) {
  for (const ElementType from : {ElementType::kFp64, ElementType::kFp32, ElementType::kBf16}) {
    for (const ElementType to : {ElementType::kFp64, ElementType::kFp32, ElementType::kBf16}) {
      ModelConfig config = tiny_config();
      config.dtype = from;
      const Weights written(config);
      write(config, written);
      config.dtype = to;
      Weights read_back(config);
      read_back.clear();
      read(config, read_back);
      for (std::size_t p = 0; p < written.parameters.size(); ++p) {
        EXPECT_EQ(read_back.values(p), written.values(p)) << written.parameters[p].name;
      }
    }
  }
}

TEST_F(HuggingFace, LeavesOutTheTiedHeadAndParameterlessNorms) {
  ModelConfig config = tiny_config();
  config.tied_embeddings = true;
  const Weights tied(config);
  write(config, tied);
  EXPECT_EQ(SafetensorsReader(path("model.safetensors")).find("lm_head.weight"), nullptr);
  Weights read_back(config);
  read_back.clear();
  read(config, read_back);
  EXPECT_EQ(read_back.values(0), tied.values(0));

  config.norm = NormKind::kLayerNorm;
  config.norm_epsilon = 1e-5;
  const Weights olmo(config);
  write(config, olmo);
  EXPECT_EQ(SafetensorsReader(path("model.safetensors")).entries().size(), 1u + 2u * 7u);
  EXPECT_EQ(read_config(directory_.string()).model.norm, NormKind::kLayerNorm);
  Weights olmo_back(config);
  olmo_back.clear();
  read(config, olmo_back);
  EXPECT_EQ(olmo_back.values(1), olmo.values(1));

  config.norm_epsilon = 1e-6;  // OLMo's code has another
  EXPECT_THROW(write(config, olmo), Error);
}

TEST_F(HuggingFace, ReadsShards) {
  const ModelConfig config = tiny_config();
  const Weights weights(config);
  write(config, weights);
  // The same tensors over three files.
  {
    const SafetensorsReader whole(path("model.safetensors"));
    std::vector<std::vector<std::byte>> bytes;
    std::vector<SafetensorsSource> shards[3];
    std::string map;
    for (std::size_t i = 0; i < whole.entries().size(); ++i) {
      const SafetensorsEntry& entry = whole.entries()[i];
      bytes.emplace_back(entry.bytes());
      whole.read(entry, bytes.back().data());
      shards[i % 3].push_back(
          safetensors_source(entry.name, {bytes.back().data(), entry.type, entry.shape}));
      map += fmt::format("{}\"{}\": \"model-{}-of-3.safetensors\"", map.empty() ? "" : ", ", entry.name,
                         i % 3 + 1);
    }
    for (int shard = 0; shard < 3; ++shard) {
      write_safetensors(path(fmt::format("model-{}-of-3.safetensors", shard + 1).c_str()), shards[shard],
                        {});
    }
    write_durably(path("model.safetensors.index.json"),
                  "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {" + map + "}}");
  }
  fs::remove(path("model.safetensors"));
  Weights read_back(config);
  read_back.clear();
  read(config, read_back);
  for (std::size_t p = 0; p < weights.parameters.size(); ++p) {
    EXPECT_EQ(read_back.values(p), weights.values(p)) << weights.parameters[p].name;
  }

  write_durably(path("model.safetensors.index.json"),
                R"({"weight_map": {"a": "../model-1-of-3.safetensors"}})");
  EXPECT_NE(error_of_reading(config, read_back).find("not a file beside it"), std::string::npos);
  write_durably(path("model.safetensors.index.json"),
                R"({"weight_map": {"a": "model-1-of-3.safetensors"}})");
  EXPECT_NE(error_of_reading(config, read_back).find("no tensor 'a'"), std::string::npos);
  write_durably(path("model.safetensors.index.json"), R"({"weight_map": 1})");
  EXPECT_NE(error_of_reading(config, read_back).find("weight_map"), std::string::npos);
  fs::remove(path("model.safetensors.index.json"));
  EXPECT_NE(error_of_reading(config, read_back).find("neither"), std::string::npos);
}

TEST_F(HuggingFace, SaysWhatDoesNotFit) {
  const ModelConfig config = tiny_config();
  const Weights weights(config);
  write(config, weights);
  ModelConfig other = config;
  other.layers = 3;
  EXPECT_NE(error_of_reading(other, Weights(other)).find("layers 3 against 2"), std::string::npos);

  // config.json and weights that do not belong together.
  write_config(path("config.json"), {other});
  EXPECT_NE(error_of_reading(other, Weights(other)).find("no tensor 'model.layers.2."),
            std::string::npos);
  other.layers = 1;
  write_config(path("config.json"), {other});
  EXPECT_NE(error_of_reading(other, Weights(other)).find("'model.layers.1."), std::string::npos);
  other = config;
  other.vocabulary = 13;
  write_config(path("config.json"), {other});
  EXPECT_NE(error_of_reading(other, Weights(other)).find("[11, 12]; by config.json it has [13, 12]"),
            std::string::npos);
  fs::remove(path("config.json"));
  EXPECT_NE(error_of_reading(config, weights).find("config.json"), std::string::npos);
}

}  // namespace
}  // namespace agoq

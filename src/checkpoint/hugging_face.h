// Models in Hugging Face layout: a directory with config.json and model.safetensors (or shards under
// model.safetensors.index.json), of architecture LlamaForCausalLM, or OlmoForCausalLM for layer norms
// without parameters.
//
// A parameter of ours is one or more of their tensors, as ranges of its rows (HD = head size):
//   embedding          model.embed_tokens.weight                          [V, H]
//   layers.N.norm1     model.layers.N.input_layernorm.weight              [H]
//   layers.N.qkv       model.layers.N.self_attn.{q,k,v}_proj.weight       [heads HD, H], [kv HD, H]
//   twice layers.N.o         model.layers.N.self_attn.o_proj.weight             [H, heads HD]
//   layers.N.norm2     model.layers.N.post_attention_layernorm.weight     [H]
//   layers.N.gate_up   model.layers.N.mlp.{gate,up}_proj.weight           [I, H] each
//   layers.N.down      model.layers.N.mlp.down_proj.weight                [H, I]
//   final_norm         model.norm.weight                                  [H]
//   head               lm_head.weight                                     [V, H]; not stored when tied
// Rotary pairs are (i, i + HD / 2) on both sides, so no row changes its place.
//
// config.json is written in the spelling of transformers 4 (rope_scaling, torch_dtype), which 5 reads
// too; both spellings are read. What ModelConfig has and Hugging Face has not stands under "agoq".
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/context.h"
#include "checkpoint/safetensors.h"
#include "core/tensor.h"
#include "gradients/parameter.h"
#include "model/model_config.h"

namespace agoq {

/// What config.json says.
struct HuggingFaceConfig {
  /// loss_chunk is not part of the file. `segments`, where the file does not name it, is the largest
  /// power of two up to 16 that fits. A model stored in FP16 becomes BF16: FP16 is not trained here.
  ModelConfig model;
  std::int64_t positions = 2048;      // max_position_embeddings: the longest sequence
  std::int64_t end_of_document = -1;  // eos_token_id; -1: none
};

/// The text of config.json.
std::string to_config_json(const HuggingFaceConfig& config);
/// Reads the text of config.json; `source` names it in messages. Throws Error (kInput) for a setting
/// that this engine does not compute: another activation, biases, sliding windows, other rope scalings,
/// unknown keys.
HuggingFaceConfig parse_config_json(std::string_view text, const std::string& source);

/// Reads `path`, or config.json in it if it is a directory.
HuggingFaceConfig read_config(const std::string& path);
ModelConfig read_model_config(const std::string& path);
void write_config(const std::string& path, const HuggingFaceConfig& config);

/// "hidden 256 against 512, layers 5 against 6": what makes weights and state of one model unfit for
/// the other, in the order (first, second); empty if nothing does.
std::string describe_differences(const ModelConfig& first, const ModelConfig& second);

/// One tensor of the Hugging Face model: rows [row_begin, row_end) of a parameter.
struct HuggingFaceTensor {
  std::string name;
  std::size_t parameter;  // index into the parameters
  std::int64_t row_begin;
  std::int64_t row_end;
  Shape shape;
};

std::vector<HuggingFaceTensor> hugging_face_tensors(const ModelConfig& config,
                                                    const std::vector<Parameter>& parameters);

/// Host memory through which weights pass between files and backend memory, at most.
inline constexpr std::size_t kTransferBytes = std::size_t{1} << 20;

/// Writes all bytes of a tensor in backend memory to the sink.
void read_through(const Context&, const std::byte* source, std::size_t bytes, const ByteSink& sink);

/// The weights as the tensors of model.safetensors, each in its own element type. Of `ranks` that write
/// the file together, rank `rank` writes the rows that are its own (own_rows of each parameter).
std::vector<SafetensorsSource> weight_sources(const Context&, const ModelConfig& config,
                                              const std::vector<Parameter>& parameters,
                                              const std::vector<Tensor>& weights, int ranks = 1,
                                              int rank = 0);
/// The metadata of model.safetensors.
SafetensorsMetadata weight_metadata();

/// Writes the weights.
void write_weights(const Context&, const std::string& path, const ModelConfig& config,
                   const std::vector<Parameter>& parameters, const std::vector<Tensor>& weights);

/// Writes config.json and model.safetensors into `directory`, which is made if need be. Throws Error
/// (kInput) if transformers would compute something else from them.
void write_model(const Context&, const std::string& directory, const HuggingFaceConfig& config,
                 const std::vector<Parameter>& parameters, const std::vector<Tensor>& weights);

/// A model directory opened for reading. Opening checks that exactly the tensors that config.json
/// calls for are there, in their shapes; reading takes one parameter at a time.
class HuggingFaceModel {
 public:
  explicit HuggingFaceModel(const std::string& directory);

  const HuggingFaceConfig& config() const { return config_; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  /// Whether all tensors of the parameter have this type in the file, so that reading converts nothing.
  bool is_stored_as(std::size_t parameter, ElementType type) const;
  /// Reads a parameter into `destination`, fp64, fp32 or bf16 [rows, columns] in backend memory,
  /// converting if the file has another type (to BF16 through FP32, nearest even).
  void read(const Context&, std::size_t parameter, const Tensor& destination) const;

 private:
  struct Stored {
    const SafetensorsReader* reader;
    const SafetensorsEntry* entry;
    std::int64_t row_begin;
  };
  /// Where every tensor of the directory is.
  std::map<std::string, std::pair<const SafetensorsReader*, const SafetensorsEntry*>> open_files();

  std::string directory_;
  HuggingFaceConfig config_;
  std::vector<Parameter> parameters_;
  std::deque<SafetensorsReader> readers_;
  std::vector<std::vector<Stored>> stored_;  // per parameter
};

/// Reads all weights of `directory` into `weights`, one tensor per parameter of a model of `config`.
/// Throws Error (kInput) that says what differs if the directory holds another model.
void read_model(const Context&, const std::string& directory, const ModelConfig& config,
                const std::vector<Parameter>& parameters, const std::vector<Tensor>& weights);

}  // namespace agoq

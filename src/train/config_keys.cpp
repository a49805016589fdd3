// The table of configuration keys: section, name, what it may be, what it means, where it is held.
#include <cmath>
#include <limits>
#include <utility>

#include "comm/launch.h"
#include "train/run_config.h"

namespace agoq {

QuantFormat parse_signed_format(const std::string& text) {
  const QuantFormat format = parse_format(text);
  check_input(traits_of(format.code).is_signed,
              "'{}' cannot hold negative values: choose a format with a sign, such as dynamic8/256/fp32",
              text);
  return format;
}

namespace {

// A captureless lambda from a RunConfig to the field that a key sets.
template <typename Field>
using Access = Field& (*)(RunConfig&);

// get() only reads, but one accessor serves both directions.
template <typename Field>
const Field& read(Access<Field> access, const RunConfig& config) {
  return access(const_cast<RunConfig&>(config));
}

// Beyond it a TOML integer of another reader may lose digits; no key comes near.
constexpr std::int64_t kLargest = std::int64_t{1} << 53;

template <typename Field>
ConfigKey integer(std::string_view section, std::string_view name, Access<Field> access,
                  std::int64_t least, std::int64_t largest, std::string_view description) {
  std::string allowed = fmt::format("an integer from {} to {}", least, largest);
  return {std::string(section),
          std::string(name),
          std::move(allowed),
          std::string(description),
          [access](const RunConfig& config) -> Setting {
            return static_cast<std::int64_t>(read(access, config));
          },
          [access, least, largest](RunConfig& config, const Setting& setting) {
            const auto value = std::get<std::int64_t>(setting);
            if (value < least || value > largest) return false;
            access(config) = static_cast<Field>(value);
            return true;
          }};
}

// A range of real numbers; `open` ends are left out.
struct Range {
  double least;
  double largest;
  bool open_least = false;
  bool open_largest = false;

  bool holds(double value) const {
    return (open_least ? value > least : value >= least) &&
           (open_largest ? value < largest : value <= largest) && std::isfinite(value);
  }
  std::string to_string() const {
    const std::string from = fmt::format("{} {}", open_least ? "above" : "from", least);
    if (largest == std::numeric_limits<double>::infinity()) return "a number " + from;
    return fmt::format("a number {} {} {}", from, open_largest ? "and below" : "to", largest);
  }
};
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Range kPositive{0, kInfinity, true};
constexpr Range kNotNegative{0, kInfinity};
constexpr Range kFraction{0, 1};
constexpr Range kBelowOne{0, 1, false, true};

ConfigKey real(std::string_view section, std::string_view name, Access<double> access, Range range,
               std::string_view description) {
  return {std::string(section),
          std::string(name),
          range.to_string(),
          std::string(description),
          [access](const RunConfig& config) -> Setting { return read(access, config); },
          [access, range](RunConfig& config, const Setting& setting) {
            const double value = std::get<double>(setting);
            if (!range.holds(value)) return false;
            access(config) = value;
            return true;
          }};
}

ConfigKey boolean(std::string_view section, std::string_view name, Access<bool> access,
                  std::string_view description) {
  return {std::string(section),
          std::string(name),
          "true or false",
          std::string(description),
          [access](const RunConfig& config) -> Setting { return read(access, config); },
          [access](RunConfig& config, const Setting& setting) {
            access(config) = std::get<bool>(setting);
            return true;
          }};
}

ConfigKey text(std::string_view section, std::string_view name, Access<std::string> access,
               std::string_view description) {
  return {std::string(section),
          std::string(name),
          "a string that is not empty",
          std::string(description),
          [access](const RunConfig& config) -> Setting { return read(access, config); },
          [access](RunConfig& config, const Setting& setting) {
            const auto& value = std::get<std::string>(setting);
            if (value.empty()) return false;
            access(config) = value;
            return true;
          }};
}

ConfigKey texts(std::string_view section, std::string_view name, Access<std::vector<std::string>> access,
                std::string_view description) {
  return {std::string(section),
          std::string(name),
          "a list of strings that are not empty",
          std::string(description),
          [access](const RunConfig& config) -> Setting { return read(access, config); },
          [access](RunConfig& config, const Setting& setting) {
            const auto& values = std::get<std::vector<std::string>>(setting);
            for (const std::string& value : values) {
              if (value.empty()) return false;
            }
            access(config) = values;
            return true;
          }};
}

template <typename Enum>
ConfigKey choice(std::string_view section, std::string_view name, Access<Enum> access,
                 std::vector<std::pair<std::string, Enum>> choices, std::string_view description) {
  std::string allowed = "one of";
  for (const auto& [word, value] : choices) {
    allowed += (allowed == "one of" ? " \"" : ", \"") + word + "\"";
  }
  return {std::string(section),
          std::string(name),
          std::move(allowed),
          std::string(description),
          [access, choices](const RunConfig& config) -> Setting {
            for (const auto& [word, value] : choices) {
              if (value == read(access, config)) return word;
            }
            return std::string("?");
          },
          [access, choices](RunConfig& config, const Setting& setting) {
            for (const auto& [word, value] : choices) {
              if (word != std::get<std::string>(setting)) continue;
              access(config) = value;
              return true;
            }
            return false;
          }};
}

ConfigKey format(std::string_view section, std::string_view name, Access<QuantFormat> access,
                 std::string_view description) {
  return {std::string(section),
          std::string(name),
          "a format (agoq formats lists them)",
          std::string(description),
          [access](const RunConfig& config) -> Setting { return read(access, config).to_string(); },
          [access](RunConfig& config, const Setting& setting) {
            access(config) = parse_signed_format(std::get<std::string>(setting));
            return true;
          }};
}

// Without it a key is fixed: a new one stays as it was until somebody has thought about it.
ConfigKey may_change(ConfigKey key) {
  key.may_change_on_resume = true;
  return key;
}

// Not an Access: which array element a key sets is data.
ConfigKey role_format(std::string_view name, SlotRole role, std::string_view what) {
  const auto index = static_cast<std::size_t>(role);
  return {"activations",
          std::string(name),
          "\"policy\" or a format (agoq formats lists them)",
          fmt::format("format of {}; \"policy\": what the policy says", what),
          [index](const RunConfig& config) -> Setting {
            const auto& chosen = config.activations.role_format[index];
            return chosen ? chosen->to_string() : std::string("policy");
          },
          [index](RunConfig& config, const Setting& setting) {
            const auto& value = std::get<std::string>(setting);
            auto& chosen = config.activations.role_format[index];
            chosen.reset();
            if (value != "policy") chosen = parse_signed_format(value);
            return true;
          }};
}

std::vector<ConfigKey> make_keys() {
  using C = RunConfig;
  return {
      integer<std::int64_t>(
          "model", "hidden", [](C& c) -> auto& { return c.model.hidden; }, 1, kLargest,
          "width of the residual stream"),
      integer<std::int64_t>(
          "model", "layers", [](C& c) -> auto& { return c.model.layers; }, 1, 100000,
          "transformer blocks"),
      integer<int>(
          "model", "heads", [](C& c) -> auto& { return c.model.heads; }, 1, 65536, "query heads"),
      integer<int>(
          "model", "kv_heads", [](C& c) -> auto& { return c.model.kv_heads; }, 1, 65536,
          "key and value heads; divides heads"),
      integer<int>(
          "model", "head_size", [](C& c) -> auto& { return c.model.head_size; }, 2, 65536,
          "elements of one head; even"),
      integer<std::int64_t>(
          "model", "feed_forward", [](C& c) -> auto& { return c.model.feed_forward; }, 1, kLargest,
          "width of the gated MLP"),
      integer<std::int64_t>(
          "model", "vocabulary", [](C& c) -> auto& { return c.model.vocabulary; }, 2,
          std::numeric_limits<std::int32_t>::max(),
          "token ids; the built-in vocabulary has 257: the bytes and the document end"),
      choice<NormKind>(
          "model", "norm", [](C& c) -> auto& { return c.model.norm; },
          {{"rmsnorm", NormKind::kRmsNorm}, {"layernorm", NormKind::kLayerNorm}},
          "normalisation; layernorm has no parameters (OLMo)"),
      real(
          "model", "norm_epsilon", [](C& c) -> auto& { return c.model.norm_epsilon; }, kPositive,
          "added to the mean square under the root"),
      boolean(
          "model", "tied_embeddings", [](C& c) -> auto& { return c.model.tied_embeddings; },
          "the head uses the embedding's weight"),
      choice<ElementType>(
          "model", "dtype", [](C& c) -> auto& { return c.model.dtype; },
          {{"bf16", ElementType::kBf16}, {"fp32", ElementType::kFp32}},
          "element type of weights and activations"),
      real(
          "model", "rope_theta", [](C& c) -> auto& { return c.model.rope.theta; }, kPositive,
          "base of the rotary wavelengths"),
      choice<RopeScaling>(
          "model", "rope_scaling", [](C& c) -> auto& { return c.model.rope.scaling; },
          {{"plain", RopeScaling::kPlain},
           {"linear", RopeScaling::kLinear},
           {"llama3", RopeScaling::kLlama3}},
          "how rotary positions are stretched"),
      real(
          "model", "rope_factor", [](C& c) -> auto& { return c.model.rope.factor; }, {1, kInfinity},
          "stretching factor of linear and llama3 scaling"),
      real(
          "model", "rope_low_frequency_factor",
          [](C& c) -> auto& { return c.model.rope.low_frequency_factor; }, kPositive,
          "llama3 scaling: where full stretching ends"),
      real(
          "model", "rope_high_frequency_factor",
          [](C& c) -> auto& { return c.model.rope.high_frequency_factor; }, kPositive,
          "llama3 scaling: where stretching begins; above the low one"),
      integer<std::int64_t>(
          "model", "rope_original_positions",
          [](C& c) -> auto& { return c.model.rope.original_positions; }, 1, kLargest,
          "llama3 scaling: positions of the unstretched model"),
      integer<std::int64_t>(
          "model", "segments", [](C& c) -> auto& { return c.model.segments; }, 1, 65536,
          "parts into which tensor parallelism may cut a row; blocks restart in each"),
      may_change(integer<std::int64_t>(
          "model", "loss_chunk", [](C& c) -> auto& { return c.model.loss_chunk; }, 1, kLargest,
          "tokens whose logits exist at once")),
      real(
          "model", "initial_deviation", [](C& c) -> auto& { return c.model.initial_deviation; },
          kPositive, "standard deviation of initial weights"),

      texts(
          "data", "paths", [](C& c) -> auto& { return c.data.paths; },
          "text files and folders, relative to the working directory"),
      texts(
          "data", "extensions", [](C& c) -> auto& { return c.data.extensions; },
          "endings of the files that are read from folders"),
      integer<std::int64_t>(
          "data", "holdout_every", [](C& c) -> auto& { return c.data.holdout_every; }, 2, kLargest,
          "one document in so many is held out for validation"),
      integer<std::int64_t>(
          "data", "holdout_index", [](C& c) -> auto& { return c.data.holdout_index; }, 0, kLargest,
          "which one: document d with d % holdout_every == holdout_index"),
      boolean(
          "data", "document_attention", [](C& c) -> auto& { return c.data.document_attention; },
          "tokens attend within their document only; false: across the whole sequence"),
      integer<std::uint64_t>(
          "data", "seed", [](C& c) -> auto& { return c.data.seed; }, 0, kLargest,
          "of the order of the training documents"),

      may_change(integer<std::int64_t>(
          "train", "steps", [](C& c) -> auto& { return c.run.steps; }, 1,
          std::numeric_limits<std::int32_t>::max(), "optimizer steps")),
      integer<std::int64_t>(
          "train", "sequence", [](C& c) -> auto& { return c.run.sequence; }, 1, kLargest,
          "tokens of a sequence"),
      integer<std::int64_t>(
          "train", "micro_batch", [](C& c) -> auto& { return c.run.micro_batch; }, 1, kLargest,
          "sequences of a micro-batch"),
      integer<std::int64_t>(
          "train", "micro_batches", [](C& c) -> auto& { return c.run.micro_batches; }, 1, kLargest,
          "micro-batches of a step"),
      may_change(integer<std::int64_t>(
          "train", "validate_every", [](C& c) -> auto& { return c.run.validate_every; }, 0, kLargest,
          "steps between validations; 0: after the last step only")),
      may_change(integer<std::int64_t>(
          "train", "validation_batches", [](C& c) -> auto& { return c.run.validation_batches; }, 0,
          kLargest, "micro-batches of one validation; 0: every validation token")),

      may_change(real(
          "optimizer", "learning_rate", [](C& c) -> auto& { return c.optimizer.learning_rate; },
          kPositive, "peak learning rate of AdamW")),
      may_change(choice<ScheduleKind>(
          "optimizer", "schedule", [](C& c) -> auto& { return c.optimizer.schedule; },
          {{"cosine", ScheduleKind::kCosine},
           {"linear", ScheduleKind::kLinear},
           {"warmup-stable-decay", ScheduleKind::kWarmupStableDecay}},
          "shape of the learning rate after warm-up")),
      may_change(integer<std::int64_t>(
          "optimizer", "warmup_steps", [](C& c) -> auto& { return c.optimizer.warmup_steps; }, 0,
          kLargest, "steps of linear warm-up")),
      may_change(integer<std::int64_t>(
          "optimizer", "decay_steps", [](C& c) -> auto& { return c.optimizer.decay_steps; }, 0, kLargest,
          "warmup-stable-decay: steps of the final decay")),
      may_change(real(
          "optimizer", "final_fraction", [](C& c) -> auto& { return c.optimizer.final_fraction; },
          kFraction, "share of the peak learning rate at the last step")),
      real(
          "optimizer", "beta1", [](C& c) -> auto& { return c.optimizer.beta1; }, kBelowOne,
          "decay of the first moment"),
      real(
          "optimizer", "beta2", [](C& c) -> auto& { return c.optimizer.beta2; }, kBelowOne,
          "decay of the second moment"),
      may_change(real(
          "optimizer", "epsilon", [](C& c) -> auto& { return c.optimizer.epsilon; }, kPositive,
          "added to the root of the second moment")),
      may_change(real(
          "optimizer", "weight_decay", [](C& c) -> auto& { return c.optimizer.weight_decay; },
          kNotNegative, "decoupled decay of matrices; vectors have none")),
      may_change(real(
          "optimizer", "clip_norm", [](C& c) -> auto& { return c.optimizer.clip_norm; }, kNotNegative,
          "largest global gradient norm; 0: no clipping")),
      boolean(
          "optimizer", "moments_8bit", [](C& c) -> auto& { return c.optimizer.moments_8bit; },
          "block-wise 8-bit moments; false: FP32"),
      choice<MasterKind>(
          "optimizer", "master", [](C& c) -> auto& { return c.optimizer.master; },
          {{"none", MasterKind::kNone},
           {"fp32", MasterKind::kFp32},
           {"remainder", MasterKind::kRemainder}},
          "master weights of a bf16 model; remainder: 16 bits that make bf16 an FP32"),

      may_change(choice<SavePolicy>(
          "activations", "policy", [](C& c) -> auto& { return c.activations.policy; },
          {{"keep", SavePolicy::kKeep},
           {"exact", SavePolicy::kExact},
           {"agoq", SavePolicy::kAgoq},
           {"recompute", SavePolicy::kRecompute},
           {"uniform", SavePolicy::kUniform}},
          "what is saved from forward to backward")),
      may_change(format(
          "activations", "format", [](C& c) -> auto& { return c.activations.format; },
          "format of what the policies agoq and uniform quantise")),
      may_change(role_format("norm_input", SlotRole::kNormInput, "the inputs of norms")),
      may_change(role_format("norm_output", SlotRole::kNormOutput, "the outputs of norms")),
      may_change(role_format("qkv", SlotRole::kQkv, "queries, keys and values")),
      may_change(role_format("attention_output", SlotRole::kAttentionOutput, "the output of attention")),
      may_change(role_format("gate_up", SlotRole::kGateUp, "the gate and up projections")),
      may_change(role_format("mlp_hidden", SlotRole::kMlpHidden, "the input of the down projection")),
      may_change(boolean(
          "activations", "keep_rstd", [](C& c) -> auto& { return c.activations.keep_rstd; },
          "exact and agoq: keep the rstd of norms; false: recompute it")),
      may_change(integer<std::int64_t>(
          "activations", "recompute_layers",
          [](C& c) -> auto& { return c.activations.recompute_layers; }, 0, 100000,
          "first layers that keep their input only and run again in backward")),

      format(
          "gradients", "format", [](C& c) -> auto& { return c.gradients.format; },
          "format of the main gradients of matrices"),

      may_change(integer<std::int64_t>(
          "parallel", "ranks", [](C& c) -> auto& { return c.parallel.ranks; }, 0, 65536,
          "ranks that share the micro-batches of a step; 0: as many as were launched")),
      may_change(choice<GradientReduction>(
          "parallel", "reduction", [](C& c) -> auto& { return c.parallel.reduction.kind; },
          {{"quangrad", GradientReduction::kQuanGrad},
           {"library", GradientReduction::kLibrary},
           {"naive-fp8", GradientReduction::kNaiveFp8}},
          "sum of the ranks' gradients: in FP32 between 8-bit messages, the library's, or in FP8")),
      may_change(boolean(
          "parallel", "shard_optimizer", [](C& c) -> auto& { return c.parallel.reduction.sharded; },
          "ZeRO-1: each rank holds moments and masters of its share of the rows and updates those")),
      may_change(boolean(
          "parallel", "requantise_shards",
          [](C& c) -> auto& { return c.parallel.reduction.requantise_shards; },
          "shard_optimizer: the update reads requantised sums, as without it; for comparisons")),
      may_change(boolean(
          "parallel", "overlap", [](C& c) -> auto& { return c.parallel.reduction.overlap; },
          "gradients leave during the backward pass of the last micro-batch; false: after it")),
      may_change(boolean(
          "parallel", "sparse_embedding",
          [](C& c) -> auto& { return c.parallel.reduction.sparse_embedding; },
          "quangrad, replicated: of the embedding's gradient only the rows of the step's tokens leave")),
      may_change(integer<std::int64_t>(
          "parallel", "bucket_elements",
          [](C& c) -> auto& { return c.parallel.reduction.bucket_elements; }, 1, kLargest,
          "gradients that leave together; two buckets are staged")),
      may_change(integer<int>(
          "parallel", "nccl_max_ctas", [](C& c) -> auto& { return c.parallel.nccl_max_ctas; }, 0,
          kMostCtas, "thread blocks of one of NCCL's kernels at most; 0: as many as it chooses")),
      may_change(boolean(
          "parallel", "peer_copies", [](C& c) -> auto& { return c.parallel.peer_copies; },
          "GPUs that reach each other's memory exchange by their copy engines; false: by NCCL")),
      may_change(real(
          "parallel", "timeout_seconds", [](C& c) -> auto& { return c.parallel.timeout_seconds; },
          {kShortestTimeout, kLongestTimeout}, "a rank that does not answer for so long ends the run")),

      may_change(integer<std::int64_t>(
          "checkpoint", "every", [](C& c) -> auto& { return c.checkpoint.every; }, 0, kLargest,
          "steps between checkpoints; 0: after the last step only")),
      may_change(integer<std::int64_t>(
          "checkpoint", "keep", [](C& c) -> auto& { return c.checkpoint.keep; }, 1, kLargest,
          "newest checkpoints that stay")),

      may_change(text(
          "run", "directory", [](C& c) -> auto& { return c.run.directory; },
          "where the run writes, relative to the working directory")),
      may_change(choice<BackendKind>(
          "run", "device", [](C& c) -> auto& { return c.run.device; },
          {{"cpu", BackendKind::kCpu}, {"cuda", BackendKind::kCuda}},
          "what computes: the CPU or an NVIDIA GPU")),
      integer<std::uint64_t>(
          "run", "seed", [](C& c) -> auto& { return c.run.seed; }, 0, kLargest,
          "of weights and stochastic rounding; data.seed is that of the order of documents"),
      may_change(boolean(
          "run", "deterministic", [](C& c) -> auto& { return c.run.deterministic; },
          "on a GPU: the same bits in every run and after --resume, slower; a CPU's always are")),
      may_change(choice<NonFiniteAction>(
          "run", "nonfinite", [](C& c) -> auto& { return c.run.nonfinite; },
          {{"stop", NonFiniteAction::kStop}, {"skip", NonFiniteAction::kSkip}},
          "a step whose loss or gradient is NaN or infinite: fail, or go on without its update")),
      may_change(integer<std::int64_t>(
          "run", "nonfinite_limit", [](C& c) -> auto& { return c.run.nonfinite_limit; }, 1, kLargest,
          "skip: so many skipped steps in a row fail the run")),
      may_change(integer<std::int64_t>(
          "run", "threads", [](C& c) -> auto& { return c.run.threads; }, 0, 4096,
          "CPU threads; 0: one per processor")),
      may_change(integer<std::int64_t>(
          "run", "log_every", [](C& c) -> auto& { return c.run.log_every; }, 1, kLargest,
          "steps between lines of progress")),
  };
}

}  // namespace

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = make_keys();
  return keys;
}

}  // namespace agoq

#include "train/fidelity.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "backend/format_error.h"
#include "checkpoint/json_text.h"
#include "core/small_float.h"
#include "train/run_directory.h"
#include "train/run_plan.h"

namespace agoq {
namespace {

constexpr std::int64_t kDefaultTokens = 16384;

bool is_statistic(SlotRole role) { return role == SlotRole::kRstd || role == SlotRole::kLogSumExp; }

/// A trainer and the memory it lives in.
struct OwnedTrainer {
  OwnedTrainer(RunConfig run, Backend& backend)
      : config(std::move(run)),
        plan(checked_plan(config, backend)),
        arenas(backend.allocator(), plan.classes),
        trainer(config, backend, arenas) {}
  static RunPlan checked_plan(const RunConfig& config, Backend& backend) {
    RunPlan plan = plan_run(config, backend, 0, /*data_loaded=*/false);
    check_fits(plan, config, backend);
    return plan;
  }
  RunConfig config;
  RunPlan plan;
  RunArenas arenas;
  Trainer trainer;
};

/// `run` as one micro-batch of `sequences` sequences, with FP32 gradients and as little as can be that a
/// gradient does not need.
RunConfig gradient_run(const RunConfig& run, std::int64_t sequences, SavePolicy policy,
                       const QuantFormat& format) {
  RunConfig config = run;
  config.activations = {};
  config.activations.policy = policy;
  config.activations.format = format;
  config.gradients.format = exact_format(ElementType::kFp32);
  config.optimizer.moments_8bit = true;
  config.optimizer.master = MasterKind::kNone;
  config.run.micro_batch = sequences;
  config.run.micro_batches = 1;
  return config;
}

std::vector<float> to_floats(const std::vector<std::byte>& bytes, ElementType type) {
  std::vector<float> values(bytes.size() / size_of(type));
  if (type == ElementType::kBf16) {
    const auto* elements = reinterpret_cast<const Bf16*>(bytes.data());
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = to_float(elements[i]);
  } else {
    check(type == ElementType::kFp32, "fp32 and bf16 models can be measured, not {}", name_of(type));
    std::memcpy(values.data(), bytes.data(), bytes.size());
  }
  return values;
}

/// Rows of `saved`, at most kMeasuredTokens, evenly spread.
std::vector<float> sampled_rows(const Context& context, const QuantTensor& saved) {
  const Tensor exact = saved.exact();
  std::vector<std::byte> bytes(exact.bytes());
  context.backend.read(context, exact.data, bytes.data(), bytes.size());
  const std::int64_t stride = (exact.rows() + kMeasuredTokens - 1) / kMeasuredTokens;
  const std::size_t row = static_cast<std::size_t>(exact.width()) * size_of(exact.type);
  std::vector<std::byte> rows;
  for (std::int64_t r = 0; r < exact.rows(); r += stride) {
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(r) * row);
    rows.insert(rows.end(), begin, begin + static_cast<std::ptrdiff_t>(row));
  }
  return to_floats(rows, exact.type);
}

struct Sums {
  double difference = 0;  // of squares
  double reference = 0;
  double gradient = 0;
  double dot = 0;
  void add(const Sums& other) {
    difference += other.difference;
    reference += other.reference;
    gradient += other.gradient;
    dot += other.dot;
  }
  double relative() const { return std::sqrt(difference / reference); }
};

Sums sums_of(const std::vector<float>& reference, const std::vector<float>& gradient) {
  check(reference.size() == gradient.size(), "a gradient of {} elements is compared with one of {}",
        gradient.size(), reference.size());
  Sums sums;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const double value = gradient[i];
    const double expected = reference[i];
    sums.difference += (value - expected) * (value - expected);
    sums.reference += expected * expected;
    sums.gradient += value * value;
    sums.dot += value * expected;
  }
  return sums;
}

nlohmann::ordered_json distance_json(const GradientDistance& distance) {
  nlohmann::ordered_json json;
  json["cosine"] = distance.cosine;
  json["whole"] = distance.whole;
  for (const auto& [kind, value] : distance.kinds) json["kinds"][std::string(name_of(kind))] = value;
  return json;
}

}  // namespace

std::vector<FidelitySetting> default_fidelity_settings() {
  return {{"INT8/32", SavePolicy::kAgoq, parse_format("int8/32/fp32")},
          {"NF4/32 two-level", SavePolicy::kAgoq, parse_format("nf4/32/two-level")},
          {"NF4/128", SavePolicy::kAgoq, parse_format("nf4/128/fp32")},
          {"E2M1/128", SavePolicy::kAgoq, parse_format("e2m1/128/fp32")},
          {"INT4/128", SavePolicy::kAgoq, parse_format("int4/128/fp32")},
          {"FP4/128", SavePolicy::kAgoq, parse_format("bnbfp4/128/fp32")},
          {"uniform FP4/128", SavePolicy::kUniform, parse_format("bnbfp4/128/fp32")}};
}

FidelitySetting parse_fidelity_setting(const std::string& text) {
  FidelitySetting setting;
  setting.name = text;
  const std::size_t colon = text.find(':');
  if (colon != std::string::npos) setting.policy = parse_save_policy(text.substr(0, colon));
  check_input(setting.policy == SavePolicy::kAgoq || setting.policy == SavePolicy::kUniform,
              "'{}': only the policies agoq and uniform quantise; write FORMAT or uniform:FORMAT", text);
  setting.format = parse_signed_format(colon == std::string::npos ? text : text.substr(colon + 1));
  return setting;
}

HostBatch spread_batch(const Dataset& data, std::int64_t sequences, std::int64_t sequence) {
  const std::int64_t available = data.sequences(Split::kValidation, sequence);
  check_input(0 < sequences && sequences <= available,
              "{} sequences were asked for; the validation documents hold {} of {} tokens", sequences,
              available, sequence);
  const std::int64_t stride = available / sequences;
  HostBatch all;
  HostBatch one;
  const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  for (std::int64_t s = 0; s < sequences; ++s) {
    data.fill(Split::kValidation, 0, s * stride, 1, sequence, one);
    append(all.tokens, one.tokens);
    append(all.targets, one.targets);
    append(all.weights, one.weights);
    append(all.positions, one.positions);
    for (std::int64_t d = 0; d < one.document_count; ++d) {
      all.document_starts.push_back(static_cast<std::int32_t>(s * sequence) +
                                    one.document_starts[static_cast<std::size_t>(d)]);
    }
    all.document_count += one.document_count;
    all.longest_document = std::max(all.longest_document, one.longest_document);
    all.valid_tokens += one.valid_tokens;
  }
  all.document_starts.push_back(static_cast<std::int32_t>(sequences * sequence));
  return all;
}

HostWeights read_weights(const Context& context, const Transformer& model) {
  HostWeights weights;
  for (const Tensor& weight : model.weights()) {
    weights.emplace_back(weight.bytes());
    context.backend.read(context, weight.data, weights.back().data(), weight.bytes());
  }
  return weights;
}

HostGradients gradient_under(const RunConfig& run, Backend& backend, const HostWeights& weights,
                             const HostBatch& batch, SavePolicy policy, const QuantFormat& format,
                             const Trainer::Between& between) {
  const auto tokens = static_cast<std::int64_t>(batch.tokens.size());
  OwnedTrainer owned(gradient_run(run, tokens / run.run.sequence, policy, format), backend);
  Trainer& trainer = owned.trainer;
  const Context context = trainer.context();
  for (std::size_t p = 0; p < weights.size(); ++p) {
    const Tensor& weight = trainer.model().weights()[p];
    check(weight.bytes() == weights[p].size(), "{} has {} bytes of weights; {} were given",
          trainer.model().parameters()[p].name, weight.bytes(), weights[p].size());
    backend.upload(context, weights[p].data(), weight.data, weight.bytes());
  }
  trainer.gradients_of(batch, between);
  HostGradients gradients;
  for (std::size_t p = 0; p < trainer.model().parameters().size(); ++p) {
    const Tensor exact = trainer.gradients().gradient(p).exact();
    std::vector<std::byte> bytes(exact.bytes());
    backend.read(context, exact.data, bytes.data(), bytes.size());
    gradients.push_back(to_floats(bytes, exact.type));
  }
  return gradients;
}

GradientDistance distance(const std::vector<Parameter>& parameters, const HostGradients& reference,
                          const HostGradients& gradients) {
  std::map<ParameterKind, Sums> kinds;
  Sums whole;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const Sums sums = sums_of(reference[p], gradients[p]);
    kinds[parameters[p].kind].add(sums);
    whole.add(sums);
  }
  GradientDistance result;
  result.cosine = whole.dot / std::sqrt(whole.gradient * whole.reference);
  result.whole = whole.relative();
  for (const auto& [kind, sums] : kinds) {
    if (sums.reference > 0) result.kinds[kind] = sums.relative();
  }
  check(
      std::isfinite(result.cosine) && std::isfinite(result.whole),
      "the gradients are zero or not finite, so the model's weights hold NaN or infinity: go back to an "
      "earlier checkpoint");
  return result;
}

std::vector<double> distance_by_layer(const std::vector<Parameter>& parameters, ParameterKind kind,
                                      const HostGradients& reference, const HostGradients& gradients) {
  std::vector<double> result;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    if (parameters[p].kind == kind) result.push_back(sums_of(reference[p], gradients[p]).relative());
  }
  return result;
}

ActivationStatistics measure_activation(const SaveSlot& slot, std::size_t layer,
                                        const std::vector<float>& values,
                                        const std::vector<QuantFormat>& formats) {
  ActivationStatistics statistics{layer, slot.name, slot.role, 0, 0, 0, 0, {}};
  const auto width = static_cast<std::size_t>(slot.width);
  check(!values.empty() && values.size() % width == 0, "{} values of {} do not fill rows of {}",
        values.size(), slot.name, width);
  const std::size_t rows = values.size() / width;
  std::vector<double> squares(width, 0.0);
  float largest = 0;
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < width; ++c) {
      const float x = values[r * width + c];
      squares[c] += static_cast<double>(x) * x;
      largest = std::max(largest, std::abs(x));
    }
  }
  double total = 0;
  std::vector<double> channels;  // RMS
  for (const double sum : squares) {
    total += sum;
    channels.push_back(std::sqrt(sum / static_cast<double>(rows)));
  }
  check(std::isfinite(total) && total > 0,
        "layer {} {} is zero or holds NaN or infinity: go back to an earlier checkpoint", layer,
        slot.name);
  statistics.rms = std::sqrt(total / static_cast<double>(values.size()));
  statistics.peak = largest / statistics.rms;
  std::sort(channels.begin(), channels.end());
  // The mean of the two in the middle where their number is even.
  const double median = (channels[(width - 1) / 2] + channels[width / 2]) / 2;
  statistics.largest_channel = channels.back() / median;
  statistics.outlier_channels =
      channels.end() - std::upper_bound(channels.begin(), channels.end(), kOutlierFactor * median);
  // Blocks restart at each segment, as if it were a row.
  for (const QuantFormat& format : formats) {
    statistics.sqnr_db.push_back(
        measure_format_error(cpu_backend(), format, values, slot.width / slot.segments).sqnr_db);
  }
  return statistics;
}

FidelityReport measure_fidelity(const std::string& directory, Backend& backend, std::int64_t sequences,
                                const std::vector<FidelitySetting>& settings) {
  const RunDirectory directory_of_run(directory, RunStart::kResume);
  const RunConfig run = directory_of_run.config();
  const Dataset data = Dataset::load(run.data);
  FidelityReport report;
  report.sequence = run.run.sequence;
  report.sequences =
      sequences != 0 ? sequences
                     : std::clamp<std::int64_t>(kDefaultTokens / run.run.sequence, 1,
                                                data.sequences(Split::kValidation, run.run.sequence));
  const HostBatch batch = spread_batch(data, report.sequences, report.sequence);
  for (const FidelitySetting& setting : settings) {
    const auto end = report.formats.end();
    if (std::find(report.formats.begin(), end, setting.format) == end)
      report.formats.push_back(setting.format);
  }

  const QuantFormat unused = ActivationConfig{}.format;
  HostWeights weights;
  {
    OwnedTrainer owned(gradient_run(run, 1, SavePolicy::kRecompute, unused), backend);
    directory_of_run.load_latest_weights(owned.trainer.context(), owned.config, owned.trainer.model(),
                                         print_notice);
    weights = read_weights(owned.trainer.context(), owned.trainer.model());
  }
  const std::vector<Parameter> parameters = parameters_of(run.model);
  const auto measure = [&](ActivationStore& store, std::size_t frame) {
    // Reading back needs no workspace.
    Arena workspace = Arena("fidelity", host_allocator(), 0);
    const Context context{backend, {}, workspace, {}};
    for (std::size_t l = 0; l < store.layers().size(); ++l) {
      LayerFrame layer = store.layer(frame, l);
      for (std::size_t s = 0; s < store.layers()[l].size(); ++s) {
        const SaveSlot& slot = store.layers()[l][s];
        if (is_statistic(slot.role)) continue;
        const std::vector<float> values = sampled_rows(context, layer.saved(static_cast<int>(s)));
        report.measured_tokens = static_cast<std::int64_t>(values.size()) / slot.width;
        report.activations.push_back(measure_activation(slot, l, values, report.formats));
      }
    }
  };
  const HostGradients reference =
      gradient_under(run, backend, weights, batch, SavePolicy::kKeep, unused, measure);
  report.repeated = distance(parameters, reference,
                             gradient_under(run, backend, weights, batch, SavePolicy::kKeep, unused));
  for (const FidelitySetting& setting : settings) {
    const HostGradients gradients =
        gradient_under(run, backend, weights, batch, setting.policy, setting.format);
    report.settings.push_back({setting, distance(parameters, reference, gradients)});
  }
  return report;
}

std::string to_json(const FidelityReport& report) {
  nlohmann::ordered_json json;
  json["sequences"] = report.sequences;
  json["sequence"] = report.sequence;
  json["keep_repeated"] = distance_json(report.repeated);
  nlohmann::ordered_json settings = nlohmann::ordered_json::array();
  for (const SettingFidelity& fidelity : report.settings) {
    nlohmann::ordered_json entry;
    entry["name"] = fidelity.setting.name;
    entry["policy"] = name_of(fidelity.setting.policy);
    entry["format"] = fidelity.setting.format.to_string();
    entry["gradient"] = distance_json(fidelity.gradient);
    settings.push_back(std::move(entry));
  }
  json["settings"] = std::move(settings);
  json["measured_tokens"] = report.measured_tokens;
  json["outlier_factor"] = kOutlierFactor;
  nlohmann::ordered_json activations = nlohmann::ordered_json::array();
  for (const ActivationStatistics& statistics : report.activations) {
    nlohmann::ordered_json entry;
    entry["layer"] = statistics.layer;
    entry["slot"] = statistics.slot;
    entry["role"] = name_of(statistics.role);
    entry["rms"] = statistics.rms;
    entry["peak_over_rms"] = statistics.peak;
    entry["largest_channel_over_median"] = statistics.largest_channel;
    entry["outlier_channels"] = statistics.outlier_channels;
    nlohmann::ordered_json sqnr = nlohmann::ordered_json::object();
    for (std::size_t f = 0; f < report.formats.size(); ++f) {
      const double db = statistics.sqnr_db[f];
      sqnr[report.formats[f].to_string()] =
          std::isinf(db) ? nlohmann::ordered_json() : nlohmann::ordered_json(db);
    }
    entry["sqnr_db"] = std::move(sqnr);
    activations.push_back(std::move(entry));
  }
  json["activations"] = std::move(activations);
  return to_text(json);
}

}  // namespace agoq

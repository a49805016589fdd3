// How faithful stored activations are on a trained model, for one fixed batch:
//
//   gradients    cosine <g, r> / (|g| |r|) and relative L2 |g - r| / |r| of the gradient g under a
//   setting
//                against r under `keep`, of the whole model and per kind of parameter
//   SQNR         -20 log10(|x' - x| / |x|) in dB of every tensor x that `keep` saved, under each format,
//                in the block grid of the tensor
//   channels     channel c of x has RMS r_c over the tokens; an outlier channel has r_c above
//                kOutlierFactor times the median of all r_c
//
// Gradients are FP32 and computed by the backend; the saved tensors are read to the host and quantised
// by the CPU's codecs, whose bytes every backend's equal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "data/dataset.h"
#include "train/run_config.h"
#include "train/trainer.h"

namespace agoq {

/// What a gradient is computed with.
struct FidelitySetting {
  std::string name;  // "NF4/128"
  SavePolicy policy = SavePolicy::kAgoq;
  QuantFormat format;
};

/// Of the formats that the literature and this project use, from the closest to the furthest.
std::vector<FidelitySetting> default_fidelity_settings();
/// FORMAT (policy agoq) or POLICY:FORMAT, policy agoq or uniform. Throws Error (kInput).
FidelitySetting parse_fidelity_setting(const std::string& text);

/// `sequences` sequences evenly spread over the validation documents: neighbours come from one document,
/// and some of these may be unlike all others. Throws Error (kInput) when there are fewer.
HostBatch spread_batch(const Dataset& data, std::int64_t sequences, std::int64_t sequence);

/// A model's weights in host memory, parameter after parameter, in the model's type.
using HostWeights = std::vector<std::vector<std::byte>>;
HostWeights read_weights(const Context& context, const Transformer& model);

/// Gradients in host memory, parameter after parameter.
using HostGradients = std::vector<std::vector<float>>;

/// The gradient of `batch` for `weights` under a policy and format, summed over the tokens. `run` gives
/// model, data and seed; `between` is called when forward has saved and backward has not begun.
HostGradients gradient_under(const RunConfig& run, Backend& backend, const HostWeights& weights,
                             const HostBatch& batch, SavePolicy policy, const QuantFormat& format,
                             const Trainer::Between& between = {});

struct GradientDistance {
  double cosine = 0;  // of the whole gradient
  double whole = 0;   // relative L2 of the whole gradient
  std::map<ParameterKind, double> kinds;
};
/// Kinds whose reference is zero are left out.
GradientDistance distance(const std::vector<Parameter>& parameters, const HostGradients& reference,
                          const HostGradients& gradients);
/// Relative L2 of the gradient of each parameter of `kind`, in the order of the layers.
std::vector<double> distance_by_layer(const std::vector<Parameter>& parameters, ParameterKind kind,
                                      const HostGradients& reference, const HostGradients& gradients);

inline constexpr double kOutlierFactor = 6;
/// Tokens of a saved tensor that are looked at, evenly spread over the batch: enough for every figure,
/// and a thirtieth of the codecs' work at 128K tokens.
inline constexpr std::int64_t kMeasuredTokens = 4096;

struct ActivationStatistics {
  std::size_t layer = 0;  // the number of layers for the final norm
  std::string slot;       // "norm1_input"
  SlotRole role = SlotRole::kNormInput;
  double rms = 0;
  double peak = 0;                    // max |x| / RMS
  double largest_channel = 0;         // max r_c / median r_c
  std::int64_t outlier_channels = 0;  // r_c > kOutlierFactor * median r_c
  std::vector<double> sqnr_db;        // per format; +infinity where nothing is lost
};
/// Statistics of `values`, rows of `slot.width` elements; `layer` is passed on.
ActivationStatistics measure_activation(const SaveSlot& slot, std::size_t layer,
                                        const std::vector<float>& values,
                                        const std::vector<QuantFormat>& formats);

struct SettingFidelity {
  FidelitySetting setting;
  GradientDistance gradient;
};

struct FidelityReport {
  std::int64_t sequences = 0;
  std::int64_t sequence = 0;         // tokens
  std::int64_t measured_tokens = 0;  // of the activations
  /// `keep` once more: what is not exactly repeatable on this backend. 0 on the CPU.
  GradientDistance repeated;
  std::vector<SettingFidelity> settings;
  std::vector<QuantFormat> formats;  // of the settings, each once
  std::vector<ActivationStatistics> activations;
};

/// The newest checkpoint of the run in `directory` under each setting, on `sequences` sequences of its
/// validation documents; 0: as many as make 16,384 tokens. Throws Error (kInput) if there is none.
FidelityReport measure_fidelity(const std::string& directory, Backend& backend, std::int64_t sequences,
                                const std::vector<FidelitySetting>& settings);

std::string to_json(const FidelityReport& report);

}  // namespace agoq

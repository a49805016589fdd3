// agoq fidelity: what formats of stored activations do to the gradient of a trained model.
#include "train/fidelity.h"

#include <fmt/format.h>

#include <cmath>
#include <memory>

#include "cli/command.h"
#include "cli/device_option.h"
#include "cli/table.h"
#include "core/quantity.h"

namespace agoq {
namespace {

struct FidelityArguments {
  std::string run;
  std::vector<std::string> formats;
  std::int64_t sequences = 0;
  std::optional<std::string> device;
  bool json = false;
};

Table gradient_table(const FidelityReport& report) {
  constexpr ParameterKind kKinds[] = {ParameterKind::kQkv, ParameterKind::kAttentionOutput,
                                      ParameterKind::kGateUp, ParameterKind::kDown,
                                      ParameterKind::kNorm};
  std::vector<Column> columns{{"activations"}, {"cosine", Align::kRight}, {"whole", Align::kRight}};
  for (const ParameterKind kind : kKinds) {
    columns.push_back({std::string(name_of(kind)), Align::kRight});
  }
  Table table(std::move(columns));
  const auto add = [&](const std::string& name, const GradientDistance& gradient) {
    std::vector<std::string> cells{name, fmt::format("{:.5f}", gradient.cosine),
                                   fmt::format("{:.4f}", gradient.whole)};
    for (const ParameterKind kind : kKinds) {
      const auto found = gradient.kinds.find(kind);
      cells.push_back(found == gradient.kinds.end() ? "" : fmt::format("{:.4f}", found->second));
    }
    table.add_row(std::move(cells));
  };
  add("keep, again", report.repeated);
  for (const SettingFidelity& fidelity : report.settings) add(fidelity.setting.name, fidelity.gradient);
  return table;
}

Table activation_table(const FidelityReport& report) {
  std::vector<Column> columns{{"layer", Align::kRight},
                              {"tensor"},
                              {"peak/RMS", Align::kRight},
                              {"channel", Align::kRight},
                              {"outliers", Align::kRight}};
  for (const QuantFormat& format : report.formats)
    columns.push_back({format.to_string(), Align::kRight});
  Table table(std::move(columns));
  for (const ActivationStatistics& statistics : report.activations) {
    std::vector<std::string> cells{
        std::to_string(statistics.layer), statistics.slot, fmt::format("{:.1f}", statistics.peak),
        fmt::format("{:.1f}", statistics.largest_channel), std::to_string(statistics.outlier_channels)};
    for (const double db : statistics.sqnr_db) {
      cells.push_back(std::isinf(db) ? "exact" : fmt::format("{:.1f}", db));
    }
    table.add_row(std::move(cells));
  }
  return table;
}

void measure(const FidelityArguments& arguments) {
  check_input(arguments.sequences >= 0, "--sequences must not be negative; {} was given",
              arguments.sequences);
  std::vector<FidelitySetting> settings;
  settings.reserve(arguments.formats.size());
  for (const std::string& format : arguments.formats) settings.push_back(parse_fidelity_setting(format));
  if (settings.empty()) settings = default_fidelity_settings();
  const FidelityReport report = measure_fidelity(
      arguments.run, backend_for_run(arguments.run, arguments.device), arguments.sequences, settings);
  if (arguments.json) {
    fmt::print("{}\n", to_json(report));
    return;
  }
  fmt::print(
      "{}\nRelative L2 of the gradient against everything kept, {} sequences of {} validation "
      "tokens.\n\n",
      gradient_table(report).to_string(), report.sequences, report.sequence);
  fmt::print(
      "{}\nSQNR in dB of what is saved, on {} tokens. channel: the largest channel's RMS over the "
      "median's;\noutliers: channels above {:g} times the median.\n",
      activation_table(report).to_string(), format_count(report.measured_tokens), kOutlierFactor);
}

}  // namespace

Action declare_fidelity(Arguments& arguments) {
  const auto given = std::make_shared<FidelityArguments>();
  arguments.positional("RUN", given->run, "Run directory");
  arguments.option("--format", "FORMAT", given->formats,
                   "A format to measure, or uniform:FORMAT; may be given several times");
  arguments.option("--sequences", "N", given->sequences,
                   "Sequences of the validation documents; 0: 16,384 tokens");
  arguments.option("--device", "NAME", given->device, kDeviceOptionHelp);
  arguments.flag("--json", given->json, "Print JSON");
  return [given](ProcessRanks&) { measure(*given); };
}

}  // namespace agoq

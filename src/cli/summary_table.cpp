#include "cli/summary_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "cli/table.h"
#include "core/quantity.h"
#include "train/peak_memory.h"

namespace agoq {
namespace {

struct Row {
  const char* label;
  std::function<double(const RunSummary&)> value;  // for the ratio; none where it has no meaning
  std::function<std::string(const RunSummary&)> print;
};

/// A row of what `member` holds, as `print` writes it.
template <typename Member, typename Print>
Row row(const char* label, Member RunSummary::*member, Print print) {
  const auto value = [member](const RunSummary& s) { return static_cast<double>(s.*member); };
  return {label, value, [value, print](const RunSummary& s) { return print(value(s)); }};
}

std::string as_bytes(double value) { return format_bytes(static_cast<std::int64_t>(value)); }
std::string as_peak(double value) { return format_peak(static_cast<std::int64_t>(value)); }
std::string as_loss(double value) { return fmt::format("{:.4f}", value); }
std::string as_count(double value) { return fmt::format("{:.0f}", value); }

/// Of several ranks: where each run is of one they are left out.
std::vector<Row> rank_rows() {
  return {
      row("ranks", &RunSummary::ranks, as_count),
      {"reduction of gradients", nullptr, [](const RunSummary& s) { return s.reduction; }},
      {"exposed communication (median step)",
       [](const RunSummary& s) { return s.exposed_communication_seconds; },
       [](const RunSummary& s) {
         return s.ranks == 1 ? ""
                             : fmt::format("{:.2f} ms, {:.1f} %", 1e3 * s.exposed_communication_seconds,
                                           100 * s.exposed_communication_share);
       }},
  };
}

std::vector<Row> rows_of(const std::vector<NamedSummary>& runs) {
  std::vector<Row> rows = {
      row("validation loss (nats/token)", &RunSummary::validation_loss, as_loss),
      row("order-1 byte model, same text", &RunSummary::order1_byte_loss, as_loss),
      row("tokens/s (median step)", &RunSummary::tokens_per_second, as_count),
      row("saved activations", &RunSummary::saved_activation_bytes, as_bytes),
      row("main gradients", &RunSummary::main_gradient_bytes, as_bytes),
      row("moments", &RunSummary::moment_bytes, as_bytes),
      row("master weights", &RunSummary::master_bytes, as_bytes),
      row("weights", &RunSummary::weight_bytes, as_bytes),
      row("peak memory, predicted", &RunSummary::peak_bytes_predicted, as_bytes),
      row("peak memory, measured", &RunSummary::peak_bytes_measured, as_peak),
  };
  const bool several = std::any_of(runs.begin(), runs.end(),
                                   [](const NamedSummary& run) { return run.summary.ranks > 1; });
  const std::vector<Row> of_ranks = several ? rank_rows() : std::vector<Row>{};
  rows.insert(rows.begin() + 3, of_ranks.begin(), of_ranks.end());
  return rows;
}

}  // namespace

std::string summary_table(const std::vector<NamedSummary>& runs) {
  std::vector<Column> columns{{"", Align::kLeft}};
  for (const NamedSummary& run : runs) {
    columns.push_back({run.name, Align::kRight});
    if (&run != &runs.front()) columns.push_back({"ratio", Align::kRight});
  }
  Table table(std::move(columns));
  for (const Row& row : rows_of(runs)) {
    std::vector<std::string> cells{row.label};
    const double first = row.value ? row.value(runs.front().summary) : 0;
    for (const NamedSummary& run : runs) {
      cells.push_back(row.print(run.summary));
      if (&run == &runs.front()) continue;
      cells.push_back(first == 0 ? "" : fmt::format("{:.3f}", row.value(run.summary) / first));
    }
    table.add_row(std::move(cells));
  }
  return table.to_string();
}

}  // namespace agoq

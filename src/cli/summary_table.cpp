#include "cli/summary_table.h"

#include <fmt/format.h>

#include <functional>

#include "cli/table.h"
#include "core/quantity.h"

namespace agoq {
namespace {

struct Row {
  const char* label;
  std::function<double(const RunSummary&)> value;
  std::function<std::string(double)> print;
};

std::string as_bytes(double value) { return format_bytes(static_cast<std::int64_t>(value)); }
std::string as_loss(double value) { return fmt::format("{:.4f}", value); }
std::string as_count(double value) { return fmt::format("{:.0f}", value); }

const std::vector<Row>& rows() {
  static const std::vector<Row> rows = {
      {"validation loss (nats/token)", [](const RunSummary& s) { return s.validation_loss; }, as_loss},
      {"order-1 byte model, same text", [](const RunSummary& s) { return s.order1_byte_loss; }, as_loss},
      {"tokens/s (median step)", [](const RunSummary& s) { return s.tokens_per_second; }, as_count},
      {"saved activations",
       [](const RunSummary& s) { return static_cast<double>(s.saved_activation_bytes); }, as_bytes},
      {"main gradients", [](const RunSummary& s) { return static_cast<double>(s.main_gradient_bytes); },
       as_bytes},
      {"moments", [](const RunSummary& s) { return static_cast<double>(s.moment_bytes); }, as_bytes},
      {"master weights", [](const RunSummary& s) { return static_cast<double>(s.master_bytes); },
       as_bytes},
      {"weights", [](const RunSummary& s) { return static_cast<double>(s.weight_bytes); }, as_bytes},
      {"peak memory, predicted",
       [](const RunSummary& s) { return static_cast<double>(s.peak_bytes_predicted); }, as_bytes},
      {"peak memory, measured",
       [](const RunSummary& s) { return static_cast<double>(s.peak_bytes_measured); }, as_bytes},
  };
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
  for (const Row& row : rows()) {
    std::vector<std::string> cells{row.label};
    const double first = row.value(runs.front().summary);
    for (const NamedSummary& run : runs) {
      const double value = row.value(run.summary);
      cells.push_back(row.print(value));
      if (&run != &runs.front()) cells.push_back(first == 0 ? "" : fmt::format("{:.3f}", value / first));
    }
    table.add_row(std::move(cells));
  }
  return table.to_string();
}

}  // namespace agoq

#include "cli/table.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/error.h"

namespace agoq {
namespace {

// Characters, not bytes: continuation bytes are 10xxxxxx.
std::size_t width_of(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

}  // namespace

void Table::add_row(std::vector<std::string> cells) {
  check(cells.size() <= columns_.size(), "a row of {} cells was added to a table of {} columns",
        cells.size(), columns_.size());
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

void Table::add_rule() { rows_.emplace_back(); }

std::string Table::to_string() const {
  std::vector<std::string> headings;
  bool has_heading = false;
  for (const Column& column : columns_) {
    headings.push_back(column.heading);
    has_heading = has_heading || !column.heading.empty();
  }
  std::vector<std::vector<std::string>> rows;
  if (has_heading) {
    rows.push_back(headings);
    rows.emplace_back();
  }
  rows.insert(rows.end(), rows_.begin(), rows_.end());

  std::vector<std::size_t> widths(columns_.size(), 0);
  for (const auto& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], width_of(row[c]));
  }
  const std::size_t gaps = columns_.empty() ? 0 : 2 * (columns_.size() - 1);
  const std::size_t total = std::accumulate(widths.begin(), widths.end(), gaps);

  std::string text;
  for (const auto& row : rows) {
    std::string line;
    if (row.empty()) line.assign(total, '-');
    for (std::size_t c = 0; c < row.size(); ++c) {
      const std::string padding(widths[c] - width_of(row[c]), ' ');
      if (c > 0) line += "  ";
      line += columns_[c].align == Align::kRight ? padding + row[c] : row[c] + padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

}  // namespace agoq

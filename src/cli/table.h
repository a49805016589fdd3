// Table: aligned columns of text, as every command prints them.
#pragma once

#include <string>
#include <vector>

namespace agoq {

enum class Align { kLeft, kRight };

struct Column {
  std::string heading;
  Align align = Align::kLeft;
};

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// One cell per column; fewer leave the rest empty. Throws Error for more.
  void add_row(std::vector<std::string> cells);
  /// A line across, for instance above a sum.
  void add_rule();

  /// The table with a heading and a rule under it, two spaces between columns, no trailing spaces, a
  /// newline after each row. Widths count UTF-8 characters. Without any heading, rows only.
  std::string to_string() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;  // an empty row is a rule
};

}  // namespace agoq

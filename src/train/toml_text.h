// TOML text as a list of sections with their values.
//
// The one door to toml11: its parser is most of the time that whatever includes it takes to compile.
// Invariant: sections, and the values in each, stand in the order of the text (toml11 keeps them in hash
// tables), so that the first mistake in a file is the one that is reported.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace agoq {

/// A value as TOML has it.
using Setting = std::variant<bool, std::int64_t, double, std::string, std::vector<std::string>>;

struct TomlValue {
  std::optional<Setting> setting;  // nullopt: of a type that no setting has, such as a date or a table
  std::string text;                // in one line, for messages
};

struct TomlEntry {
  std::string name;
  std::size_t line;
  TomlValue value;
};

struct TomlSection {
  std::string name;
  std::size_t line;
  bool is_table;  // false: a key that stands outside of a section
  std::vector<TomlEntry> entries;
};

/// `name` stands in messages. Throws Error (kInput) with name and line for text that is not TOML.
std::vector<TomlSection> parse_toml(std::string_view text, const std::string& name);

/// One value, as it would stand after "key ="; nullopt if it is not TOML.
std::optional<TomlValue> parse_toml_value(std::string_view text);

}  // namespace agoq

#include "train/toml_text.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <toml/parser.hpp>
#include <toml/serializer.hpp>
#include <utility>

#include "checkpoint/durable_file.h"
#include "core/error.h"

namespace agoq {
namespace {

// toml11 explains over several lines, with the place drawn below; an error here is one line.
std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  text.erase(std::unique(text.begin(), text.end(), [](char a, char b) { return a == ' ' && b == ' '; }),
             text.end());
  return text;
}

std::string trimmed(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

// What toml11 found wrong: the sentence after "[error] toml::function:", or what stands at the mark.
std::string complaint(const toml::exception& error) {
  std::string text = error.what();
  const std::string first_line = text.substr(0, text.find('\n'));
  const std::size_t function = first_line.find("toml::");
  const std::size_t colon = first_line.find(": ", function == std::string::npos ? 0 : function);
  std::string sentence = colon == std::string::npos ? first_line : trimmed(first_line.substr(colon + 2));
  if (sentence.empty()) {
    const std::size_t mark = text.find("^--- ");
    if (mark != std::string::npos) {
      sentence = text.substr(mark + 5, text.find('\n', mark) - mark - 5);
    }
  }
  // What some have instead of a sentence is the name of the function that gave up.
  constexpr std::string_view kFunction = "[error] toml::parse_";
  if (sentence.starts_with(kFunction)) {
    sentence = "not a whole " + sentence.substr(kFunction.size());
    std::replace(sentence.begin(), sentence.end(), '_', ' ');
  }
  return sentence.empty() ? "not TOML" : sentence;
}

std::optional<Setting> to_setting(const toml::value& value) {
  if (value.is_boolean()) return value.as_boolean();
  if (value.is_integer()) return static_cast<std::int64_t>(value.as_integer());
  if (value.is_floating()) {
    const double number = value.as_floating();
    // What toml11 makes of a literal beyond the range of double.
    constexpr double kMaximum = std::numeric_limits<double>::max();
    return std::abs(number) == kMaximum ? std::copysign(std::numeric_limits<double>::infinity(), number)
                                        : number;
  }
  if (value.is_string()) return value.as_string().str;
  if (!value.is_array()) return std::nullopt;
  std::vector<std::string> texts;
  for (const toml::value& element : value.as_array()) {
    if (!element.is_string()) return std::nullopt;
    texts.push_back(element.as_string().str);
  }
  return texts;
}

// As it stands in the text: toml11 makes of an integer beyond 64 bits the nearest that fits.
std::string text_of(const toml::value& value) {
  if (value.is_integer()) {
    const toml::source_location place = value.location();
    const std::string& line = place.line_str();
    if (place.column() > 0 && place.column() <= line.size()) {
      return printable(line.substr(place.column() - 1, place.region()));
    }
  }
  if (value.is_array()) {
    std::string list = "[";
    for (const toml::value& element : value.as_array()) {
      list += (list == "[" ? "" : ", ") + text_of(element);
    }
    return printable(list + "]");
  }
  return printable(one_line(toml::format(value, 1000, 6, false, true)));
}

TomlValue to_toml_value(const toml::value& value) {
  std::optional<Setting> setting = to_setting(value);
  const auto* number = setting ? std::get_if<double>(&*setting) : nullptr;
  if (number != nullptr && std::isinf(*number) && std::isfinite(value.as_floating())) {
    return {std::move(setting), "a number beyond the range of double"};
  }
  return {std::move(setting), text_of(value)};
}

// Sections and entries alike.
template <typename Named>
void sort_as_in_text(std::vector<Named>& items) {
  std::sort(items.begin(), items.end(), [](const Named& a, const Named& b) {
    return a.line != b.line ? a.line < b.line : a.name < b.name;
  });
}

}  // namespace

std::vector<TomlSection> parse_toml(std::string_view text, const std::string& name) {
  std::istringstream stream{std::string(text)};
  toml::value root;
  try {
    root = toml::parse(stream, name);
  } catch (const toml::exception& error) {
    const std::string line = printable(trimmed(error.location().line_str()));
    // Looking for the end of a list, the parser comes to that of the text.
    fail_input(
        "{}:{}: not valid TOML: {}; {}", name, error.location().line(), printable(complaint(error)),
        line.empty() ? "the line is empty: close what a line before it begins (a list ends with ])"
                     : fmt::format("the line is: {} (strings stand in quotes)", line));
  } catch (const std::exception& error) {
    fail_input("{}: not valid TOML: {}", name, printable(one_line(error.what())));
  }
  std::vector<TomlSection> sections;
  for (const auto& [section_name, table] : root.as_table()) {
    TomlSection section{section_name, table.location().line(), table.is_table(), {}};
    if (section.is_table) {
      for (const auto& [key, value] : table.as_table()) {
        section.entries.push_back({key, value.location().line(), to_toml_value(value)});
      }
    }
    sort_as_in_text(section.entries);
    sections.push_back(std::move(section));
  }
  sort_as_in_text(sections);
  return sections;
}

std::optional<TomlValue> parse_toml_value(std::string_view text) {
  std::istringstream stream("value = " + std::string(text) + "\n");
  try {
    const toml::value root = toml::parse(stream, "value");
    if (root.as_table().size() == 1) return to_toml_value(root.as_table().at("value"));
  } catch (const std::exception&) {
    // What the caller expected says more than what the parser saw.
  }
  return std::nullopt;
}

}  // namespace agoq

#include "train/run_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <toml.hpp>

#include "core/error.h"
#include "core/nearest_name.h"

namespace agoq {
namespace {

// --- names ---

std::vector<std::string_view> section_names() {
  std::vector<std::string_view> names;
  for (const ConfigKey& key : config_keys()) {
    if (names.empty() || names.back() != key.section) names.push_back(key.section);
  }
  return names;
}

std::string join(const std::vector<std::string_view>& names) {
  std::string text;
  for (const std::string_view name : names) text.append(text.empty() ? "" : ", ").append(name);
  return text;
}

void check_section(const std::string& section, const std::string& place) {
  const std::vector<std::string_view> names = section_names();
  if (std::find(names.begin(), names.end(), section) != names.end()) return;
  check_input(section != "parallel",
              "{}: [parallel] cannot be set: this version trains in one process; remove the section",
              place);
  const std::string_view nearest = nearest_name(section, names);
  if (nearest.empty())
    fail_input("{}: unknown section [{}]; the sections are {}", place, section, join(names));
  fail_input("{}: unknown section [{}]; did you mean [{}]?", place, section, nearest);
}

const ConfigKey& find_key(const std::string& section, const std::string& name,
                          const std::string& place) {
  check_section(section, place);
  std::vector<std::string_view> names;
  const ConfigKey* elsewhere = nullptr;
  for (const ConfigKey& key : config_keys()) {
    if (key.section == section && key.name == name) return key;
    if (key.section == section) names.push_back(key.name);
    if (key.name == name) elsewhere = &key;
  }
  if (elsewhere != nullptr) {
    fail_input("{}: unknown key {}.{}; {} belongs in [{}]", place, section, name, name,
               elsewhere->section);
  }
  const std::string_view nearest = nearest_name(name, names);
  if (nearest.empty()) {
    fail_input("{}: unknown key {}.{}; the keys of [{}] are {}", place, section, name, section,
               join(names));
  }
  fail_input("{}: unknown key {}.{}; did you mean {}?", place, section, name, nearest);
}

// --- values ---

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

// TOML's text of a value, for messages.
std::string text_of(const toml::value& value) {
  return one_line(toml::format(value, 1000, 6, false, true));
}

// The value as a Setting of the alternative that `like` holds, or as another one when it is of
// another type: the caller compares.
Setting to_setting(const toml::value& value, const Setting& like) {
  if (value.is_boolean()) return value.as_boolean();
  if (value.is_integer()) {
    // "learning_rate = 1" means 1.0.
    if (std::holds_alternative<double>(like)) return static_cast<double>(value.as_integer());
    return static_cast<std::int64_t>(value.as_integer());
  }
  if (value.is_floating()) return static_cast<double>(value.as_floating());
  if (value.is_string()) return value.as_string().str;
  if (value.is_array()) {
    std::vector<std::string> texts;
    for (const toml::value& element : value.as_array()) {
      if (!element.is_string()) return false;
      texts.push_back(element.as_string().str);
    }
    if (std::holds_alternative<std::vector<std::string>>(like)) return texts;
  }
  return std::holds_alternative<bool>(like) ? Setting(std::int64_t{0}) : Setting(false);
}

void apply(RunConfig& config, const ConfigKey& key, const toml::value& value, const std::string& place) {
  const Setting like = key.get(config);
  const Setting setting = to_setting(value, like);
  try {
    if (setting.index() == like.index() && key.set(config, setting)) return;
  } catch (const Error& error) {
    throw Error(ErrorKind::kInput, fmt::format("{}: {}: {}", place, key.full_name(), error.what()));
  }
  fail_input("{}: {} must be {}, not {}", place, key.full_name(), key.allowed, text_of(value));
}

std::string place_of(const toml::value& value, const std::string& name) {
  return fmt::format("{}:{}", name, value.location().line());
}

// A table's entries in the order of the text, so that the first mistake is reported first: toml11
// keeps them in a hash table.
std::vector<std::pair<std::string, toml::value>> in_text_order(const toml::table& table) {
  std::vector<std::pair<std::string, toml::value>> entries(table.begin(), table.end());
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    const auto line_a = a.second.location().line();
    const auto line_b = b.second.location().line();
    return line_a != line_b ? line_a < line_b : a.first < b.first;
  });
  return entries;
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
  return sentence.empty() ? "not TOML" : sentence;
}

toml::value parse_toml(std::string_view text, const std::string& name) {
  std::istringstream stream{std::string(text)};
  try {
    return toml::parse(stream, name);
  } catch (const toml::exception& error) {
    fail_input("{}:{}: not valid TOML: {}; the line is: {} (strings stand in quotes)", name,
               error.location().line(), complaint(error), trimmed(error.location().line_str()));
  } catch (const std::exception& error) {
    fail_input("{}: not valid TOML: {}", name, one_line(error.what()));
  }
}

// The value of an override. Strings may come without quotes, lists with commas: a shell takes quotes
// away.
toml::value parse_override(const std::string& text, const Setting& like, const std::string& place) {
  const bool quoted = !text.empty() && (text.front() == '"' || text.front() == '\'');
  if (std::holds_alternative<std::string>(like) && !quoted) return toml::value(text);
  if (std::holds_alternative<std::vector<std::string>>(like) && !quoted &&
      (text.empty() || text.front() != '[')) {
    toml::array elements;
    std::istringstream stream(text);
    for (std::string element; std::getline(stream, element, ',');)
      elements.emplace_back(trimmed(element));
    return toml::value(elements);
  }
  std::istringstream stream("value = " + text + "\n");
  try {
    const toml::value parsed = toml::parse(stream, place);
    if (parsed.as_table().size() == 1) return parsed.at("value");
  } catch (const std::exception&) {
    // Falls through: what the key expects says more than what the parser saw.
  }
  return toml::value(text);
}

void apply_override(RunConfig& config, const std::string& assignment) {
  const std::string place = "--set " + assignment;
  const std::size_t equals = assignment.find('=');
  const std::size_t dot = assignment.find('.');
  check_input(equals != std::string::npos && dot != std::string::npos && dot < equals,
              "{}: expected section.key=value, for instance train.steps=100", place);
  const std::string section = trimmed(assignment.substr(0, dot));
  const std::string name = trimmed(assignment.substr(dot + 1, equals - dot - 1));
  const ConfigKey& key = find_key(section, name, place);
  apply(config, key, parse_override(trimmed(assignment.substr(equals + 1)), key.get(config), place),
        place);
}

// --- writing ---

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char character : text) {
    const auto byte = static_cast<unsigned char>(character);
    if (character == '"' || character == '\\') {
      out.append({'\\', character});
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\u{:04X}", byte);
    } else {
      out += character;
    }
  }
  return out + "\"";
}

struct TomlText {
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  std::string operator()(std::int64_t value) const { return fmt::format("{}", value); }
  std::string operator()(double value) const {
    // The shortest digits that read back as the same number, marked as a float.
    std::string digits = fmt::format("{}", value);
    return digits.find_first_of(".en") == std::string::npos ? digits + ".0" : digits;
  }
  std::string operator()(const std::string& value) const { return quoted(value); }
  std::string operator()(const std::vector<std::string>& values) const {
    std::string list = "[";
    for (const std::string& value : values) list += (list == "[" ? "" : ", ") + quoted(value);
    return list + "]";
  }
};

}  // namespace

void RunConfig::check() const {
  model.check();
  check_input(data.holdout_index < data.holdout_every,
              "data.holdout_index is {} and must be below data.holdout_every, which is {}",
              data.holdout_index, data.holdout_every);
  check_input(activations.recompute_layers <= model.layers,
              "activations.recompute_layers is {}, but the model has {} layers",
              activations.recompute_layers, model.layers);
  check_input(optimizer.warmup_steps <= run.steps,
              "optimizer.warmup_steps is {}, more than train.steps, which is {}", optimizer.warmup_steps,
              run.steps);
  if (optimizer.schedule == ScheduleKind::kWarmupStableDecay) {
    check_input(optimizer.decay_steps <= run.steps - optimizer.warmup_steps,
                "optimizer.decay_steps is {}, but {} of {} steps remain after warm-up",
                optimizer.decay_steps, run.steps - optimizer.warmup_steps, run.steps);
  }
}

RunConfig parse_run_config(std::string_view toml, const std::string& name,
                           const std::vector<std::string>& overrides) {
  RunConfig config;
  const toml::value root = parse_toml(toml, name);
  for (const auto& [section, table] : in_text_order(root.as_table())) {
    const std::string place = place_of(table, name);
    check_input(table.is_table(), "{}: {} stands outside of a section; the sections are {}", place,
                section, join(section_names()));
    check_section(section, place);
    for (const auto& [key, value] : in_text_order(table.as_table())) {
      const std::string value_place = place_of(value, name);
      apply(config, find_key(section, key, value_place), value, value_place);
    }
  }
  for (const std::string& assignment : overrides) apply_override(config, assignment);
  try {
    config.check();
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("{}: {}", name, error.what()));
  }
  return config;
}

RunConfig load_run_config(const std::string& path, const std::vector<std::string>& overrides) {
  std::error_code ignored;
  check_input(!std::filesystem::is_directory(path, ignored),
              "{}: cannot be read: it is a folder; expected a TOML configuration (examples/ has some)",
              path);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  check_input(file.good(), "{}: cannot be read: {}; expected a TOML configuration (examples/ has some)",
              path, std::strerror(errno));
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return parse_run_config(text, path, overrides);
}

std::string to_toml(const RunConfig& config) {
  std::string text;
  std::string section;
  for (const ConfigKey& key : config_keys()) {
    if (key.section != section) {
      text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", key.section);
      section = key.section;
    }
    text += fmt::format("# {}; {}\n{} = {}\n", key.description, key.allowed, key.name,
                        std::visit(TomlText{}, key.get(config)));
  }
  return text;
}

}  // namespace agoq

#include "train/run_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "checkpoint/durable_file.h"
#include "core/error.h"
#include "core/nearest_name.h"

namespace agoq {
namespace {

// Bytes; far more than all keys with their comments take.
constexpr std::size_t kLargestConfig = std::size_t{1} << 20;

// With the bytes that each may take, below the 2^46 of an arena that measures.
constexpr double kLargestParameters = 4e12;
constexpr double kLargestStepTokens = 1e15;
// Positions within a micro-batch are 32-bit.
constexpr std::int64_t kLargestTokens = std::int64_t{1} << 27;

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

// --- values ---

std::string trimmed(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

// UTF-8 without NUL: what config.toml can hold, and a path can be.
bool is_plain_text(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const auto byte = [&](std::size_t i) {
      return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u;
    };
    const unsigned first = byte(0);
    if (first == 0) return false;
    const std::size_t length = first < 0x80    ? 1
                               : first < 0xC2  ? 0  // a continuation, or a longer form than needed
                               : first < 0xE0  ? 2
                               : first < 0xF0  ? 3
                               : first <= 0xF4 ? 4
                                               : 0;
    if (length == 0) return false;
    for (std::size_t i = 1; i < length; ++i) {
      if ((byte(i) & 0xC0) != 0x80) return false;
    }
    // Longer forms than needed, surrogates, and what lies beyond U+10FFFF.
    if ((first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) >= 0xA0) ||
        (first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) >= 0x90)) {
      return false;
    }
    at += length;
  }
  return true;
}

bool holds_plain_text(const Setting& setting) {
  if (const auto* text = std::get_if<std::string>(&setting)) return is_plain_text(*text);
  const auto* texts = std::get_if<std::vector<std::string>>(&setting);
  return texts == nullptr || std::all_of(texts->begin(), texts->end(),
                                         [](const std::string& text) { return is_plain_text(text); });
}

void apply(RunConfig& config, const ConfigKey& key, const TomlValue& value, const std::string& place) {
  const Setting like = key.get(config);
  std::optional<Setting> setting = value.setting;
  check_input(!setting || holds_plain_text(*setting),
              "{}: {} must be text in UTF-8 without NUL characters: write it so, or rename the file",
              place, key.full_name());
  // "learning_rate = 1" means 1.0.
  if (std::holds_alternative<double>(like) && setting && std::holds_alternative<std::int64_t>(*setting))
    setting = static_cast<double>(std::get<std::int64_t>(*setting));
  try {
    if (setting && setting->index() == like.index() && key.set(config, *setting)) return;
  } catch (const Error& error) {
    throw Error(ErrorKind::kInput, fmt::format("{}: {}: {}", place, key.full_name(), error.what()));
  }
  fail_input("{}: {} must be {}, not {}", place, key.full_name(), key.allowed, value.text);
}

TomlValue value_of(Setting setting) {
  std::string text = std::visit(TomlText{}, setting);
  return {std::move(setting), std::move(text)};
}

// The value of an override. Strings may come without quotes, lists with commas: a shell takes quotes
// away.
TomlValue parse_override(const std::string& text, const Setting& like) {
  const bool is_quoted = !text.empty() && (text.front() == '"' || text.front() == '\'');
  if (std::holds_alternative<std::string>(like) && !is_quoted) return value_of(text);
  if (std::holds_alternative<std::vector<std::string>>(like) && !is_quoted &&
      (text.empty() || text.front() != '[')) {
    std::vector<std::string> elements;
    std::istringstream stream(text);
    for (std::string element; std::getline(stream, element, ',');) elements.push_back(trimmed(element));
    return value_of(std::move(elements));
  }
  std::optional<TomlValue> parsed = parse_toml_value(text);
  // Text that is not TOML is no value of this key either: the message is about what the key expects.
  return parsed ? std::move(*parsed) : value_of(text);
}

void apply_override(RunConfig& config, const std::string& assignment) {
  const std::string place = "--set " + printable(assignment);
  const std::size_t equals = assignment.find('=');
  const std::size_t dot = assignment.find('.');
  check_input(equals != std::string::npos && dot != std::string::npos && dot < equals,
              "{}: expected section.key=value, for instance train.steps=100", place);
  const std::string section = trimmed(assignment.substr(0, dot));
  const std::string name = trimmed(assignment.substr(dot + 1, equals - dot - 1));
  const ConfigKey& key = find_key(section, name, place);
  apply(config, key, parse_override(trimmed(assignment.substr(equals + 1)), key.get(config)), place);
}

// Sizes that no machine has room for, refused before their bytes no longer fit the numbers they are
// counted in. In floating point, which does not wrap around.
void check_size(const RunConfig& config) {
  const ModelConfig& model = config.model;
  const auto real = [](std::int64_t value) { return static_cast<double>(value); };
  const double heads = real(model.heads + 2 * static_cast<std::int64_t>(model.kv_heads));
  const double attention = heads * real(model.head_size);
  const double widest = real(model.hidden) + attention + 3 * real(model.feed_forward);
  const double parameters =
      real(model.layers) * real(model.hidden) * (2 * attention + 3 * real(model.feed_forward)) +
      2 * real(model.hidden) * real(model.vocabulary);
  check_input(parameters <= kLargestParameters,
              "the model would have about {:.0e} parameters, more than the {:.0e} that can be planned: "
              "lower model.hidden, model.feed_forward, model.layers or model.vocabulary",
              parameters, kLargestParameters);
  const double tokens = real(config.run.sequence) * real(config.run.micro_batch);
  check_input(tokens <= real(kLargestTokens),
              "a micro-batch would have about {:.1e} tokens, more than the {} that it can have: lower "
              "train.sequence or train.micro_batch",
              tokens, kLargestTokens);
  const double activations = tokens * real(model.layers) * widest;
  check_input(activations <= kLargestParameters,
              "a micro-batch would have about {:.0e} activations, more than the {:.0e} that can be "
              "planned: lower train.sequence, train.micro_batch or the sizes in [model]",
              activations, kLargestParameters);
  const double logits = std::min(tokens, real(model.loss_chunk)) * real(model.vocabulary);
  check_input(logits <= kLargestParameters,
              "a chunk of the loss would have about {:.0e} logits, more than the {:.0e} that can be "
              "planned: lower model.loss_chunk or model.vocabulary",
              logits, kLargestParameters);
  const double step_tokens = tokens * real(config.run.micro_batches);
  check_input(step_tokens <= kLargestStepTokens,
              "a step would have about {:.0e} tokens, more than the {:.0e} that it can have: lower "
              "train.micro_batches",
              step_tokens, kLargestStepTokens);
}

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
  check_input(!parallel.reduction.requantise_shards || parallel.reduction.sharded,
              "parallel.requantise_shards is true and parallel.shard_optimizer false: it is the sharded "
              "update that can read requantised sums; set both, or neither");
  check_size(*this);
  if (optimizer.schedule == ScheduleKind::kWarmupStableDecay) {
    check_input(optimizer.decay_steps <= run.steps - optimizer.warmup_steps,
                "optimizer.decay_steps is {}, but {} of {} steps remain after warm-up",
                optimizer.decay_steps, run.steps - optimizer.warmup_steps, run.steps);
  }
}

RunConfig parse_run_config(std::string_view toml, const std::string& name,
                           const std::vector<std::string>& overrides) {
  RunConfig config;
  for (const TomlSection& section : parse_toml(toml, name)) {
    const std::string place = fmt::format("{}:{}", name, section.line);
    check_input(section.is_table, "{}: {} stands outside of a section; the sections are {}", place,
                section.name, join(section_names()));
    check_section(section.name, place);
    for (const TomlEntry& entry : section.entries) {
      const std::string entry_place = fmt::format("{}:{}", name, entry.line);
      apply(config, find_key(section.name, entry.name, entry_place), entry.value, entry_place);
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
  // A limit, since a device such as /dev/zero never ends; in pieces, since a buffer of the limit's size
  // would be part of a tiny run's peak.
  std::string text;
  std::array<char, 4096> piece;
  while (file && text.size() <= kLargestConfig) {
    file.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    text.append(piece.data(), static_cast<std::size_t>(file.gcount()));
  }
  check_input(!file.bad(), "{}: cannot be read: {}; expected a TOML configuration", path,
              std::strerror(errno));
  check_input(text.size() <= kLargestConfig,
              "{}: has more than {} bytes; expected a TOML configuration (examples/ has some)", path,
              kLargestConfig);
  return parse_run_config(text, path, overrides);
}

std::vector<std::string> changes_on_resume(const RunConfig& trained, const RunConfig& now,
                                           const std::string& name) {
  std::vector<std::string> changes;
  for (const ConfigKey& key : config_keys()) {
    const std::string before = std::visit(TomlText{}, key.get(trained));
    const std::string after = std::visit(TomlText{}, key.get(now));
    if (before == after) continue;
    check_input(key.may_change_on_resume,
                "{} is {} in {} and {} now: the data stream or the saved state depends on it, so a "
                "resumed run keeps it; set it back, or start a new run in another run.directory",
                key.full_name(), printable(before), name, printable(after));
    changes.push_back(fmt::format("{} {} -> {}", key.full_name(), printable(before), printable(after)));
  }
  return changes;
}

std::string idle_ranks_of(const RunConfig& config) {
  const std::int64_t idle = config.parallel.ranks - config.run.micro_batches;
  if (idle <= 0) return "";
  return fmt::format(
      "{} of {} ranks compute nothing: a step has {} micro-batch{}; raise train.micro_batches, or start "
      "fewer ranks",
      idle, config.parallel.ranks, config.run.micro_batches, config.run.micro_batches == 1 ? "" : "es");
}

std::string reduction_of(const RunConfig& config) {
  std::string kind;
  for (const ConfigKey& key : config_keys()) {
    if (key.full_name() == "parallel.reduction") kind = std::get<std::string>(key.get(config));
  }
  return kind + (config.parallel.reduction.sharded ? ", optimizer sharded" : "");
}

std::vector<std::pair<std::string, std::string>> settings_of(const RunConfig& config) {
  std::vector<std::pair<std::string, std::string>> settings;
  for (const ConfigKey& key : config_keys()) {
    settings.emplace_back(key.full_name(), std::visit(TomlText{}, key.get(config)));
  }
  return settings;
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

RunConfig with_ranks(const RunConfig& config, const Communicator& ranks) {
  check_input(config.parallel.ranks == 0 || config.parallel.ranks == ranks.size(),
              "parallel.ranks is {} and {} launched: launch {}, or set parallel.ranks=0",
              config.parallel.ranks,
              ranks.size() == 1 ? "1 rank was" : fmt::format("{} ranks were", ranks.size()),
              config.parallel.ranks);
  RunConfig known = config;
  known.parallel.ranks = ranks.size();
  known.parallel.peer_copies = ranks.has_peer_copies();
  return known;
}

}  // namespace agoq

#include "checkpoint/training_state.h"

#include <fcntl.h>
#include <stdio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <utility>

#include "backend/backend.h"
#include "checkpoint/durable_file.h"
#include "checkpoint/safetensors.h"
#include "core/error.h"

namespace agoq {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kUnfinishedPrefix = ".step-";
constexpr std::string_view kUnfinishedSuffix = ".tmp";
constexpr const char* kConfigFile = "config.json";
constexpr const char* kModelFile = "model.safetensors";
constexpr const char* kStateFile = "state.safetensors";
// Of the layout in state.safetensors.
constexpr std::string_view kLayout = "1";

std::string_view name_of(MasterKind kind) {
  switch (kind) {
    case MasterKind::kNone: return "none";
    case MasterKind::kFp32: return "fp32";
    case MasterKind::kRemainder: return "remainder";
  }
  return "?";
}

std::string unfinished_directory(const std::string& checkpoints, std::int64_t step) {
  return (fs::path(checkpoints) / fmt::format("{}{}{}", kUnfinishedPrefix, step, kUnfinishedSuffix))
      .string();
}

/// N of "step-N", written as checkpoint_directory writes it.
std::optional<std::int64_t> step_of(const std::string& name) {
  if (name.rfind(kPrefix, 0) != 0) return std::nullopt;
  std::int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [last, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  if (error != std::errc() || last != end || step < 0 || name != fmt::format("{}{}", kPrefix, step)) {
    return std::nullopt;
  }
  return step;
}

/// Calls visit(path) for everything in `directory`; nothing if it is absent.
template <typename Visit>
void for_each_entry(const std::string& directory, Visit visit) {
  std::error_code error;
  if (!fs::exists(directory, error)) return;
  std::vector<fs::path> paths;
  fs::directory_iterator entries(directory, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    paths.push_back(entries->path());
  }
  check_input(!error, "cannot list '{}': {}", directory, error.message());
  for (const fs::path& path : paths) visit(path);
}

/// The steps that something in `checkpoints` is named after, whole checkpoint or not, ascending.
std::vector<std::int64_t> named_steps(const std::string& checkpoints) {
  std::vector<std::int64_t> steps;
  for_each_entry(checkpoints, [&](const fs::path& path) {
    const std::optional<std::int64_t> step = step_of(path.filename().string());
    if (step) steps.push_back(*step);
  });
  std::sort(steps.begin(), steps.end());
  return steps;
}

void remove_tree(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  check(!error, "cannot remove '{}': {}", path, error.message());
}

void rename_directory(const std::string& from, const std::string& to) {
  const bool renamed = std::rename(from.c_str(), to.c_str()) == 0;
  check(renamed, "cannot rename '{}' to '{}': {}", from, to, std::strerror(errno));
}

/// Under a name that no reader looks at first, so that at no time a part of it bears the name of a
/// checkpoint.
void remove_checkpoint(const std::string& checkpoints, std::int64_t step) {
  const std::string aside = unfinished_directory(checkpoints, step);
  remove_tree(aside);
  rename_directory(checkpoint_directory(checkpoints, step), aside);
  sync_directory(checkpoints);
  remove_tree(aside);
}

// --- the tensors of state.safetensors ---

/// Bytes in backend memory that are one tensor of the file.
struct StateTensor {
  std::string name;
  ElementType type = ElementType::kUint8;
  Shape shape;
  std::byte* data = nullptr;

  std::size_t bytes() const { return static_cast<std::size_t>(shape.count()) * size_of(type); }
};

void add_planes(const std::string& name, const QuantTensor& tensor, std::vector<StateTensor>& tensors) {
  const RowBytes bytes = row_bytes(tensor.format, tensor.grid);
  const auto add = [&](const char* plane, std::int64_t plane_bytes, std::byte* data) {
    if (plane_bytes == 0) return;
    tensors.push_back(
        {name + "." + plane, ElementType::kUint8, Shape{tensor.rows(), plane_bytes}, data});
  };
  add("codes", bytes.codes, tensor.codes);
  add("bits", bytes.bits, tensor.bits);
  add("scales", bytes.scales, tensor.scales);
  add("super", bytes.super, tensor.super);
}

std::vector<StateTensor> state_tensors(const TrainingSubject& subject) {
  std::vector<StateTensor> tensors;
  for (std::size_t i = 0; i < subject.parameters.size(); ++i) {
    const std::string& name = subject.parameters[i].name;
    if (const Tensor& master = subject.optimizer.master(i)) {
      tensors.push_back({name + ".master", master.type, master.shape, master.data});
    }
    add_planes(name + ".first_moment", subject.optimizer.first_moment(i), tensors);
    add_planes(name + ".second_moment", subject.optimizer.second_moment(i), tensors);
  }
  return tensors;
}

/// What the bytes of the state mean: equal texts mean that they can be taken over.
SafetensorsMetadata meaning_of(const TrainingSubject& subject) {
  SafetensorsMetadata metadata{{"layout", std::string(kLayout)},
                               {"master", std::string(name_of(subject.optimizer.master_kind()))},
                               {"gradient_format", subject.gradient_format.to_string()}};
  for (std::size_t i = 0; i < subject.parameters.size(); ++i) {
    const auto describe = [&](const char* what, const QuantTensor& tensor) {
      metadata[subject.parameters[i].name + "." + what] =
          fmt::format("{} over [{}, {}] in {} segments", tensor.format.to_string(), tensor.grid.rows,
                      tensor.grid.row_length, tensor.grid.segments);
    };
    describe("first_moment", subject.optimizer.first_moment(i));
    describe("second_moment", subject.optimizer.second_moment(i));
  }
  return metadata;
}

template <typename Number>
Number number_in(const SafetensorsReader& reader, const char* key) {
  const auto found = reader.metadata().find(key);
  check_input(found != reader.metadata().end(), "'{}' is not the state of a run: it does not give '{}'",
              reader.path(), key);
  const std::string& text = found->second;
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  check_input(error == std::errc() && end == text.data() + text.size() && !(number < Number{}),
              "'{}': {} is '{}', which is not a number that it can be", reader.path(), key,
              printable(text));
  return number;
}

TrainingPosition position_in(const SafetensorsReader& state) {
  TrainingPosition position;
  position.step = number_in<std::int64_t>(state, "step");
  position.next_sequence = number_in<std::int64_t>(state, "next_sequence");
  position.seed = number_in<std::uint64_t>(state, "seed");
  position.data_seed = number_in<std::uint64_t>(state, "data_seed");
  return position;
}

/// Somebody may have renamed or copied a directory, and its name decides which checkpoint is the newest.
void check_name(const std::string& directory, const TrainingPosition& position) {
  const std::optional<std::int64_t> named = step_of(fs::path(directory).filename().string());
  check_input(!named || *named == position.step,
              "'{}' holds the state after step {}: rename it to {}{}, or remove it", directory,
              position.step, kPrefix, position.step);
}

void check_meaning(const SafetensorsReader& state, const TrainingSubject& subject) {
  // In the order of the subject: the first difference is named, and how many there are.
  std::string first;
  int differences = 0;
  for (const auto& [key, wanted] : meaning_of(subject)) {
    const auto found = state.metadata().find(key);
    const std::string stored = found == state.metadata().end() ? "absent" : printable(found->second);
    if (stored == wanted) continue;
    if (differences++ == 0)
      first = fmt::format("{} is {} in the checkpoint and {} configured", key, stored, wanted);
  }
  check_input(
      differences == 0,
      "'{}' does not fit the configuration: {}{}; resume with the settings the run was started with",
      state.path(), first,
      differences > 1 ? fmt::format(", and {} more differences", differences - 1) : "");
}

}  // namespace

std::string checkpoint_directory(const std::string& checkpoints, std::int64_t step) {
  return (fs::path(checkpoints) / fmt::format("{}{}", kPrefix, step)).string();
}

std::string defect_of_checkpoint(const std::string& directory) {
  for (const char* name : {kConfigFile, kModelFile, kStateFile}) {
    std::error_code error;
    if (!fs::exists(fs::path(directory) / name, error)) {
      return fmt::format("{} is missing", name);
    }
  }
  try {
    const HuggingFaceModel model(directory);
    position_in(SafetensorsReader((fs::path(directory) / kStateFile).string()));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::vector<std::int64_t> checkpoint_steps(const std::string& checkpoints) {
  std::vector<std::int64_t> steps = named_steps(checkpoints);
  std::erase_if(steps, [&](std::int64_t step) {
    return !defect_of_checkpoint(checkpoint_directory(checkpoints, step)).empty();
  });
  return steps;
}

std::optional<std::int64_t> latest_checkpoint(const std::string& checkpoints,
                                              std::vector<std::string>& skipped) {
  const std::vector<std::int64_t> steps = named_steps(checkpoints);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const std::string directory = checkpoint_directory(checkpoints, *step);
    const std::string defect = defect_of_checkpoint(directory);
    if (defect.empty()) return *step;
    skipped.push_back(fmt::format("checkpoint {}: {}", directory, defect));
  }
  return std::nullopt;
}

std::optional<std::int64_t> latest_checkpoint(const std::string& checkpoints) {
  std::vector<std::string> skipped;
  return latest_checkpoint(checkpoints, skipped);
}

void remove_checkpoints(const std::string& checkpoints) {
  remove_unfinished_checkpoints(checkpoints);
  for_each_entry(checkpoints, [&](const fs::path& path) {
    const std::optional<std::int64_t> step = step_of(path.filename().string());
    std::error_code error;
    if (step && fs::is_directory(path, error)) remove_checkpoint(checkpoints, *step);
  });
  std::error_code error;
  if (fs::is_empty(checkpoints, error) && !error) fs::remove(checkpoints, error);
}

void remove_unfinished_checkpoints(const std::string& checkpoints) {
  for_each_entry(checkpoints, [](const fs::path& path) {
    const std::string name = path.filename().string();
    if (name.starts_with('.') && name.ends_with(kUnfinishedSuffix) &&
        step_of(name.substr(1, name.size() - 1 - kUnfinishedSuffix.size()))) {
      remove_tree(path.string());
    }
  });
}

void write_checkpoint(const Context& context, const std::string& checkpoints,
                      const TrainingSubject& subject, const TrainingPosition& position,
                      std::int64_t keep, const std::string& version) {
  check(keep >= 1, "at least one checkpoint is kept; {} was asked for", keep);
  std::error_code error;
  fs::create_directories(checkpoints, error);
  check(!error, "cannot make the directory '{}': {}", checkpoints, error.message());
  remove_unfinished_checkpoints(checkpoints);
  const std::optional<std::int64_t> latest = latest_checkpoint(checkpoints);
  check_input(
      !latest || *latest <= position.step,
      "'{}' holds step {} of another run, later than step {} that is to be written: choose another run "
      "directory or remove it",
      checkpoints, latest.value_or(0), position.step);

  const std::string unfinished = unfinished_directory(checkpoints, position.step);
  fs::create_directory(unfinished, error);
  check(!error, "cannot make the directory '{}': {}", unfinished, error.message());
  write_config((fs::path(unfinished) / kConfigFile).string(), subject.config);
  write_weights(context, (fs::path(unfinished) / kModelFile).string(), subject.config.model,
                subject.parameters, subject.weights);
  SafetensorsMetadata metadata = meaning_of(subject);
  metadata["version"] = version;
  metadata["step"] = std::to_string(position.step);
  metadata["next_sequence"] = std::to_string(position.next_sequence);
  metadata["seed"] = std::to_string(position.seed);
  metadata["data_seed"] = std::to_string(position.data_seed);
  std::vector<SafetensorsSource> sources;
  for (const StateTensor& tensor : state_tensors(subject)) {
    sources.push_back({tensor.name, tensor.type, tensor.shape, [&context, tensor](const ByteSink& sink) {
                         read_through(context, tensor.data, tensor.bytes(), sink);
                       }});
  }
  write_safetensors((fs::path(unfinished) / kStateFile).string(), sources, metadata);

  const std::string finished = checkpoint_directory(checkpoints, position.step);
  if (fs::exists(finished, error)) {
    // The two change names in one step, so that one of them is there at any time.
    if (::renameat2(AT_FDCWD, unfinished.c_str(), AT_FDCWD, finished.c_str(), RENAME_EXCHANGE) != 0) {
      check(errno == EINVAL || errno == ENOSYS, "cannot rename '{}' to '{}': {}", unfinished, finished,
            std::strerror(errno));
      // A file system that cannot exchange. A crash between these two lines costs this step's
      // checkpoint.
      remove_tree(finished);
      rename_directory(unfinished, finished);
    }
  } else {
    rename_directory(unfinished, finished);
  }
  sync_directory(checkpoints);
  remove_tree(unfinished);  // the one whose place was taken

  const std::vector<std::int64_t> steps = checkpoint_steps(checkpoints);
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < steps.size(); ++i) {
    remove_checkpoint(checkpoints, steps[i]);
  }
}

TrainingPosition read_training_position(const std::string& directory) {
  const TrainingPosition position =
      position_in(SafetensorsReader((fs::path(directory) / kStateFile).string()));
  check_name(directory, position);
  return position;
}

TrainingPosition read_checkpoint(const Context& context, const std::string& directory,
                                 const TrainingSubject& subject) {
  const HuggingFaceModel model(directory);
  const std::string differences = describe_differences(subject.config.model, model.config().model);
  check_input(differences.empty(),
              "the model in '{}' is not the configured one (configured against stored): {}", directory,
              differences);
  check(subject.weights.size() == model.parameters().size(), "{} weights were given for a model of {}",
        subject.weights.size(), model.parameters().size());
  for (std::size_t i = 0; i < subject.weights.size(); ++i) {
    check_input(
        model.is_stored_as(i, subject.weights[i].type),
        "'{}': the weight of {} is not stored as {}: a run resumes with the bytes it was saved with",
        directory, subject.parameters[i].name, name_of(subject.weights[i].type));
  }
  const SafetensorsReader state((fs::path(directory) / kStateFile).string());
  const TrainingPosition position = position_in(state);
  check_name(directory, position);
  check_meaning(state, subject);
  const std::vector<StateTensor> tensors = state_tensors(subject);
  for (const StateTensor& tensor : tensors) state.entry(tensor.name, tensor.type, tensor.shape);
  check_input(state.entries().size() == tensors.size(),
              "'{}' has {} tensors; a state of this configuration has {}", state.path(),
              state.entries().size(), tensors.size());

  // All is known to fit: from here on only a failing disk can stop the reading.
  for (std::size_t i = 0; i < subject.weights.size(); ++i) model.read(context, i, subject.weights[i]);
  std::vector<std::byte> piece(kTransferBytes);
  for (const StateTensor& tensor : tensors) {
    const SafetensorsEntry& entry = state.entry(tensor.name);
    for (std::size_t at = 0; at < tensor.bytes(); at += piece.size()) {
      const std::size_t count = std::min(piece.size(), tensor.bytes() - at);
      state.read_bytes(entry, at, at + count, piece.data());
      context.backend.upload(context, piece.data(), tensor.data + at, count);
    }
  }
  return position;
}

}  // namespace agoq

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
#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/shared_file.h"
#include "comm/quantized_reduction.h"
#include "comm/together.h"
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
constexpr std::size_t kLargestConfig = std::size_t{1} << 20;
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

/// A tensor of the file, of which this rank holds some rows in backend memory.
struct StateTensor {
  std::string name;
  ElementType type = ElementType::kUint8;
  Shape shape;  // of the whole tensor: [rows, width]
  OwnRows held;
  std::byte* data = nullptr;  // of row held.first

  std::size_t row_bytes() const { return static_cast<std::size_t>(shape[1]) * size_of(type); }
};

std::vector<StateTensor> state_tensors(const TrainingSubject& subject) {
  std::vector<StateTensor> tensors;
  for (std::size_t i = 0; i < subject.parameters.size(); ++i) {
    const Parameter& parameter = subject.parameters[i];
    const OwnRows held = subject.optimizer.rows(i);
    if (const Tensor& master = subject.optimizer.master(i)) {
      tensors.push_back({parameter.name + ".master", master.type,
                         Shape{parameter.rows, parameter.columns}, held, master.data});
    }
    const auto add_planes = [&](const char* what, const QuantTensor& moment) {
      const RowBytes bytes = row_bytes(moment.format, moment.grid);
      const auto add = [&](const char* plane, std::int64_t plane_bytes, std::byte* data) {
        if (plane_bytes == 0) return;
        tensors.push_back({fmt::format("{}.{}.{}", parameter.name, what, plane), ElementType::kUint8,
                           Shape{parameter.rows, plane_bytes}, held, data});
      };
      add("codes", bytes.codes, moment.codes);
      add("bits", bytes.bits, moment.bits);
      add("scales", bytes.scales, moment.scales);
      add("super", bytes.super, moment.super);
    };
    add_planes("first_moment", subject.optimizer.first_moment(i));
    add_planes("second_moment", subject.optimizer.second_moment(i));
  }
  return tensors;
}

/// What rank `rank` of `ranks` writes of the state.
std::vector<SafetensorsSource> state_sources(const Context& context, const TrainingSubject& subject,
                                             int ranks, int rank) {
  std::vector<SafetensorsSource> sources;
  for (const StateTensor& tensor : state_tensors(subject)) {
    const OwnRows own = own_rows(tensor.shape[0], ranks, rank);
    check(own.first >= own.last || (tensor.held.first <= own.first && own.last <= tensor.held.last),
          "rank {} of {} writes rows [{}, {}) of '{}' and holds [{}, {})", rank, ranks, own.first,
          own.last, tensor.name, tensor.held.first, tensor.held.last);
    const std::size_t bytes = tensor.row_bytes();
    ByteRange part;
    const std::byte* data = nullptr;
    if (own.first < own.last) {
      part = {static_cast<std::size_t>(own.first) * bytes, static_cast<std::size_t>(own.last) * bytes};
      data = tensor.data + static_cast<std::size_t>(own.first - tensor.held.first) * bytes;
    }
    sources.push_back({tensor.name, tensor.type, tensor.shape,
                       [&context, data, part](const ByteSink& sink) {
                         read_through(context, data, part.end - part.begin, sink);
                       },
                       part});
  }
  return sources;
}

/// What the bytes of the state mean: equal texts mean that they can be taken over.
SafetensorsMetadata meaning_of(const TrainingSubject& subject) {
  SafetensorsMetadata metadata{{"layout", std::string(kLayout)},
                               {"master", std::string(name_of(subject.optimizer.master_kind()))},
                               {"gradient_format", subject.gradient_format.to_string()}};
  for (std::size_t i = 0; i < subject.parameters.size(); ++i) {
    const Parameter& parameter = subject.parameters[i];
    const auto describe = [&](const char* what, const QuantTensor& tensor) {
      metadata[parameter.name + "." + what] =
          fmt::format("{} over [{}, {}] in {} segments", tensor.format.to_string(), parameter.rows,
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
  try {
    const Manifest manifest = read_manifest(directory);
    for (const char* name : {kConfigFile, kModelFile, kStateFile}) manifest.file(name);
    std::string defect = defect_of_sizes(directory, manifest);
    if (!defect.empty()) return defect;
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

namespace {

/// What rank 0 does before the files are written: makes the directory in which they are, and them.
void prepare(const std::string& checkpoints, const TrainingPosition& position,
             const std::string& unfinished) {
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
  fs::create_directory(unfinished, error);
  check(!error, "cannot make the directory '{}': {}", unfinished, error.message());
}

/// What rank 0 does when all files are written: gives them the name of a checkpoint.
void publish(const std::string& checkpoints, const std::string& unfinished,
             const std::string& finished) {
  std::error_code error;
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
}

/// A file that all ranks write together.
struct PartFile {
  std::string name;
  std::string path;
  std::vector<SafetensorsSource> sources;
  SafetensorsLayout layout;
  std::vector<PieceChecksum> pieces;  // first of this rank, then of all
};

/// Writes this rank's parts; rank 0 also the header.
void write_parts(PartFile& part, bool leads) {
  SharedFile file(part.path);
  if (leads) {
    file.begin_piece(0);
    file.append(part.layout.header.data(), part.layout.header.size());
  }
  for (const SafetensorsLayout::Placed& tensor : part.layout.tensors) {
    file.begin_piece(tensor.begin + (tensor.source->part ? tensor.source->part->begin : 0));
    produce_bytes(part.path, *tensor.source,
                  [&](const void* data, std::size_t bytes) { file.append(data, bytes); });
  }
  part.pieces = file.finish();
}

/// The pieces of all ranks in the order of the file.
void gather_pieces(Communicator& ranks, PartFile& part) {
  const std::string own(reinterpret_cast<const char*>(part.pieces.data()),
                        part.pieces.size() * sizeof(PieceChecksum));
  part.pieces.clear();
  for (const std::string& text : ranks.gather_texts(own)) {
    const std::size_t before = part.pieces.size();
    part.pieces.resize(before + text.size() / sizeof(PieceChecksum));
    if (!text.empty()) std::memcpy(part.pieces.data() + before, text.data(), text.size());
  }
  std::sort(part.pieces.begin(), part.pieces.end(),
            [](const PieceChecksum& a, const PieceChecksum& b) { return a.begin < b.begin; });
}

ManifestFile listed(const PartFile& part) {
  ManifestFile file{
      part.name, part.layout.file_bytes, combined_checksum(part.pieces, 0, part.layout.file_bytes), {}};
  for (const SafetensorsLayout::Placed& tensor : part.layout.tensors) {
    file.tensors[tensor.source->name] = combined_checksum(part.pieces, tensor.begin, tensor.end);
  }
  return file;
}

}  // namespace

void write_checkpoint(const Context& context, Communicator& ranks, const std::string& checkpoints,
                      const TrainingSubject& subject, const TrainingPosition& position,
                      std::int64_t keep, const std::string& version) {
  const bool leads = ranks.rank() == 0;
  const std::string unfinished = unfinished_directory(checkpoints, position.step);
  const auto path_of = [&](const char* name) { return (fs::path(unfinished) / name).string(); };
  PartFile model{kModelFile, path_of(kModelFile), {}, {}, {}};
  PartFile state{kStateFile, path_of(kStateFile), {}, {}, {}};
  bool prepared = false;
  try {
    together(ranks, [&] {
      check(keep >= 1, "at least one checkpoint is kept; {} was asked for", keep);
      model.sources = weight_sources(context, subject.config.model, subject.parameters, subject.weights,
                                     ranks.size(), ranks.rank());
      model.layout = lay_out_safetensors(model.path, model.sources, weight_metadata());
      SafetensorsMetadata metadata = meaning_of(subject);
      metadata["version"] = version;
      metadata["step"] = std::to_string(position.step);
      metadata["next_sequence"] = std::to_string(position.next_sequence);
      metadata["seed"] = std::to_string(position.seed);
      metadata["data_seed"] = std::to_string(position.data_seed);
      state.sources = state_sources(context, subject, ranks.size(), ranks.rank());
      state.layout = lay_out_safetensors(state.path, state.sources, metadata);
      if (!leads) return;
      prepare(checkpoints, position, unfinished);
      prepared = true;
      write_config(path_of(kConfigFile), subject.config);
      for (const PartFile* part : {&model, &state}) {
        create_shared_file(part->path, part->layout.file_bytes);
      }
    });
    together(ranks, [&] {
      for (PartFile* part : {&model, &state}) write_parts(*part, leads);
    });
    for (PartFile* part : {&model, &state}) gather_pieces(ranks, *part);
    together(ranks, [&] {
      if (!leads) return;
      const std::string config = read_text(path_of(kConfigFile), kLargestConfig);
      const Manifest manifest{position.step,
                              {{kConfigFile, config.size(), checksum(config.data(), config.size()), {}},
                               listed(model),
                               listed(state)}};
      write_durably(path_of(kManifestFile), to_json(manifest));
      publish(checkpoints, unfinished, checkpoint_directory(checkpoints, position.step));
      prepared = false;
      const std::vector<std::int64_t> steps = checkpoint_steps(checkpoints);
      for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < steps.size(); ++i) {
        remove_checkpoint(checkpoints, steps[i]);
      }
    });
  } catch (const Error&) {
    // What there is of it takes space on a disk that may be full.
    std::error_code error;
    if (prepared) fs::remove_all(unfinished, error);
    throw;
  }
}

TrainingPosition read_training_position(const std::string& directory) {
  const TrainingPosition position =
      position_in(SafetensorsReader((fs::path(directory) / kStateFile).string()));
  check_name(directory, position);
  return position;
}

namespace {

/// Throws Error (kInput) unless weights and state are those of the subject, and whole.
TrainingPosition check_fit(const std::string& directory, const TrainingSubject& subject) {
  const std::string defect = defect_of_checkpoint(directory);
  check_input(defect.empty(), "the checkpoint '{}' is not whole: {}", directory, defect);
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
  return position;
}

/// Reads the rows that this rank holds.
void read_state(const Context& context, const std::string& directory, const TrainingSubject& subject) {
  const SafetensorsReader state((fs::path(directory) / kStateFile).string());
  std::vector<std::byte> piece(kTransferBytes);
  for (const StateTensor& tensor : state_tensors(subject)) {
    const SafetensorsEntry& entry = state.entry(tensor.name);
    const std::size_t first = static_cast<std::size_t>(tensor.held.first) * tensor.row_bytes();
    const std::size_t last = static_cast<std::size_t>(tensor.held.last) * tensor.row_bytes();
    for (std::size_t at = first; at < last; at += piece.size()) {
      const std::size_t count = std::min(piece.size(), last - at);
      state.read_bytes(entry, at, at + count, piece.data());
      context.backend.upload(context, piece.data(), tensor.data + (at - first), count);
    }
  }
}

}  // namespace

TrainingPosition read_checkpoint(const Context& context, Communicator& ranks,
                                 const std::string& directory, const TrainingSubject& subject) {
  TrainingPosition position;
  Manifest manifest;
  together(ranks, [&] {
    position = check_fit(directory, subject);
    manifest = read_manifest(directory);
  });
  verify_checksums(ranks, directory, manifest, {kConfigFile, kModelFile, kStateFile});
  // All is known to fit: from here on only a failing disk can stop the reading.
  together(ranks, [&] {
    const HuggingFaceModel model(directory);
    for (std::size_t i = 0; i < subject.weights.size(); ++i) model.read(context, i, subject.weights[i]);
    read_state(context, directory, subject);
  });
  return position;
}

void verify_weights(const std::string& directory) {
  const std::unique_ptr<Communicator> one = single_rank();
  verify_checksums(*one, directory, read_manifest(directory), {kConfigFile, kModelFile});
}

}  // namespace agoq

#include "checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <utility>

#include "checkpoint/durable_file.h"
#include "checkpoint/json_text.h"
#include "checkpoint/strict_json.h"
#include "core/error.h"

namespace agoq {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "tensors are stored as little-endian bytes");

struct DtypeName {
  ElementType type;
  std::string_view name;
};

constexpr std::array<DtypeName, 8> kDtypes = {{
    {ElementType::kFp64, "F64"},
    {ElementType::kFp32, "F32"},
    {ElementType::kBf16, "BF16"},
    {ElementType::kFp16, "F16"},
    {ElementType::kInt64, "I64"},
    {ElementType::kInt32, "I32"},
    {ElementType::kInt16, "I16"},
    {ElementType::kUint8, "U8"},
}};

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::uint64_t kLengthBytes = 8;
// The limit of the format's reference implementation: a header is parsed in memory.
constexpr std::uint64_t kLargestHeader = 100'000'000;
// An object of tensors, an object per tensor, and its arrays.
constexpr int kDeepestHeader = 3;

/// The non-negative integer in `value`, if it is one that int64 holds.
std::optional<std::int64_t> extent_of(const Json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto number = value.get<std::uint64_t>();
  if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
  return static_cast<std::int64_t>(number);
}

// Shape is made from as many extents as the program text lists.
Shape make_shape(const std::vector<std::int64_t>& extents) {
  switch (extents.size()) {
    case 0: return {};
    case 1: return {extents[0]};
    case 2: return {extents[0], extents[1]};
    case 3: return {extents[0], extents[1], extents[2]};
    default: return {extents[0], extents[1], extents[2], extents[3]};
  }
}

/// The entry that the header describes, its range still relative to the data. Throws for any field
/// that is missing, of the wrong kind, or does not agree with the others.
struct RelativeEntry {
  SafetensorsEntry entry;
  std::uint64_t end;
};

RelativeEntry read_entry(const std::string& path, const std::string& name, const Json& value,
                         std::uint64_t data_bytes) {
  const std::string shown = printable(name);
  check_input(
      value.is_object() && value.contains("dtype") && value["dtype"].is_string() &&
          value.contains("shape") && value["shape"].is_array() && value.contains("data_offsets") &&
          value["data_offsets"].is_array() && value["data_offsets"].size() == 2 && value.size() == 3,
      "'{}': tensor '{}' needs exactly dtype, shape and two data_offsets in the header", path, shown);

  const auto& dtype_name = value["dtype"].get_ref<const std::string&>();
  const auto dtype = std::find_if(kDtypes.begin(), kDtypes.end(),
                                  [&](const DtypeName& known) { return known.name == dtype_name; });
  check_input(dtype != kDtypes.end(),
              "'{}': tensor '{}' has dtype '{}'; F64, F32, BF16, F16, I64, I32, I16 and U8 can be read",
              path, shown, printable(dtype_name));

  const Json& shape = value["shape"];
  check_input(shape.size() <= Shape::kMaxRank,
              "'{}': tensor '{}' has {} dimensions; at most {} can be read", path, shown, shape.size(),
              static_cast<int>(Shape::kMaxRank));
  std::vector<std::int64_t> extents;
  std::uint64_t bytes = size_of(dtype->type);
  for (const Json& item : shape) {
    const std::optional<std::int64_t> extent = extent_of(item);
    check_input(extent.has_value(), "'{}': tensor '{}' has an extent that is not a non-negative integer",
                path, shown);
    // An extent of zero makes any product fit, but the others must still fit into one another.
    check_input(!__builtin_mul_overflow(
                    bytes, static_cast<std::uint64_t>(std::max<std::int64_t>(*extent, 1)), &bytes),
                "'{}': the shape of tensor '{}' has more bytes than any file", path, shown);
    extents.push_back(*extent);
  }
  if (std::count(extents.begin(), extents.end(), 0) > 0) bytes = 0;

  const std::optional<std::int64_t> begin = extent_of(value["data_offsets"][0]);
  const std::optional<std::int64_t> end = extent_of(value["data_offsets"][1]);
  check_input(begin && end && *begin <= *end,
              "'{}': tensor '{}' has data_offsets that are not a range of bytes", path, shown);
  check_input(
      static_cast<std::uint64_t>(*end) <= data_bytes,
      "'{}': tensor '{}' ends at byte {} of {} bytes of data: the file is cut short, copy it again",
      path, shown, *end, data_bytes);
  check_input(static_cast<std::uint64_t>(*end - *begin) == bytes,
              "'{}': tensor '{}' of {} {} takes {} bytes; its data_offsets hold {}", path, shown,
              dtype_name, make_shape(extents).to_string(), bytes, *end - *begin);
  return {{name, dtype->type, make_shape(extents), static_cast<std::uint64_t>(*begin)},
          static_cast<std::uint64_t>(*end)};
}

}  // namespace

std::string_view safetensors_dtype(ElementType type) {
  for (const DtypeName& known : kDtypes) {
    if (known.type == type) return known.name;
  }
  fail("safetensors has no name for the element type {}", name_of(type));
}

// --- reading ---

SafetensorsReader::SafetensorsReader(std::string path) : path_(std::move(path)) {
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  check_input(descriptor_ >= 0, "cannot open '{}': {}", path_, std::strerror(errno));
  try {
    struct stat status {};
    check_input(::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode),
                "'{}' is not a regular file", path_);
    const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
    check_input(file_bytes >= kLengthBytes,
                "'{}' is not a safetensors file: it has {} bytes, fewer than {}", path_, file_bytes,
                kLengthBytes);
    std::uint64_t header_bytes = 0;
    read_at(0, &header_bytes, kLengthBytes, "the header's length");
    check_input(
        header_bytes <= file_bytes - kLengthBytes && header_bytes <= kLargestHeader,
        "'{}' is not a whole safetensors file: a header of {} bytes is announced in a file of {} (at "
        "most {}); copy it again",
        path_, header_bytes, file_bytes, kLargestHeader);
    std::string header(header_bytes, '\0');
    read_at(kLengthBytes, header.data(), header.size(), "the header");
    parse(header, kLengthBytes + header_bytes, file_bytes - kLengthBytes - header_bytes);
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
}

SafetensorsReader::~SafetensorsReader() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

SafetensorsReader::SafetensorsReader(SafetensorsReader&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      metadata_(std::move(other.metadata_)),
      entries_(std::move(other.entries_)),
      index_(std::move(other.index_)) {}

void SafetensorsReader::parse(const std::string& header, std::uint64_t data_begin,
                              std::uint64_t data_bytes) {
  const Json root = parse_strict_json(header, path_, kDeepestHeader);
  check_input(root.is_object(), "'{}' is not a safetensors file: its header is not a JSON object",
              path_);

  std::vector<RelativeEntry> found;
  for (const auto& [name, value] : root.items()) {
    if (name != kMetadataKey) {
      found.push_back(read_entry(path_, name, value, data_bytes));
      continue;
    }
    check_input(value.is_object(), "'{}': __metadata__ is not an object of strings", path_);
    for (const auto& [key, text] : value.items()) {
      check_input(text.is_string(), "'{}': '{}' in __metadata__ is not a string", path_, printable(key));
      metadata_.emplace(key, text.get<std::string>());
    }
  }

  std::sort(found.begin(), found.end(), [](const RelativeEntry& a, const RelativeEntry& b) {
    return std::tie(a.entry.begin, a.end, a.entry.name) < std::tie(b.entry.begin, b.end, b.entry.name);
  });
  std::uint64_t covered = 0;
  for (const RelativeEntry& item : found) {
    check_input(item.entry.begin >= covered, "'{}': tensor '{}' overlaps the one before it, at byte {}",
                path_, printable(item.entry.name), item.entry.begin);
    check_input(item.entry.begin == covered,
                "'{}': {} bytes in front of tensor '{}' belong to no tensor", path_,
                item.entry.begin - covered, printable(item.entry.name));
    covered = item.end;
  }
  check_input(covered == data_bytes,
              "'{}': the header describes {} bytes of data and {} are there: copy the file again", path_,
              covered, data_bytes);

  for (RelativeEntry& item : found) {
    item.entry.begin += data_begin;
    index_.emplace(item.entry.name, entries_.size());
    entries_.push_back(std::move(item.entry));
  }
}

const SafetensorsEntry* SafetensorsReader::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

const SafetensorsEntry& SafetensorsReader::entry(std::string_view name) const {
  const SafetensorsEntry* found = find(name);
  check_input(found != nullptr, "'{}' has no tensor '{}'", path_, name);
  return *found;
}

const SafetensorsEntry& SafetensorsReader::entry(std::string_view name, ElementType type,
                                                 const Shape& shape) const {
  const SafetensorsEntry& found = entry(name);
  check_input(found.type == type && found.shape == shape, "'{}': tensor '{}' is {} {}; {} {} is needed",
              path_, name, safetensors_dtype(found.type), found.shape.to_string(),
              safetensors_dtype(type), shape.to_string());
  return found;
}

void SafetensorsReader::read(const SafetensorsEntry& entry, void* destination) const {
  read_bytes(entry, 0, entry.bytes(), destination);
}

void SafetensorsReader::read_bytes(const SafetensorsEntry& entry, std::size_t begin, std::size_t end,
                                   void* destination) const {
  check(begin <= end && end <= entry.bytes(), "bytes [{}, {}) of tensor '{}', which has {}", begin, end,
        printable(entry.name), entry.bytes());
  read_at(entry.begin + begin, destination, end - begin, entry.name);
}

void SafetensorsReader::read_rows(const SafetensorsEntry& entry, std::int64_t begin, std::int64_t end,
                                  void* destination) const {
  const Tensor whole{nullptr, entry.type, entry.shape};
  check(0 <= begin && begin <= end && end <= whole.rows(), "rows [{}, {}) of tensor '{}', which has {}",
        begin, end, printable(entry.name), whole.rows());
  const std::size_t row_bytes = static_cast<std::size_t>(whole.width()) * size_of(entry.type);
  read_bytes(entry, static_cast<std::size_t>(begin) * row_bytes,
             static_cast<std::size_t>(end) * row_bytes, destination);
}

void SafetensorsReader::read_at(std::uint64_t offset, void* destination, std::size_t bytes,
                                std::string_view what) const {
  // Linux transfers at most 0x7FFFF000 bytes in one call.
  constexpr std::size_t kLargestTransfer = std::size_t{1} << 30;
  char* next = static_cast<char*>(destination);
  while (bytes > 0) {
    const ssize_t count =
        ::pread(descriptor_, next, std::min(bytes, kLargestTransfer), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    check_input(count >= 0, "cannot read '{}' of '{}': {}", printable(what), path_,
                std::strerror(errno));
    check_input(count > 0, "'{}' became shorter while '{}' was read from it", path_, printable(what));
    next += count;
    offset += static_cast<std::uint64_t>(count);
    bytes -= static_cast<std::size_t>(count);
  }
}

// --- writing ---

SafetensorsSource safetensors_source(std::string name, const Tensor& host) {
  return {std::move(name), host.type, host.shape,
          [host](const ByteSink& sink) { sink(host.data, host.bytes()); }};
}

SafetensorsLayout lay_out_safetensors(const std::string& path,
                                      const std::vector<SafetensorsSource>& sources,
                                      const SafetensorsMetadata& metadata) {
  std::vector<const SafetensorsSource*> order;
  order.reserve(sources.size());
  for (const SafetensorsSource& source : sources) order.push_back(&source);
  std::stable_sort(order.begin(), order.end(),
                   [](const SafetensorsSource* a, const SafetensorsSource* b) {
                     return size_of(a->type) > size_of(b->type);
                   });

  SafetensorsLayout layout;
  Json json = Json::object();
  if (!metadata.empty()) json[std::string(kMetadataKey)] = metadata;
  std::uint64_t begin = 0;
  for (const SafetensorsSource* source : order) {
    check(source->name != kMetadataKey && !json.contains(source->name),
          "the tensor name '{}' for '{}' is taken: every tensor needs a name of its own", source->name,
          path);
    Json shape = Json::array();
    for (int axis = 0; axis < source->shape.rank(); ++axis) shape.push_back(source->shape[axis]);
    const std::uint64_t end =
        begin + static_cast<std::uint64_t>(source->shape.count()) * size_of(source->type);
    json[source->name] = {
        {"dtype", safetensors_dtype(source->type)}, {"shape", shape}, {"data_offsets", {begin, end}}};
    layout.tensors.push_back({source, begin, end});
    begin = end;
  }
  std::string text;
  try {
    text = to_text(json, -1);
  } catch (const Json::exception&) {
    fail("a name or a metadata text for '{}' is not UTF-8", path);
  }
  text.append((kLengthBytes - text.size() % kLengthBytes) % kLengthBytes, ' ');
  check(text.size() <= kLargestHeader, "the header of '{}' would have {} bytes; readers accept {}", path,
        text.size(), kLargestHeader);

  const std::uint64_t text_bytes = text.size();
  layout.header.assign(reinterpret_cast<const char*>(&text_bytes), kLengthBytes);
  layout.header += text;
  for (SafetensorsLayout::Placed& tensor : layout.tensors) {
    tensor.begin += layout.header.size();
    tensor.end += layout.header.size();
  }
  layout.file_bytes = begin + layout.header.size();
  return layout;
}

void produce_bytes(const std::string& path, const SafetensorsSource& source, const ByteSink& sink) {
  const std::uint64_t whole = static_cast<std::uint64_t>(source.shape.count()) * size_of(source.type);
  const std::uint64_t expected = source.part ? source.part->end - source.part->begin : whole;
  std::uint64_t produced = 0;
  source.produce([&](const void* data, std::size_t bytes) {
    produced += bytes;
    check(produced <= expected, "tensor '{}' of '{}' has {} bytes and more were produced", source.name,
          path, expected);
    sink(data, bytes);
  });
  check(produced == expected, "tensor '{}' of '{}' has {} bytes and {} were produced", source.name, path,
        expected, produced);
}

void write_safetensors(const std::string& path, const std::vector<SafetensorsSource>& sources,
                       const SafetensorsMetadata& metadata) {
  const SafetensorsLayout layout = lay_out_safetensors(path, sources, metadata);
  DurableFile file(path);
  file.write(layout.header.data(), layout.header.size());
  for (const SafetensorsLayout::Placed& tensor : layout.tensors) {
    check(!tensor.source->part, "tensor '{}' of '{}' is given in part: this file is written by one",
          tensor.source->name, path);
    produce_bytes(path, *tensor.source,
                  [&](const void* data, std::size_t bytes) { file.write(data, bytes); });
  }
  file.commit();
}

}  // namespace agoq

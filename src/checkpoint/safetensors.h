// The safetensors format (huggingface/safetensors): named tensors in one file.
//
// Layout: 8 bytes, little-endian: length of the header; the header, a JSON object
// {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ..., "__metadata__":
// {"key": "text"}}, padded with spaces; then the data. Offsets count from the end of the header.
//
// Invariant of a file: the tensors' byte ranges cover the data without overlap or hole. The reader
// checks that and everything else it relies on before it hands out an entry, so a truncated or
// hostile file gives an Error of one line that names the file and the tensor, never a crash or a
// large allocation. The writer puts wider element types first, so that every tensor starts at a
// multiple of its element size in the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/element_type.h"
#include "core/tensor.h"

namespace agoq {

using SafetensorsMetadata = std::map<std::string, std::string>;

/// "F32", "BF16", ...: the format's name of an element type.
std::string_view safetensors_dtype(ElementType type);

struct SafetensorsEntry {
  std::string name;
  ElementType type = ElementType::kFp32;
  Shape shape;
  std::uint64_t begin = 0;  // bytes, from the start of the file

  std::size_t bytes() const { return static_cast<std::size_t>(shape.count()) * size_of(type); }
};

/// Reads from one file, a tensor or rows of it at a time; the file is never loaded as a whole.
/// Every member throws Error (kInput) for what is wrong with the file.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(std::string path);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&& other) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&&) = delete;
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  const std::string& path() const { return path_; }
  const SafetensorsMetadata& metadata() const { return metadata_; }
  /// In the order of the file.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  /// Null when there is no such tensor.
  const SafetensorsEntry* find(std::string_view name) const;
  /// Throws when there is no such tensor, or it has another type or shape.
  const SafetensorsEntry& entry(std::string_view name) const;
  const SafetensorsEntry& entry(std::string_view name, ElementType type, const Shape& shape) const;

  /// All bytes of a tensor into host memory.
  void read(const SafetensorsEntry& entry, void* destination) const;
  /// Bytes [begin, end) of a tensor.
  void read_bytes(const SafetensorsEntry& entry, std::size_t begin, std::size_t end,
                  void* destination) const;
  /// Rows [begin, end) of a tensor seen as [product of all extents but the last, last extent].
  void read_rows(const SafetensorsEntry& entry, std::int64_t begin, std::int64_t end,
                 void* destination) const;

 private:
  void parse(const std::string& header, std::uint64_t data_begin, std::uint64_t data_bytes);
  void read_at(std::uint64_t offset, void* destination, std::size_t bytes, std::string_view what) const;

  std::string path_;
  int descriptor_ = -1;
  SafetensorsMetadata metadata_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::size_t, std::less<>> index_;
};

/// Takes the next bytes of a tensor that is being written.
using ByteSink = std::function<void(const void* data, std::size_t bytes)>;

/// Bytes [begin, end) of a tensor.
struct ByteRange {
  std::size_t begin = 0;
  std::size_t end = 0;
};

struct SafetensorsSource {
  std::string name;
  ElementType type = ElementType::kFp32;
  Shape shape;
  /// Called once, when the tensor's turn comes: passes all bytes of the tensor, or of `part`, in order
  /// and in pieces of any size, to the sink. So no second copy of a model exists in memory.
  std::function<void(const ByteSink&)> produce;
  /// What this process writes of a tensor that several write together; nothing: all of it.
  std::optional<ByteRange> part = std::nullopt;
};

/// A source whose bytes lie in host memory.
SafetensorsSource safetensors_source(std::string name, const Tensor& host);

/// Where everything stands in a file of tensors: the same for all who write parts of it.
struct SafetensorsLayout {
  struct Placed {
    const SafetensorsSource* source;
    std::uint64_t begin;  // bytes, from the start of the file
    std::uint64_t end;
  };
  std::string header;  // with its length in front
  std::vector<Placed> tensors;
  std::uint64_t file_bytes = 0;
};

/// `path` names the file in messages. Points to `sources`.
SafetensorsLayout lay_out_safetensors(const std::string& path,
                                      const std::vector<SafetensorsSource>& sources,
                                      const SafetensorsMetadata& metadata);

/// Calls the source's produce and checks that as many bytes come as it has.
void produce_bytes(const std::string& path, const SafetensorsSource& source, const ByteSink& sink);

/// Writes a file of whole tensors durably (checkpoint/durable_file.h).
void write_safetensors(const std::string& path, const std::vector<SafetensorsSource>& sources,
                       const SafetensorsMetadata& metadata);

}  // namespace agoq

#include "checkpoint/manifest.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/durable_file.h"
#include "checkpoint/json_text.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/strict_json.h"
#include "comm/together.h"
#include "core/checksum.h"
#include "core/error.h"

namespace agoq {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kFormat = "agoq checkpoint";
constexpr std::int64_t kVersionOfFormat = 1;
constexpr std::size_t kLargestManifest = 100'000'000;
constexpr int kDeepestManifest = 5;

// Read and checked by one thread at a time.
constexpr std::uint64_t kChunkBytes = std::uint64_t{16} << 20;
constexpr std::size_t kReadBytes = std::size_t{1} << 20;

std::string hexadecimal(std::uint32_t value) { return fmt::format("{:08x}", value); }

std::uint32_t checksum_in(const Json& value, const std::string& path) {
  const std::string text = value.is_string() ? value.get<std::string>() : "";
  const bool valid = text.size() == 8 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
  check_input(valid, "'{}': a checksum is 8 hexadecimal digits; there is {}", path,
              printable_json(value));
  return static_cast<std::uint32_t>(std::stoul(text, nullptr, 16));
}

ManifestFile file_in(const std::string& name, const Json& value, const std::string& path) {
  const bool valid = value.is_object() && value.contains("bytes") &&
                     value["bytes"].is_number_unsigned() && value.contains("crc32");
  check_input(valid, "'{}' does not give bytes and crc32 of '{}'", path, printable(name));
  ManifestFile file{name, value["bytes"].get<std::uint64_t>(), checksum_in(value["crc32"], path), {}};
  if (!value.contains("tensors")) return file;
  check_input(value["tensors"].is_object(), "'{}': the tensors of '{}' are not an object", path,
              printable(name));
  for (const auto& [tensor, of_tensor] : value["tensors"].items()) {
    file.tensors.emplace(tensor, checksum_in(of_tensor, path));
  }
  return file;
}

/// A part of a file that one thread reads.
struct Chunk {
  std::size_t file;
  std::uint64_t begin;
  std::uint64_t bytes;
};

/// A tensor of a file, or what lies in front of the first.
struct Section {
  std::string tensor;
  std::uint64_t begin;
  std::uint64_t end;
};

std::vector<Section> sections_of(const std::string& path, const ManifestFile& file) {
  if (file.tensors.empty()) return {{"", 0, file.bytes}};
  const SafetensorsReader reader(path);
  std::vector<Section> sections{{"", 0, file.bytes}};
  if (!reader.entries().empty()) sections.front().end = reader.entries().front().begin;
  for (const SafetensorsEntry& entry : reader.entries()) {
    sections.push_back({entry.name, entry.begin, entry.begin + entry.bytes()});
  }
  return sections;
}

std::uint32_t checksum_of(int descriptor, const std::string& path, const Chunk& chunk) {
  std::vector<std::byte> piece(kReadBytes);
  std::uint32_t value = 0;
  for (std::uint64_t at = 0; at < chunk.bytes;) {
    const std::size_t wanted = std::min<std::uint64_t>(piece.size(), chunk.bytes - at);
    const ssize_t count =
        ::pread(descriptor, piece.data(), wanted, static_cast<off_t>(chunk.begin + at));
    if (count < 0 && errno == EINTR) continue;
    check_input(count >= 0, "cannot read '{}': {}", path, std::strerror(errno));
    check_input(count > 0, "'{}' became shorter while it was read", path);
    value = checksum(piece.data(), static_cast<std::size_t>(count), value);
    at += static_cast<std::uint64_t>(count);
  }
  return value;
}

/// The checksums of chunks [first, last), by all threads.
std::vector<std::uint32_t> checksums_of(const std::vector<std::string>& paths,
                                        const std::vector<Chunk>& chunks, std::size_t first,
                                        std::size_t last) {
  std::vector<int> descriptors;
  for (const std::string& path : paths)
    descriptors.push_back(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::vector<std::uint32_t> values(last - first);
  std::vector<std::string> failures(last - first);  // an exception must not leave a parallel region
#pragma omp parallel for schedule(dynamic)
  for (std::size_t i = first; i < last; ++i) {
    try {
      const std::size_t file = chunks[i].file;
      check_input(descriptors[file] >= 0, "cannot open '{}'", paths[file]);
      values[i - first] = checksum_of(descriptors[file], paths[file], chunks[i]);
    } catch (const std::exception& error) {
      failures[i - first] = error.what();
    }
  }
  for (const int descriptor : descriptors) {
    if (descriptor >= 0) ::close(descriptor);
  }
  for (const std::string& failure : failures) check_input(failure.empty(), "{}", failure);
  return values;
}

}  // namespace

const ManifestFile& Manifest::file(std::string_view name) const {
  const auto found = std::find_if(files.begin(), files.end(),
                                  [&](const ManifestFile& candidate) { return candidate.name == name; });
  check_input(found != files.end(), "{} does not list {}", kManifestFile, name);
  return *found;
}

std::string to_json(const Manifest& manifest) {
  nlohmann::ordered_json json;
  json["format"] = kFormat;
  json["version"] = kVersionOfFormat;
  json["step"] = manifest.step;
  json["files"] = nlohmann::ordered_json::object();
  for (const ManifestFile& file : manifest.files) {
    nlohmann::ordered_json& entry = json["files"][file.name];
    entry["bytes"] = file.bytes;
    entry["crc32"] = hexadecimal(file.checksum);
    for (const auto& [tensor, value] : file.tensors) entry["tensors"][tensor] = hexadecimal(value);
  }
  return to_text(json) + "\n";
}

Manifest read_manifest(const std::string& directory) {
  const std::string path = (fs::path(directory) / kManifestFile).string();
  std::error_code error;
  check_input(
      fs::exists(path, error),
      "{} is missing in '{}': the checkpoint is of a version before there were manifests, or was "
      "copied without it; copy all its files, or train again",
      kManifestFile, directory);
  const Json json = parse_strict_json(read_text(path, kLargestManifest), path, kDeepestManifest);
  check_input(json.is_object() && json.value("format", Json()) == kFormat,
              "'{}' is not the manifest of a checkpoint", path);
  check_input(json.value("version", Json()) == kVersionOfFormat,
              "'{}' has version {}; this program reads {}: use the agoq that wrote it", path,
              printable_json(json.value("version", Json())), kVersionOfFormat);
  check_input(json.contains("step") && json["step"].is_number_unsigned() && json.contains("files") &&
                  json["files"].is_object(),
              "'{}' does not give a step and files", path);
  const auto step = json["step"].get<std::uint64_t>();
  check_input(step <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()),
              "'{}': {} is no step", path, step);
  Manifest manifest{static_cast<std::int64_t>(step), {}};
  for (const auto& [name, value] : json["files"].items()) {
    manifest.files.push_back(file_in(name, value, path));
  }
  return manifest;
}

std::string defect_of_sizes(const std::string& directory, const Manifest& manifest) {
  for (const ManifestFile& file : manifest.files) {
    // A name that leads elsewhere is not followed.
    if (file.name.find('/') != std::string::npos) {
      return fmt::format("{} lists '{}', which is no file of it", kManifestFile, printable(file.name));
    }
    const fs::path path = fs::path(directory) / file.name;
    std::error_code error;
    if (!fs::exists(path, error)) return fmt::format("{} is missing", printable(file.name));
    const std::uintmax_t bytes = fs::file_size(path, error);
    if (error) return fmt::format("{}: {}", printable(file.name), error.message());
    if (bytes != file.bytes) {
      return fmt::format("{} has {} bytes and was written with {}: it was {}", printable(file.name),
                         bytes, file.bytes, bytes < file.bytes ? "cut short" : "replaced or added to");
    }
  }
  return "";
}

void verify_checksums(Communicator& ranks, const std::string& directory, const Manifest& manifest,
                      const std::vector<std::string>& names) {
  std::vector<std::string> paths;
  std::vector<std::vector<Section>> sections;
  std::vector<Chunk> chunks;
  std::string own;  // checksums of this rank's chunks
  together(ranks, [&] {
    for (const std::string& name : names) {
      const ManifestFile& file = manifest.file(name);
      paths.push_back((fs::path(directory) / name).string());
      sections.push_back(sections_of(paths.back(), file));
      for (const Section& section : sections.back()) {
        for (std::uint64_t at = section.begin; at < section.end; at += kChunkBytes) {
          chunks.push_back({paths.size() - 1, at, std::min(kChunkBytes, section.end - at)});
        }
      }
    }
    const auto border = [&](int rank) {
      return chunks.size() * static_cast<std::size_t>(rank) / static_cast<std::size_t>(ranks.size());
    };
    const std::vector<std::uint32_t> values =
        checksums_of(paths, chunks, border(ranks.rank()), border(ranks.rank() + 1));
    own.assign(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(std::uint32_t));
  });
  std::string all;
  for (const std::string& text : ranks.gather_texts(own)) all += text;
  together(ranks, [&] {
    check(all.size() == chunks.size() * sizeof(std::uint32_t),
          "the ranks see '{}' differently: {} chunks of it were read, and there are {}", directory,
          all.size() / sizeof(std::uint32_t), chunks.size());
    std::vector<std::vector<PieceChecksum>> pieces(names.size());
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      std::uint32_t value = 0;
      std::memcpy(&value, all.data() + i * sizeof value, sizeof value);
      pieces[chunks[i].file].push_back({chunks[i].begin, chunks[i].bytes, value});
    }
    for (std::size_t f = 0; f < names.size(); ++f) {
      const ManifestFile& file = manifest.file(names[f]);
      for (const Section& section : sections[f]) {
        if (section.tensor.empty()) continue;
        const auto listed = file.tensors.find(section.tensor);
        check_input(listed != file.tensors.end(),
                    "'{}' has a tensor '{}' that the manifest does not list", paths[f],
                    printable(section.tensor));
        const std::uint32_t found = combined_checksum(pieces[f], section.begin, section.end);
        check_input(found == listed->second,
                    "'{}' is damaged: the bytes of tensor '{}' have the CRC-32 {} and were written with "
                    "{}; copy the file again, or remove the checkpoint",
                    paths[f], printable(section.tensor), hexadecimal(found),
                    hexadecimal(listed->second));
      }
      const std::uint32_t found = combined_checksum(pieces[f], 0, file.bytes);
      check_input(
          found == file.checksum,
          "'{}' is damaged: its bytes have the CRC-32 {} and were written with {}; copy the file "
          "again, or remove the checkpoint",
          paths[f], hexadecimal(found), hexadecimal(file.checksum));
    }
  });
}

}  // namespace agoq

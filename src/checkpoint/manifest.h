// manifest.json: what a checkpoint consists of, so that a damaged one is found.
//
//   {"format": "agoq checkpoint", "version": 1, "step": 10,
//    "files": {"model.safetensors": {"bytes": 1234, "crc32": "0123abcd",
//                                    "tensors": {"lm_head.weight": "89abcdef", ...}}, ...}}
//
// Checksums are CRC-32 (core/checksum.h) over all bytes of a file, and over those of each tensor,
// so that a message can name the one that is damaged. The manifest is the last file that is written into
// a checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace agoq {

inline constexpr const char* kManifestFile = "manifest.json";

struct ManifestFile {
  std::string name;
  std::uint64_t bytes = 0;
  std::uint32_t checksum = 0;
  std::map<std::string, std::uint32_t> tensors;  // checksums; none for a file of another kind
};

struct Manifest {
  std::int64_t step = 0;
  std::vector<ManifestFile> files;

  /// Throws Error (kInput) if it is not listed.
  const ManifestFile& file(std::string_view name) const;
};

std::string to_json(const Manifest& manifest);
/// Throws Error (kInput) if there is none or it is not one.
Manifest read_manifest(const std::string& directory);

/// The first file of the manifest that is missing or has not its size, in words; empty if all are right.
std::string defect_of_sizes(const std::string& directory, const Manifest& manifest);

/// Reads all bytes of the files `names` in `directory`, shared out among the ranks and their threads,
/// and compares their checksums with the manifest's. Collective. Throws Error (kInput) on all ranks,
/// naming the file and the tensor that differ.
void verify_checksums(Communicator& ranks, const std::string& directory, const Manifest& manifest,
                      const std::vector<std::string>& names);

}  // namespace agoq

// What a GPU run needs of a machine, and the one line for each thing that is missing: what was expected,
// what was found, what to do. Texts and decisions only, without CUDA, so that they are tested anywhere.
#pragma once

#include <compare>
#include <functional>
#include <string>
#include <string_view>

namespace agoq {

/// What looking for a GPU found. Versions as CUDA counts them: 13010 is 13.1.
struct GpuSearch {
  int driver = 0;               // the newest CUDA that the driver serves; 0: there is no driver
  int runtime = 0;              // the CUDA of this build
  bool driver_too_old = false;  // as the runtime says: minor versions are compatible, up to a point
  int count = 0;
  std::string failure;  // the runtime's words; empty when the search succeeded
};

/// Throws Error (kInput) when there is no driver, one too old, or no GPU.
void check_gpu_search(const GpuSearch& search);
/// Throws Error (kInput) when the GPU is older than compute capability 8.0.
void check_capability(std::string_view gpu, int major, int minor);

/// Versions of a library, of which any with the major version of `built` and at least `least` serves; as
/// {9, 8}. `found` of major 0 stands for a library that is not there.
struct LibraryVersion {
  int major = 0, minor = 0;
  auto operator<=>(const LibraryVersion&) const = default;
};
std::string to_string(const LibraryVersion& version);  // "9.8"

/// Throws Error (kInput) when cuBLASLt is of another major version than the build's.
void check_cublas(const LibraryVersion& built, const LibraryVersion& found);

/// What is wrong with the cuDNN that was found and what to do about it; empty when it serves. `opening`:
/// the loader's words where it did not open.
std::string cudnn_problem(const LibraryVersion& built, const LibraryVersion& found,
                          const std::string& opening);

/// Whether the loader finds a library of this file name.
using FindLibrary = std::function<bool(const std::string& name)>;
bool loader_finds(const std::string& name);

/// Why dlopen did not open the module at `path`, from its words: which library of which version is
/// missing, and which other version was found instead.
std::string module_problem(const std::string& path, const std::string& words, const FindLibrary& finds);

/// The text of an operation that CUDA or one of its libraries failed. Operations are queued, so that one
/// queued earlier may be the one that failed, unless each was waited for (CUDA_LAUNCH_BLOCKING=1).
std::string device_failure(std::string_view operation, std::string_view library,
                           std::string_view reported, bool waited);

/// Whether CUDA_LAUNCH_BLOCKING asks to wait for each operation.
bool waits_for_each_operation();

}  // namespace agoq

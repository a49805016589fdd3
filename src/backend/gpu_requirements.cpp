#include "backend/gpu_requirements.h"

#include <dlfcn.h>

#include <cstdlib>

#include "core/error.h"

namespace agoq {
namespace {

constexpr int kOldestMajor = 8;
constexpr LibraryVersion kOldestCudnn{9, 8};

// Major versions that a loader is asked for when the one that is needed is absent.
constexpr int kOldestLookedFor = 8, kNewestLookedFor = 16;

std::string version_of(int cuda) { return fmt::format("{}.{}", cuda / 1000, cuda % 1000 / 10); }

/// "libcublasLt.so.13": "libcublasLt.so." and 13; major 0 when the name has no version.
struct Soname {
  std::string stem;
  int major = 0;
  explicit Soname(const std::string& name) {
    const std::size_t end = name.find(".so.");
    if (end == std::string::npos) return;
    stem = name.substr(0, end + 4);
    major = std::atoi(name.c_str() + end + 4);
  }
};

std::string other_version(const std::string& name, const FindLibrary& finds) {
  const Soname needed(name);
  if (needed.major == 0) return "";
  for (int major = kNewestLookedFor; major >= kOldestLookedFor; --major) {
    const std::string other = fmt::format("{}{}", needed.stem, major);
    if (major != needed.major && finds(other)) {
      return fmt::format(" (it finds {}, another major version)", other);
    }
  }
  return "";
}

/// Where a user gets it.
std::string source_of(const std::string& library) {
  const Soname name(library);
  if (name.stem == "libcublasLt.so." || name.stem == "libcublas.so." || name.stem == "libcudart.so.") {
    return fmt::format("install the libraries of CUDA {} (https://developer.nvidia.com/cuda-downloads)",
                       name.major);
  }
  return "install it";
}

}  // namespace

std::string to_string(const LibraryVersion& version) {
  return fmt::format("{}.{}", version.major, version.minor);
}

void check_gpu_search(const GpuSearch& search) {
  check_input(search.driver != 0,
              "a GPU run needs an NVIDIA driver that serves CUDA {} and this machine has none: install "
              "it, or run on the CPU (--set run.device=cpu)",
              version_of(search.runtime));
  check_input(!search.driver_too_old,
              "this build needs an NVIDIA driver that serves CUDA {} and this machine's serves CUDA {}: "
              "install a newer driver, or run on the CPU (--set run.device=cpu)",
              version_of(search.runtime), version_of(search.driver));
  check_input(search.failure.empty() && search.count > 0,
              "a GPU run needs an NVIDIA GPU and none was found ({}): look at nvidia-smi and "
              "CUDA_VISIBLE_DEVICES, or run on the CPU (--set run.device=cpu)",
              search.failure.empty() ? "the driver counts 0" : search.failure);
}

void check_capability(std::string_view gpu, int major, int minor) {
  check_input(
      major >= kOldestMajor,
      "{} has compute capability {}.{}, and {}.0 (Ampere) or newer is needed: choose another GPU "
      "with CUDA_VISIBLE_DEVICES, or run on the CPU (--set run.device=cpu)",
      gpu, major, minor, kOldestMajor);
}

void check_cublas(const LibraryVersion& built, const LibraryVersion& found) {
  check_input(found.major == built.major,
              "this build needs cuBLASLt {}.x and the loader finds {}: install the libraries of CUDA {} "
              "(https://developer.nvidia.com/cuda-downloads) or put their folder first in "
              "LD_LIBRARY_PATH",
              built.major, to_string(found), built.major);
}

std::string cudnn_problem(const LibraryVersion& built, const LibraryVersion& found,
                          const std::string& opening) {
  if (found.major == built.major && found >= kOldestCudnn) return "";
  const std::string came = found.major == 0 ? fmt::format("could not be opened ({})", opening)
                                            : fmt::format("is {}", to_string(found));
  return fmt::format(
      "attention needs cuDNN {} or a newer {}.x, and libcudnn.so.{} {}: install it "
      "(https://developer.nvidia.com/cudnn, or PyPI's nvidia-cudnn-cu13 or -cu12) or add its folder to "
      "LD_LIBRARY_PATH",
      to_string(kOldestCudnn), built.major, built.major, came);
}

bool loader_finds(const std::string& name) {
  // Stays open: the program is about to end with the answer, and cuBLAS loses memory when it is
  // unloaded.
  return dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL) != nullptr;
}

std::string module_problem(const std::string& path, const std::string& words, const FindLibrary& finds) {
  // "libcublasLt.so.13: cannot open shared object file: No such file or directory"
  const std::size_t absent = words.find(": cannot open shared object file");
  if (absent == std::string::npos) {
    return fmt::format("the CUDA backend {} cannot be opened: {}: build it again (./dev build)", path,
                       words);
  }
  const std::string library = words.substr(0, absent);
  if (library == path) {
    return fmt::format(
        "the CUDA backend {} cannot be opened: {}: build it (./dev build), or correct AGOQ_CUDA_MODULE",
        path, words.substr(absent + 2));
  }
  return fmt::format(
      "the CUDA backend needs {}, which the loader does not find{}: {} or add its folder to "
      "LD_LIBRARY_PATH; or run on the CPU (--set run.device=cpu)",
      library, other_version(library, finds), source_of(library));
}

std::string device_failure(std::string_view operation, std::string_view library,
                           std::string_view reported, bool waited) {
  return fmt::format("{}{}: {} reports '{}'{}", operation,
                     waited ? "" : ", or an operation queued before it", library, reported,
                     waited ? "" : ": run again with CUDA_LAUNCH_BLOCKING=1 to learn which one");
}

bool waits_for_each_operation() {
  static const bool waits = [] {
    const char* const value = std::getenv("CUDA_LAUNCH_BLOCKING");
    return value != nullptr && *value != '\0' && std::string_view(value) != "0";
  }();
  return waits;
}

}  // namespace agoq

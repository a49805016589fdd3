// Opens the CUDA backend, a module beside the program (backend/cuda).
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "backend/backend.h"
#include "backend/gpu_requirements.h"
#include "backend/instruction_meter.h"

namespace agoq {
namespace {

constexpr const char* kModuleName = "libagoq_cuda.so";

/// Beside the program, or where the build put it; AGOQ_CUDA_MODULE names another place.
std::filesystem::path module_path() {
  if (const char* given = std::getenv("AGOQ_CUDA_MODULE"); given != nullptr && *given != '\0')
    return given;
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    std::filesystem::path beside = program.parent_path() / kModuleName;
    if (std::filesystem::exists(beside, error)) return beside;
  }
#ifdef AGOQ_CUDA_MODULE
  return AGOQ_CUDA_MODULE;
#else
  return {};
#endif
}

void* open() {
  const std::filesystem::path path = module_path();
  check_input(!path.empty(),
              "this build of agoq has no CUDA backend: build it where nvcc and cuBLAS are installed, or "
              "run on the CPU (--set run.device=cpu; eval, generate and bench kernels: --device cpu)");
  // The module stays open to the end of the process: what it returns has static storage.
  void* const module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (module == nullptr) {
    const char* const words = dlerror();
    fail_input(
        "{}", module_problem(path.string(), words == nullptr ? "no reason given" : words, loader_finds));
  }
  return module;
}

/// What the module's function `entry` returns.
template <typename Object>
Object& from_module(const char* entry) {
  static void* const module = open();
  const auto function = reinterpret_cast<Object* (*)()>(dlsym(module, entry));
  check_input(function != nullptr,
              "{} is not agoq's CUDA backend: build it again (./dev build), or correct AGOQ_CUDA_MODULE",
              module_path().string());
  return *function();
}

}  // namespace

Backend& cuda_backend() {
  static Backend& backend = from_module<Backend>("agoq_cuda_backend");
  return backend;
}

InstructionMeter& cuda_instruction_meter() {
  static InstructionMeter& meter = from_module<InstructionMeter>("agoq_cuda_instruction_meter");
  return meter;
}

Backend& backend_of(BackendKind kind) {
  return kind == BackendKind::kCuda ? cuda_backend() : cpu_backend();
}

}  // namespace agoq

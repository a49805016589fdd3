// Opens the CUDA backend, a module beside the program (backend/cuda).
#include <dlfcn.h>

#include "backend/backend.h"
#include "backend/gpu_requirements.h"
#include "core/module.h"

namespace agoq {
namespace {

#ifdef AGOQ_CUDA_MODULE
constexpr const char* kBuiltModule = AGOQ_CUDA_MODULE;
#else
constexpr const char* kBuiltModule = "";
#endif

Backend& open() {
  const std::string path = module_path("libagoq_cuda.so", "AGOQ_CUDA_MODULE", kBuiltModule);
  check_input(!path.empty(),
              "this build of agoq has no CUDA backend: build it where nvcc and cuBLAS are installed, or "
              "run on the CPU (--set run.device=cpu; eval, generate and bench kernels: --device cpu)");
  // The module stays open to the end of the process: its backend has static storage.
  void* const module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (module == nullptr) {
    const char* const words = dlerror();
    fail_input("{}", module_problem(path, words == nullptr ? "no reason given" : words, loader_finds));
  }
  using Entry = Backend* (*)();
  const auto entry = reinterpret_cast<Entry>(dlsym(module, "agoq_cuda_backend"));
  check_input(entry != nullptr,
              "{} is not agoq's CUDA backend: build it again (./dev build), or correct AGOQ_CUDA_MODULE",
              path);
  return *entry();
}

}  // namespace

Backend& cuda_backend() {
  static Backend& backend = open();
  return backend;
}

Backend& backend_of(BackendKind kind) {
  return kind == BackendKind::kCuda ? cuda_backend() : cpu_backend();
}

}  // namespace agoq

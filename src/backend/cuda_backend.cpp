// Opens the CUDA backend, a module beside the program (backend/cuda).
#include "backend/backend.h"
#include "backend/gpu_requirements.h"
#include "backend/instruction_meter.h"
#include "core/module.h"

namespace agoq {
namespace {

#ifdef AGOQ_CUDA_MODULE
constexpr const char* kBuiltModule = AGOQ_CUDA_MODULE;
#else
constexpr const char* kBuiltModule = "";
#endif

std::string path_of_module() { return module_path("libagoq_cuda.so", "AGOQ_CUDA_MODULE", kBuiltModule); }

void* open() {
  const std::string path = path_of_module();
  check_input(!path.empty(),
              "this build of agoq has no CUDA backend: build it where nvcc and cuBLAS are installed, or "
              "run on the CPU (--set run.device=cpu; eval, generate and bench kernels: --device cpu)");
  std::string problem;
  void* const module = open_module(path, /*lends_symbols=*/false, problem);
  if (module == nullptr) fail_input("{}", module_problem(path, problem, loader_finds));
  return module;
}

/// What the module's function `entry` returns.
template <typename Object>
Object& from_module(const char* entry) {
  static void* const module = open();
  return object_of_module<Object>(module, entry, path_of_module(), "CUDA backend", "AGOQ_CUDA_MODULE");
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

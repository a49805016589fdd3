#include "backend/cpu/cpu_backend.h"

#include <omp.h>

namespace agoq::cpu::AGOQ_CPU_ISA {

#define AGOQ_STRINGIFY_(text) #text
#define AGOQ_STRINGIFY(text) AGOQ_STRINGIFY_(text)

std::string CpuBackend::description() const {
  return fmt::format("CPU, {} threads, loops built for {}", omp_get_max_threads(),
                     AGOQ_STRINGIFY(AGOQ_CPU_ISA));
}

Backend& backend() {
  static CpuBackend backend;
  return backend;
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA

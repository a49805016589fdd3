#include "backend/cpu/cpu_backend.h"

#include <omp.h>

#include <chrono>

namespace agoq::cpu::AGOQ_CPU_ISA {

#define AGOQ_STRINGIFY_(text) #text
#define AGOQ_STRINGIFY(text) AGOQ_STRINGIFY_(text)

std::string CpuBackend::description() const {
  return fmt::format("CPU, {} threads, loops built for {}", omp_get_max_threads(),
                     AGOQ_STRINGIFY(AGOQ_CPU_ISA));
}

double CpuBackend::time(const Context& context, const std::function<void()>& work,
                        const std::function<void()>& wait) {
  const auto start = std::chrono::steady_clock::now();
  work();  // operations are done when they return
  if (wait) wait();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  return context.workspace.is_measuring() ? 0 : taken.count();
}

Backend& backend() {
  static CpuBackend backend;
  return backend;
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA

// Picks the build of backend/cpu for the machine at hand.
#include "backend/backend.h"

namespace agoq {
namespace cpu::baseline {
Backend& backend();
}
#if defined(__x86_64__)
namespace cpu::x86_64_v3 {
Backend& backend();
}
#endif

Backend& cpu_backend() {
#if defined(__x86_64__)
  // The features of x86-64-v3 that the compiler may use (x86-64 psABI).
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
      __builtin_cpu_supports("bmi2")) {
    return cpu::x86_64_v3::backend();
  }
#endif
  return cpu::baseline::backend();
}

}  // namespace agoq

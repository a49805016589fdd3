// Initial weights: normal numbers, and weights with their masters from FP32 values. Element by element.
#include "backend/cpu/storage.h"
#include "backend/initial_weight_checks.h"
#include "core/master_weight.h"
#include "core/random.h"

namespace agoq::cpu::AGOQ_CPU_ISA {

void CpuBackend::fill_normal(const Context& context, const RandomKey& key, double deviation,
                             const Tensor& x) {
  expect("fill_normal", "x", x, ElementType::kFp32, x.count());
  if (context.workspace.is_measuring()) return;
  float* values = x.as<float>();
  const std::int64_t count = x.count();
#pragma omp parallel for schedule(static) if (count > kSerialElements)
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(deviation * random_normal(key, static_cast<std::uint64_t>(i)));
  }
}

void CpuBackend::initialise_weight(const Context& context, const Tensor& initial, MasterKind kind,
                                   const Tensor& weight, const Tensor& master) {
  check_initial_weight(initial, kind, weight, master);
  if (context.workspace.is_measuring()) return;
  const float* values = initial.as<float>();
  const std::int64_t count = weight.count();
  for_storage("initialise_weight", weight.type, [&]<typename Storage>() {
    Storage* out = weight.as<Storage>();
    float* exact = master && kind == MasterKind::kFp32 ? master.as<float>() : nullptr;
    std::int16_t* remainder =
        master && kind == MasterKind::kRemainder ? master.as<std::int16_t>() : nullptr;
#pragma omp parallel for schedule(static) if (count > kSerialElements)
    for (std::int64_t i = 0; i < count; ++i) {
      if constexpr (std::is_same_v<Storage, Bf16>) {
        const SplitMaster split = split_master(values[i]);
        out[i] = split.weight;
        if (exact != nullptr) exact[i] = values[i];
        if (remainder != nullptr) remainder[i] = split.remainder;
      } else {
        out[i] = values[i];
      }
    }
  });
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA

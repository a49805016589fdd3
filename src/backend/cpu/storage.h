// Storage and compute types of the CPU operations. A tensor is stored as FP64, FP32 or BF16; sums and
// products are in the compute type: double for FP64, float for FP32 and BF16.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

#include "backend/cpu/cpu_backend.h"
#include "backend/operand_checks.h"

namespace agoq::cpu::AGOQ_CPU_ISA {

template <typename Storage>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <typename Storage>
using Compute = typename ComputeOf<Storage>::type;

AGOQ_HD double load(double value) { return value; }
AGOQ_HD float load(float value) { return value; }
AGOQ_HD float load(Bf16 value) { return to_float(value); }
AGOQ_HD float load(Fp16 value) { return to_float(value); }

AGOQ_HD void store(double value, double& place) { place = value; }
AGOQ_HD void store(float value, float& place) { place = value; }
AGOQ_HD void store(float value, Bf16& place) { place = to_bf16(value); }

/// a b + c: one rounding where the instruction set has the instruction, two where it would be a call.
template <typename T>
AGOQ_HD T multiply_add(T a, T b, T c) {
#ifdef __FMA__
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

/// Elements of T worked on side by side: two AVX2 registers, four SSE2 registers.
template <typename T>
inline constexpr std::int64_t kLanes = 64 / static_cast<std::int64_t>(sizeof(T));

constexpr std::int64_t round_up(std::int64_t count, std::int64_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

/// Sum of term(i) over [0, count). One accumulator per lane, so that the order is fixed and the
/// compiler may vectorise without reordering.
template <typename T, typename Term>
AGOQ_HD T lane_sum(std::int64_t count, Term term) {
  T lanes[kLanes<T>] = {};
  std::int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) {
    for (std::int64_t lane = 0; lane < kLanes<T>; ++lane) lanes[lane] += term(i + lane);
  }
  for (std::int64_t lane = 0; i + lane < count; ++lane) lanes[lane] += term(i + lane);
  for (std::int64_t half = kLanes<T> / 2; half > 0; half /= 2) {
    for (std::int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

/// Work below this many elements is not worth waking the other threads for.
inline constexpr std::int64_t kSerialElements = 8192;

/// Calls run.operator()<Storage>() for the storage type `type`: the list of the instances of every
/// operation.
template <typename Run>
void for_storage(std::string_view operation, ElementType type, Run run) {
  switch (type) {
    case ElementType::kFp64: return run.template operator()<double>();
    case ElementType::kFp32: return run.template operator()<float>();
    case ElementType::kBf16: return run.template operator()<Bf16>();
    default:
      fail("{}: tensors are fp32, bf16 or fp64, and {} came: convert it with copy", operation,
           name_of(type));
  }
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA

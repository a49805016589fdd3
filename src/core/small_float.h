// 16-bit floating point: BF16 and FP16 storage types and their conversions, for host and device.
// Conversions to BF16 round to nearest, ties to even; NaN stays NaN (quiet), Inf stays Inf.
#pragma once

#include <bit>
#include <cstdint>

#ifdef __CUDACC__
#define AGOQ_HD __host__ __device__ __forceinline__
#else
#define AGOQ_HD inline __attribute__((always_inline))
#endif

namespace agoq {

struct Bf16 {
  std::uint16_t bits;
};

struct Fp16 {
  std::uint16_t bits;
};

AGOQ_HD float to_float(Bf16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

AGOQ_HD Bf16 to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
  const std::uint32_t quiet_nan = bits | 0x00400000u;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return {static_cast<std::uint16_t>((is_nan ? quiet_nan : rounded) >> 16)};
}

/// Nearest, ties away from zero: the rounding under which a BF16 weight and a 16-bit remainder
/// make up the exact FP32 master weight (core/master_weight.h). Finite input only.
AGOQ_HD Bf16 to_bf16_half_away(float value) {
  return {static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(value) + 0x8000u) >> 16)};
}

AGOQ_HD float to_float(Fp16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1Fu;
  const std::uint32_t fraction = value.bits & 0x3FFu;
  if (exponent == 0x1Fu) return std::bit_cast<float>(sign | 0x7F800000u | (fraction << 13));
  // A subnormal is fraction * 2^-24; both factors are exact in FP32.
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

AGOQ_HD Fp16 to_fp16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {static_cast<std::uint16_t>(sign | 0x7E00u)};
  if (magnitude >= 0x477FF000u) return {static_cast<std::uint16_t>(sign | 0x7C00u)};  // >= 65520
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, rounded by an FP32 addition
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

AGOQ_HD float to_float(float value) { return value; }

}  // namespace agoq

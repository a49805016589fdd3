// exp(x) in the compute type. float: x = n ln2 + r with |r| <= ln2/2, exp(r) = 1 + r + r^2 q(r), scaled
// by 2^n; relative error below 1.2e-7 (exponential_test.cpp); results under 2^-126 are zero and x above
// 88 counts as 88. No branch and no call, so that loops over it vectorise. double: std::exp.
#pragma once

#include "backend/cpu/storage.h"

namespace agoq::cpu::AGOQ_CPU_ISA {

AGOQ_HD float exponential(float x) {
  constexpr float kLeast = -87.33654f;  // ln(2^-126)
  constexpr float kMost = 88.0f;
  constexpr float kShift = 0x1.8p23f;            // adding it rounds to an integer, held in the low bits
  const float raised = x < kLeast ? kLeast : x;  // NaN passes through
  const float bounded = raised > kMost ? kMost : raised;
  const float shifted = bounded * 1.44269504f + kShift;
  const float n = shifted - kShift;
  const float r = multiply_add(n, -0x1.7f7d1cp-20f, multiply_add(n, -0x1.62e4p-1f, bounded));
  // Least greatest relative error of exp over the interval (3.1e-9 before rounding).
  float q = 0x1.6a23d0p-10f;
  q = multiply_add(q, r, 0x1.123a20p-7f);
  q = multiply_add(q, r, 0x1.5558f2p-5f);
  q = multiply_add(q, r, 0x1.555492p-3f);
  q = multiply_add(q, r, 0x1.fffffcp-2f);
  const float power = multiply_add(r * r, q, r) + 1.0f;
  // The integer n sits in the low bits of `shifted`; moved to the exponent field it is 2^n times 1.
  const std::uint32_t exponent = (std::bit_cast<std::uint32_t>(shifted) + 127u) << 23;
  // Zero by a mask: a choice between values would become a branch, and the loop a scalar one.
  const std::uint32_t keep = static_cast<std::uint32_t>(x < kLeast) - 1u;
  const float result = power * std::bit_cast<float>(exponent);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(result) & keep);
}

AGOQ_HD double exponential(double x) { return std::exp(x); }

}  // namespace agoq::cpu::AGOQ_CPU_ISA

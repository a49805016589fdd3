// The split master weight: a BF16 weight and a signed 16-bit remainder that together are an FP32
// master weight, exactly. For host and device.
//
//   weight    = (bits(master) + 0x8000) >> 16       the master rounded half away from zero
//   remainder = bits(master) - (weight << 16)       in [-0x8000, 0x7FFF]
//   master    = bits((weight << 16) + remainder)
//
// Why half away from zero: the low 16 bits of the master are 0..0xFFFF, and this rounding rounds up
// from 0x8000 on, so the difference always fits an int16. Nearest-even leaves the tie 0x8000 under an
// even weight, whose difference +0x8000 does not fit. Rounding up may carry into the exponent, for the
// largest masters even into Inf; the remainder undoes it.
// Invariant: join(split(x)) has the bits of x for every finite x, and split(x).weight is
// to_bf16_half_away(x), the weight that a separate FP32 master gives.
#pragma once

#include <bit>
#include <cstdint>

#include "core/small_float.h"

namespace agoq {

struct SplitMaster {
  Bf16 weight;
  std::int16_t remainder;
};

AGOQ_HD SplitMaster split_master(float master) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(master);
  const Bf16 weight = to_bf16_half_away(master);
  const std::uint32_t difference = bits - (static_cast<std::uint32_t>(weight.bits) << 16);
  return {weight, static_cast<std::int16_t>(static_cast<std::uint16_t>(difference))};
}

AGOQ_HD float join_master(Bf16 weight, std::int16_t remainder) {
  return std::bit_cast<float>((static_cast<std::uint32_t>(weight.bits) << 16) +
                              static_cast<std::uint32_t>(static_cast<std::int32_t>(remainder)));
}

/// The master rounded to one of the two neighbouring BF16 numbers with probabilities that make the
/// rounding unbiased; `random` are 32 uniform bits, of which the low 16 are used. An exact BF16 number
/// stays as it is; a non-finite master is truncated.
AGOQ_HD Bf16 to_bf16_stochastic(float master, std::uint32_t random) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(master);
  const std::uint32_t offset = (bits & 0x7F800000u) == 0x7F800000u ? 0u : random & 0xFFFFu;
  return {static_cast<std::uint16_t>((bits + offset) >> 16)};
}

}  // namespace agoq

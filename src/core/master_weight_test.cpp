#include "core/master_weight.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

namespace agoq {
namespace {

// All FP32 patterns, by their upper half; sanitised builds take every 61st upper half.
#ifdef AGOQ_SANITIZED
constexpr std::uint32_t kStride = 61;
#else
constexpr std::uint32_t kStride = 1;
#endif
constexpr std::uint32_t kHalves = 0x10000u;
constexpr std::int64_t kFinitePatterns = std::int64_t{2} * 0x7F800000;

bool is_finite_half(std::uint32_t high) { return (high & 0x7F80u) != 0x7F80u; }

struct Wrong {
  std::uint32_t master = 0;
  std::uint32_t weight = 0;
  std::uint32_t not_nearest = 0;
};

// The 2^16 masters whose upper half is `high`. 32-bit sums, so that the loop is vectorised.
Wrong count_wrong(std::uint32_t high) {
  Wrong wrong;
  for (std::uint32_t low = 0; low < kHalves; ++low) {
    const std::uint32_t bits = (high << 16) | low;
    const float master = std::bit_cast<float>(bits);
    const SplitMaster split = split_master(master);
    wrong.master += std::bit_cast<std::uint32_t>(join_master(split.weight, split.remainder)) != bits;
    // The statement that split and FP32 masters have the same BF16 weight.
    wrong.weight += split.weight.bits != to_bf16_half_away(master).bits;
    // Patterns are evenly spaced within a binade, so nearest means at most half of 2^16 away, and
    // half away from zero means that half way the weight is the larger magnitude.
    const auto above =
        static_cast<std::int32_t>((static_cast<std::uint32_t>(split.weight.bits) << 16) - bits);
    wrong.not_nearest += (above > 0x8000) | (above <= -0x8000);
  }
  return wrong;
}

TEST(MasterWeight, SplitsAndJoinsEveryFiniteFp32Exactly) {
  std::int64_t master = 0;
  std::int64_t weight = 0;
  std::int64_t not_nearest = 0;
  std::int64_t tried = 0;
#pragma omp parallel for schedule(static) reduction(+ : master, weight, not_nearest, tried)
  for (std::uint32_t high = 0; high < kHalves; high += kStride) {
    if (!is_finite_half(high)) continue;
    const Wrong wrong = count_wrong(high);
    master += wrong.master;
    weight += wrong.weight;
    not_nearest += wrong.not_nearest;
    tried += kHalves;
  }
  EXPECT_EQ(master, 0);
  EXPECT_EQ(weight, 0);
  EXPECT_EQ(not_nearest, 0);
  if (kStride == 1) {
    EXPECT_EQ(tried, kFinitePatterns);
  }
}

#ifndef AGOQ_SANITIZED
TEST(MasterWeight, NearestEvenWouldLoseOneMasterIn131072) {
  std::int64_t lost = 0;
#pragma omp parallel for schedule(static) reduction(+ : lost)
  for (std::uint32_t high = 0; high < kHalves; ++high) {
    if (!is_finite_half(high)) continue;
    std::uint32_t lost_here = 0;
    for (std::uint32_t low = 0; low < kHalves; ++low) {
      const std::uint32_t bits = (high << 16) | low;
      const std::uint32_t weight = to_bf16(std::bit_cast<float>(bits)).bits;
      const auto difference = static_cast<std::int32_t>(bits - (weight << 16));
      lost_here += (difference > 0x7FFF) | (difference < -0x8000);
    }
    lost += lost_here;
  }
  EXPECT_EQ(lost, kFinitePatterns / 131072);
}
#endif

TEST(MasterWeight, KeepsTheEdgeCases) {
  EXPECT_EQ(split_master(1.0f).remainder, 0);
  EXPECT_EQ(split_master(std::bit_cast<float>(0x3F808000u)).weight.bits, 0x3F81);  // half way: away
  EXPECT_EQ(split_master(std::bit_cast<float>(0x3F808000u)).remainder, -0x8000);
  EXPECT_EQ(split_master(std::bit_cast<float>(0xBF808000u)).weight.bits, 0xBF81);
  EXPECT_EQ(split_master(std::bit_cast<float>(0x3F807FFFu)).remainder, 0x7FFF);
  const SplitMaster largest = split_master(std::bit_cast<float>(0x7F7FFFFFu));
  EXPECT_EQ(largest.weight.bits, 0x7F80);  // Inf, and the master comes back all the same
  EXPECT_EQ(std::bit_cast<std::uint32_t>(join_master(largest.weight, largest.remainder)), 0x7F7FFFFFu);
  EXPECT_TRUE(std::signbit(join_master(split_master(-0.0f).weight, split_master(-0.0f).remainder)));
}

TEST(MasterWeight, StochasticRoundingPicksEachNeighbourAsOftenAsItShould) {
  for (const std::uint32_t low : {0u, 1u, 0x4000u, 0x8000u, 0xFFFFu}) {
    const float master = std::bit_cast<float>(0xC0490000u | low);
    std::uint32_t away = 0;
    for (std::uint32_t random = 0; random < 0x10000u; ++random) {
      const std::uint32_t bits = to_bf16_stochastic(master, 0xABCD0000u | random).bits;
      ASSERT_TRUE(bits == 0xC049u || bits == 0xC04Au);
      away += bits == 0xC04Au;
    }
    EXPECT_EQ(away, low);  // exactly low / 2^16 of the random words
  }
  EXPECT_EQ(to_bf16_stochastic(std::bit_cast<float>(0x7F800000u), 0xFFFFu).bits, 0x7F80);
}

}  // namespace
}  // namespace agoq

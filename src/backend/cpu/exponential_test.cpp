#include "backend/cpu/exponential.h"

#include <gtest/gtest.h>

#include <limits>

namespace agoq::cpu::AGOQ_CPU_ISA {
namespace {

TEST(Exponential, KeepsItsErrorBound) {
  double worst = 0;
  for (const float sign : {-1.0f, 1.0f}) {
    // Every 61st float up to 88.
    for (std::uint32_t bits = 0; bits < std::bit_cast<std::uint32_t>(88.0f); bits += 61) {
      const float x = sign * std::bit_cast<float>(bits);
      if (x < -87.336f) continue;
      const double exact = std::exp(static_cast<double>(x));
      worst = std::max(worst, std::fabs(static_cast<double>(exponential(x)) - exact) / exact);
    }
  }
  EXPECT_LE(worst, 1.2e-7);
  EXPECT_GE(worst, 3e-8);  // half a unit in the last place: less would mean that nothing was measured
}

TEST(Exponential, EndsInZeroAndPassesNaNThrough) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exponential(0.0f), 1.0f);
  EXPECT_EQ(exponential(-88.0f), 0.0f);
  EXPECT_EQ(exponential(-infinity), 0.0f);
  EXPECT_EQ(exponential(std::numeric_limits<float>::lowest()), 0.0f);
  EXPECT_EQ(exponential(100.0f), exponential(88.0f));
  EXPECT_TRUE(std::isnan(exponential(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
}  // namespace agoq::cpu::AGOQ_CPU_ISA

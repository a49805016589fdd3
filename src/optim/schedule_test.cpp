#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "optim/adamw.h"

namespace agoq {
namespace {

OptimizerConfig config_of(ScheduleKind kind) {
  OptimizerConfig config;
  config.schedule = kind;
  config.learning_rate = 2e-3;
  config.warmup_steps = 10;
  config.decay_steps = 20;
  config.final_fraction = 0.1;
  return config;
}

class EverySchedule : public testing::TestWithParam<ScheduleKind> {};

TEST_P(EverySchedule, WarmsUpFromOneShareToThePeakAndEndsAtTheFinalFraction) {
  const OptimizerConfig config = config_of(GetParam());
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 1, 110), 2e-4);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 5, 110), 1e-3);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 10, 110), 2e-3);
  EXPECT_LE(learning_rate_at(config, 11, 110), 2e-3);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 110, 110), 2e-4);
  for (std::int64_t step = 11; step <= 110; ++step) {
    EXPECT_LE(learning_rate_at(config, step, 110), learning_rate_at(config, step - 1, 110));
  }
}

TEST_P(EverySchedule, StartsAtThePeakWithoutWarmUpAndMayWarmUpToTheEnd) {
  OptimizerConfig config = config_of(GetParam());
  config.decay_steps = 0;
  config.warmup_steps = 0;
  EXPECT_NEAR(learning_rate_at(config, 1, 1000000), 2e-3, 1e-8);
  config.warmup_steps = 7;
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 7, 7), 2e-3);
}

TEST_P(EverySchedule, RefusesStepsOutsideTheRunAndPhasesThatDoNotFit) {
  OptimizerConfig config = config_of(GetParam());
  EXPECT_THROW(learning_rate_at(config, 0, 110), Error);
  EXPECT_THROW(learning_rate_at(config, 111, 110), Error);
  config.warmup_steps = 200;
  EXPECT_THROW(learning_rate_at(config, 1, 110), Error);
}

INSTANTIATE_TEST_SUITE_P(Schedule, EverySchedule,
                         testing::Values(ScheduleKind::kCosine, ScheduleKind::kLinear,
                                         ScheduleKind::kWarmupStableDecay));

TEST(Schedule, CosineAndLineAreHalfWayInTheMiddle) {
  EXPECT_DOUBLE_EQ(learning_rate_at(config_of(ScheduleKind::kCosine), 60, 110), 2e-3 * 0.55);
  EXPECT_DOUBLE_EQ(learning_rate_at(config_of(ScheduleKind::kLinear), 60, 110), 2e-3 * 0.55);
  const double quarter = 0.1 + 0.9 * (1.0 + std::numbers::sqrt2 / 2.0) / 2.0;
  EXPECT_DOUBLE_EQ(learning_rate_at(config_of(ScheduleKind::kCosine), 35, 110), 2e-3 * quarter);
  EXPECT_DOUBLE_EQ(learning_rate_at(config_of(ScheduleKind::kLinear), 35, 110), 2e-3 * 0.775);
}

TEST(Schedule, WarmupStableDecayStaysAtThePeakUntilTheDecay) {
  const OptimizerConfig config = config_of(ScheduleKind::kWarmupStableDecay);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 50, 110), 2e-3);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 90, 110), 2e-3);
  EXPECT_DOUBLE_EQ(learning_rate_at(config, 100, 110), 2e-3 * 0.55);
  OptimizerConfig constant = config;
  constant.decay_steps = 0;
  EXPECT_DOUBLE_EQ(learning_rate_at(constant, 110, 110), 2e-3);
  OptimizerConfig too_long = config;
  too_long.decay_steps = 101;
  EXPECT_THROW(learning_rate_at(too_long, 1, 110), Error);
}

}  // namespace
}  // namespace agoq

// The learning rate of step s of S, with a peak p, w warm-up steps and a final fraction f:
//
//   s <= w                p s / w                                      warm-up, all schedules
//   cosine                p (f + (1 - f) (1 + cos(pi t)) / 2)           t = (s - w) / (S - w)
//   linear                p (1 - (1 - f) t)
//   warm-up-stable-decay  p, then p (1 - (1 - f) (s - (S - d)) / d) over the last d steps
//
// Every schedule gives p at step w and, unless warm-up takes all steps, p f at step S (with d = 0,
// warm-up-stable-decay stays at p).
#include <algorithm>
#include <cmath>
#include <numbers>

#include "optim/adamw.h"

namespace agoq {

double learning_rate_at(const OptimizerConfig& config, std::int64_t step, std::int64_t total_steps) {
  check_input(1 <= step && step <= total_steps,
              "a learning rate is defined for steps 1 to {}; step {} was asked for: count steps from 1",
              total_steps, step);
  const bool decays_late = config.schedule == ScheduleKind::kWarmupStableDecay;
  const std::int64_t decay = decays_late ? config.decay_steps : 0;
  check_input(0 <= config.warmup_steps && 0 <= decay && config.warmup_steps + decay <= total_steps,
              "warm-up and decay must fit into the {} steps of the run; they are {} and {}: lower "
              "warmup_steps or decay_steps",
              total_steps, config.warmup_steps, decay);
  if (step <= config.warmup_steps) {
    return config.learning_rate * static_cast<double>(step) / static_cast<double>(config.warmup_steps);
  }
  const double span = static_cast<double>(decays_late ? decay : total_steps - config.warmup_steps);
  const double left = static_cast<double>(total_steps - step);
  // Written from the end, so that the last step is the final fraction exactly.
  const double remaining = span == 0.0 ? 1.0 : std::min(1.0, left / span);
  const double shape = config.schedule == ScheduleKind::kCosine
                           ? 0.5 * (1.0 - std::cos(std::numbers::pi * remaining))
                           : remaining;
  return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * shape);
}

}  // namespace agoq

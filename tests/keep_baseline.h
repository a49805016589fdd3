// What AGoQ is compared with: everything kept, and FP32 for what it holds in 8 bits.
#pragma once

#include "train/run_config.h"

namespace agoq {

inline RunConfig keep_baseline(RunConfig config) {
  config.activations.policy = SavePolicy::kKeep;
  config.gradients.format = exact_format(ElementType::kFp32);
  config.optimizer.moments_8bit = false;
  config.optimizer.master = MasterKind::kFp32;
  return config;
}

}  // namespace agoq

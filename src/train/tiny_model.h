// The models of tests that train: large enough to learn, and for every kind of tensor to have several
// blocks and groups of heads.
#pragma once

#include "train/run_config.h"

namespace agoq::testing_train {

/// Two layers of four heads over two key/value heads, in two segments.
inline ModelConfig tiny_model(int hidden, int feed_forward) {
  ModelConfig model;
  model.hidden = hidden;
  model.layers = 2;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_size = hidden / 4;
  model.feed_forward = feed_forward;
  model.segments = 2;
  return model;
}

/// FP32 throughout, nothing quantised: what differs between layouts is the order of FP32 sums.
inline void quantise_nothing(RunConfig& config) {
  config.model.dtype = ElementType::kFp32;
  config.optimizer.moments_8bit = false;
  config.optimizer.master = MasterKind::kNone;
  config.gradients.format = exact_format(ElementType::kFp32);
  config.activations.policy = SavePolicy::kKeep;
}

}  // namespace agoq::testing_train

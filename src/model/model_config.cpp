#include "model/model_config.h"

#include "core/error.h"

namespace agoq {

void ModelConfig::check() const {
  const auto positive = [](std::int64_t value, const char* key) {
    check_input(value > 0, "model.{} must be at least 1; {} was given", key, value);
  };
  positive(hidden, "hidden");
  positive(layers, "layers");
  positive(heads, "heads");
  positive(kv_heads, "kv_heads");
  positive(head_size, "head_size");
  positive(feed_forward, "feed_forward");
  positive(vocabulary, "vocabulary");
  positive(segments, "segments");
  positive(loss_chunk, "loss_chunk");
  check_input(heads % kv_heads == 0,
              "model.heads must be a multiple of model.kv_heads; {} is not a multiple of {}", heads,
              kv_heads);
  check_input(head_size % 2 == 0, "model.head_size must be even (RoPE rotates pairs); {} was given",
              head_size);
  const auto divided = [this](std::int64_t width, const char* what) {
    check_input(
        width % segments == 0,
        "model.segments must divide {}; {} is not a multiple of {}: choose another model.segments", what,
        width, segments);
  };
  divided(feed_forward, "model.feed_forward");
  divided(attention().output_width(), "model.heads * model.head_size");
  check_input(norm_epsilon > 0, "model.norm_epsilon must be positive; {} was given", norm_epsilon);
  check_input(rope.theta > 0 && rope.factor > 0,
              "model.rope_theta and model.rope_factor must be positive");
  check_input(
      rope.scaling != RopeScaling::kLlama3 ||
          (0 < rope.low_frequency_factor && rope.low_frequency_factor < rope.high_frequency_factor),
      "model.rope_low_frequency_factor is {} and must be positive and below "
      "model.rope_high_frequency_factor, which is {}",
      rope.low_frequency_factor, rope.high_frequency_factor);
}

}  // namespace agoq

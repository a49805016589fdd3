#include "model/rope_table.h"

#include <cmath>
#include <numbers>

namespace agoq {
namespace {

double scaled(const RopeConfig& config, double frequency) {
  switch (config.scaling) {
    case RopeScaling::kPlain: return frequency;
    case RopeScaling::kLinear: return frequency / config.factor;
    case RopeScaling::kLlama3: {
      const double wavelength = 2.0 * std::numbers::pi / frequency;
      const auto original = static_cast<double>(config.original_positions);
      if (wavelength > original / config.low_frequency_factor) return frequency / config.factor;
      if (wavelength < original / config.high_frequency_factor) return frequency;
      const double kept = (original / wavelength - config.low_frequency_factor) /
                          (config.high_frequency_factor - config.low_frequency_factor);
      return (1.0 - kept) * frequency / config.factor + kept * frequency;
    }
  }
  return frequency;
}

template <typename T>
void write_rows(const std::vector<double>& frequencies, std::int64_t first, std::int64_t count,
                T* rows) {
  for (std::int64_t p = 0; p < count; ++p) {
    for (std::size_t i = 0; i < frequencies.size(); ++i) {
      const double angle = static_cast<double>(first + p) * frequencies[i];
      *rows++ = static_cast<T>(std::cos(angle));
      *rows++ = static_cast<T>(std::sin(angle));
    }
  }
}

}  // namespace

std::vector<double> rope_frequencies(const RopeConfig& config, int head_size) {
  std::vector<double> frequencies;
  frequencies.reserve(static_cast<std::size_t>(head_size / 2));
  for (int i = 0; i < head_size / 2; ++i) {
    frequencies.push_back(scaled(config, std::pow(config.theta, -2.0 * i / head_size)));
  }
  return frequencies;
}

Tensor make_rope_table(const Context& context, Arena& arena, const RopeConfig& config, int head_size,
                       std::int64_t positions, ElementType dtype) {
  const ElementType type = statistics_type(dtype);
  const Tensor table = arena.take(type, Shape{positions, head_size / 2, 2});
  if (arena.is_measuring()) return table;
  const std::vector<double> frequencies = rope_frequencies(config, head_size);
  // In pieces, so that host memory for a long table never exists at once.
  constexpr std::int64_t kPiece = 128;
  const std::int64_t row_elements = std::int64_t{head_size} / 2 * 2;
  std::vector<std::byte> piece(static_cast<std::size_t>(kPiece * row_elements) * size_of(type));
  for (std::int64_t first = 0; first < positions; first += kPiece) {
    const std::int64_t count = std::min(kPiece, positions - first);
    if (type == ElementType::kFp64) {
      write_rows(frequencies, first, count, reinterpret_cast<double*>(piece.data()));
    } else {
      write_rows(frequencies, first, count, reinterpret_cast<float*>(piece.data()));
    }
    const std::size_t row_bytes = static_cast<std::size_t>(row_elements) * size_of(type);
    context.backend.upload(context, piece.data(),
                           table.data + static_cast<std::size_t>(first) * row_bytes,
                           static_cast<std::size_t>(count) * row_bytes);
  }
  return table;
}

}  // namespace agoq

#include "core/random.h"

#include <cmath>
#include <numbers>

namespace agoq {
namespace {

// In (0, 1): never 0, so that its logarithm is finite.
double open_uniform(std::uint32_t bits) { return (static_cast<double>(bits) + 0.5) * 0x1p-32; }

double box_muller(std::uint32_t first, std::uint32_t second) {
  return std::sqrt(-2.0 * std::log(open_uniform(first))) *
         std::cos(2.0 * std::numbers::pi * open_uniform(second));
}

}  // namespace

double random_normal(const RandomKey& key, std::uint64_t index) {
  const RandomWords words = random_words(key, index / 2);
  const int offset = static_cast<int>(index % 2) * 2;
  return box_muller(words.word[offset], words.word[offset + 1]);
}

double random_student_t4(const RandomKey& key, std::uint64_t index) {
  // T = Z / sqrt(chi2_4 / 4), and chi2_4 = -2 ln(u1 u2).
  const RandomWords words = random_words(key, index);
  const double normal = box_muller(words.word[0], words.word[1]);
  const double chi2 =
      -2.0 * (std::log(open_uniform(words.word[2])) + std::log(open_uniform(words.word[3])));
  return normal / std::sqrt(chi2 / 4.0);
}

}  // namespace agoq

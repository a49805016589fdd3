// Every code against its plain definition: levels from the formats' own descriptions, nearest by search.
#include "quant/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "core/random.h"

namespace agoq {
namespace {

struct Level {
  double value;
  std::uint32_t code;
};

/// sign * 2^max(exponent, 1) with the OCP rule for subnormals; every code but NaN and Inf.
std::vector<Level> fp8_levels(int exponent_bits, int fraction_bits, int bias, double largest) {
  std::vector<Level> levels;
  for (std::uint32_t code = 0; code < 256; ++code) {
    const std::uint32_t exponent = (code >> fraction_bits) & ((1u << exponent_bits) - 1);
    const double fraction =
        static_cast<double>(code & ((1u << fraction_bits) - 1)) / (1 << fraction_bits);
    const double magnitude = exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                           : std::ldexp(1 + fraction, static_cast<int>(exponent) - bias);
    if (magnitude <= largest) levels.push_back({code & 0x80 ? -magnitude : magnitude, code});
  }
  return levels;
}

std::vector<Level> sign_magnitude_levels(const std::vector<double>& magnitudes) {
  std::vector<Level> levels;
  for (std::uint32_t i = 0; i < 8; ++i) {
    levels.push_back({magnitudes[i], i});
    levels.push_back({-magnitudes[i], i | 8});
  }
  return levels;
}

std::vector<Level> integer_levels(int lowest, int highest, int bits) {
  std::vector<Level> levels;
  for (int i = lowest; i <= highest; ++i) {
    levels.push_back({static_cast<double>(i), static_cast<std::uint32_t>(i) & ((1u << bits) - 1)});
  }
  return levels;
}

std::vector<Level> dynamic_levels(bool is_signed) {
  std::vector<double> values = {0, 1};
  for (int i = 0; i < 7; ++i) {
    const int steps = is_signed ? 1 << i : 2 << i;
    for (int k = 0; k < steps; ++k) {
      const double from = .1 + .9 * k / steps, to = .1 + .9 * (k + 1) / steps;
      values.push_back(std::pow(10.0, i - 6) * (from + to) / 2);
      if (is_signed) values.push_back(-values.back());
    }
  }
  std::sort(values.begin(), values.end());
  std::vector<Level> levels;
  for (std::uint32_t i = 0; i < values.size(); ++i) levels.push_back({static_cast<float>(values[i]), i});
  return levels;
}

std::vector<Level> levels_of(Code code) {
  switch (code) {
    case Code::kNf4: {
      const std::vector<double> values = {
          -1,        -.69619280, -.52507305, -.39491749, -.28444138, -.18477343, -.09105004, 0,
          .07958030, .16093020,  .24611230,  .33791524,  .44070983,  .56261700,  .72295684,  1};
      std::vector<Level> levels;
      for (std::uint32_t i = 0; i < 16; ++i) levels.push_back({static_cast<float>(values[i]), i});
      return levels;
    }
    case Code::kE2m1: return sign_magnitude_levels({0, .5, 1, 1.5, 2, 3, 4, 6});
    case Code::kBnbFp4: return sign_magnitude_levels({0, .0625, 2, 3, 4, 6, 8, 12});
    case Code::kInt4: return integer_levels(-7, 7, 4);
    case Code::kInt4FullRange: return integer_levels(-8, 7, 4);
    case Code::kInt5: return integer_levels(-15, 15, 5);
    case Code::kInt6: return integer_levels(-31, 31, 6);
    case Code::kInt8: return integer_levels(-127, 127, 8);
    case Code::kE4m3: return fp8_levels(4, 3, 7, 448);
    case Code::kE5m2: return fp8_levels(5, 2, 15, 57344);
    case Code::kDynamic8: return dynamic_levels(true);
    case Code::kDynamic8Unsigned: return dynamic_levels(false);
    default: return {};
  }
}

/// Whether a y on the midpoint of two levels becomes the upper one: the rule stated in codec.h.
bool tie_goes_up(Code code, const Level& lower, const Level& upper) {
  switch (code) {
    case Code::kNf4: return false;
    case Code::kBnbFp4: return std::abs(upper.value) < std::abs(lower.value);
    case Code::kDynamic8:
    case Code::kDynamic8Unsigned: return std::abs(upper.value) > std::abs(lower.value);
    default: return upper.code % 2 == 0;
  }
}

template <Code value>
struct CodeTag {
  static constexpr Code kCode = value;
};

template <typename Tag>
class EveryCode : public ::testing::Test {};

struct CodeNames {
  template <typename Tag>
  static std::string GetName(int) {
    return std::string(traits_of(Tag::kCode).name);
  }
};

using Codes =
    ::testing::Types<CodeTag<Code::kNf4>, CodeTag<Code::kE2m1>, CodeTag<Code::kBnbFp4>,
                     CodeTag<Code::kInt4>, CodeTag<Code::kInt4FullRange>, CodeTag<Code::kInt5>,
                     CodeTag<Code::kInt6>, CodeTag<Code::kInt8>, CodeTag<Code::kE4m3>,
                     CodeTag<Code::kE5m2>, CodeTag<Code::kDynamic8>, CodeTag<Code::kDynamic8Unsigned>>;
TYPED_TEST_SUITE(EveryCode, Codes, CodeNames);

TYPED_TEST(EveryCode, DecodesEachCodeToItsLevelAndBack) {
  constexpr Code kCode = TypeParam::kCode;
  const std::vector<Level> levels = levels_of(kCode);
  double largest = 0;
  for (const Level& level : levels) {
    const float decoded = decode<kCode>(level.code);
    EXPECT_EQ(decoded, static_cast<float>(level.value)) << "code " << level.code;
    EXPECT_EQ(encode<kCode>(decoded), level.code) << "level " << level.value;
    largest = std::max(largest, std::abs(level.value));
  }
  EXPECT_EQ(largest, kMaximum<kCode>);
  EXPECT_EQ(traits_of(kCode).maximum, kMaximum<kCode>);
  EXPECT_EQ(traits_of(kCode).bits, code_bits(kCode));
}

TYPED_TEST(EveryCode, EncodesToTheNearestLevelWithTheStatedTies) {
  constexpr Code kCode = TypeParam::kCode;
  constexpr bool kDynamic = kCode == Code::kDynamic8 || kCode == Code::kDynamic8Unsigned;
  std::vector<Level> levels = levels_of(kCode);
  std::sort(levels.begin(), levels.end(),
            [](const Level& a, const Level& b) { return a.value < b.value; });
  levels.erase(std::unique(levels.begin(), levels.end(),
                           [](const Level& a, const Level& b) { return a.value == b.value; }),
               levels.end());  // +0 and -0 are one level

  std::vector<float> midpoints;
  std::vector<float> inputs = {0.0f,
                               -0.0f,
                               1e-40f,
                               -1e-40f,
                               0x1p-149f,
                               3e38f,
                               -3e38f,
                               std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity()};
  const auto add_around = [&](float y) {
    for (const float toward : {-1e38f, 1e38f}) {
      float near = y;
      for (int step = 0; step < 3; ++step, near = std::nextafter(near, toward)) inputs.push_back(near);
    }
  };
  for (std::size_t i = 0; i < levels.size(); ++i) {
    add_around(static_cast<float>(levels[i].value));
    if (i + 1 == levels.size()) break;
    midpoints.push_back(static_cast<float>((levels[i].value + levels[i + 1].value) / 2));
    add_around(midpoints.back());
  }
  for (std::uint64_t i = 0; i < 40000; ++i) {  // half of them spread evenly, half over 30 octaves
    const float sign = i % 4 < 2 ? 1.0f : -1.0f;
    const float u = random_uniform({.seed = 1}, i) * 1.2f;
    inputs.push_back(sign * kMaximum<kCode> * (i % 2 == 0 ? u : std::exp2(-25.0f * u)));
  }

  for (const float y : inputs) {
    std::size_t expected = 0;
    bool on_unstored_midpoint = false;
    for (std::size_t i = 0; i < midpoints.size(); ++i) {
      if (y > midpoints[i] || (y == midpoints[i] && tie_goes_up(kCode, levels[i], levels[i + 1])))
        ++expected;
      const double gap = levels[i + 1].value - levels[i].value;
      if (kDynamic && std::abs(y - midpoints[i]) <= 2e-5 * gap) on_unstored_midpoint = true;
    }
    if (on_unstored_midpoint) continue;
    const std::uint32_t code = encode<kCode>(y);
    ASSERT_EQ(decode<kCode>(code), static_cast<float>(levels[expected].value)) << "y = " << y;
    if constexpr (is_sign_magnitude_code(kCode)) {
      ASSERT_EQ((code >> (code_bits(kCode) - 1)) == 1, std::signbit(y)) << "y = " << y;
    }
  }
}

TYPED_TEST(EveryCode, RoundsStochasticallyWithoutBias) {
  constexpr Code kCode = TypeParam::kCode;
  std::vector<Level> levels = levels_of(kCode);
  std::sort(levels.begin(), levels.end(),
            [](const Level& a, const Level& b) { return a.value < b.value; });
  constexpr int kUniforms = 4096;
  for (std::uint64_t trial = 0; trial < 300; ++trial) {
    // A point between two neighbouring levels, at a random place of the gap; sometimes a level itself.
    const std::size_t i = random_bits({.seed = 2}, trial) % (levels.size() - 1);
    const double lower = levels[i].value, upper = levels[i + 1].value;
    const double place = trial % 10 == 0 ? 0.0 : random_uniform({.seed = 3}, trial);
    const float y = static_cast<float>(lower + place * (upper - lower));
    double mean = 0;
    for (int k = 0; k < kUniforms; ++k) {
      const float level =
          decode<kCode>(encode_stochastic<kCode>(y, (static_cast<float>(k) + .5f) / kUniforms));
      ASSERT_TRUE(level == static_cast<float>(lower) || level == static_cast<float>(upper))
          << "y = " << y << " became " << level;
      mean += level;
    }
    mean /= kUniforms;
    // One of the evenly spaced uniform numbers may fall on either side; FP32 rounding of y besides.
    EXPECT_NEAR(mean, y, (upper - lower) * 1.01 / kUniforms + std::abs(y) * 1e-6) << "trial " << trial;
  }
  const float beyond = 2 * kMaximum<kCode>;
  EXPECT_EQ(encode_stochastic<kCode>(beyond, .99f), encode<kCode>(beyond));
  EXPECT_EQ(encode_stochastic<kCode>(-beyond, .99f), encode<kCode>(-beyond));
}

// All FP32 bit patterns of a stride coprime to every field, and every BF16: the encoders against search.
template <Code code>
void expect_nearest_over_all_floats() {
  std::vector<double> magnitudes;
  for (const Level& level : levels_of(code)) {
    if (level.code < 128) magnitudes.push_back(level.value);
  }
  const auto check_one = [&](std::uint32_t bits) {
    const float y = std::bit_cast<float>(bits);
    if (y != y) return true;
    const double a = std::abs(static_cast<double>(y));
    auto upper = std::lower_bound(magnitudes.begin(), magnitudes.end(), a);
    std::uint32_t index = static_cast<std::uint32_t>(magnitudes.size()) - 1;
    if (upper != magnitudes.end()) {
      index = static_cast<std::uint32_t>(upper - magnitudes.begin());
      if (index > 0) {
        const double below = a - magnitudes[index - 1], above = magnitudes[index] - a;
        if (below < above || (below == above && index % 2 == 1)) --index;
      }
    }
    return encode<code>(y) == (index | (bits >> 31) << 7);
  };
  std::int64_t wrong = 0;
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 509) {
    wrong += check_one(static_cast<std::uint32_t>(bits)) ? 0 : 1;
  }
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) wrong += check_one(bits << 16) ? 0 : 1;
  EXPECT_EQ(wrong, 0);
}

TEST(E4m3, EncodesFloatsOfEveryExponentToTheNearestEven) {
  expect_nearest_over_all_floats<Code::kE4m3>();
}
TEST(E5m2, EncodesFloatsOfEveryExponentToTheNearestEven) {
  expect_nearest_over_all_floats<Code::kE5m2>();
}

TEST(Dynamic8, LevelsEqualBitsandbytesMaps) {
  std::ifstream file(AGOQ_TEST_DATA "/dynamic_map.txt");
  ASSERT_TRUE(file) << "made by scripts/make_dynamic_map_golden.py";
  bool is_signed = false;
  int index = 0, compared = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    if (line == "signed" || line == "unsigned") {
      is_signed = line == "signed";
      index = 0;
      continue;
    }
    const float theirs = std::strtof(line.c_str(), nullptr);
    const auto code = static_cast<std::uint32_t>(index++);
    const float ours = is_signed ? decode<Code::kDynamic8>(code) : decode<Code::kDynamic8Unsigned>(code);
    // Ours is the correctly rounded formula; theirs is it evaluated in FP32, up to two units in the last
    // place away (a level step is at least 10^4 units).
    EXPECT_LE(std::abs(std::bit_cast<std::int32_t>(ours) - std::bit_cast<std::int32_t>(theirs)), 2)
        << line;
    ++compared;
  }
  EXPECT_EQ(compared, 512);
}

TEST(Scales, UnderTwoToTheMinus126AreZero) {
  EXPECT_EQ(stored_scale_fp32(0x1.fffffcp-127f, 7), 0.0f);
  EXPECT_EQ(stored_scale_fp32(0x1p-126f, 7), 0x1p-126f);
  EXPECT_EQ(stored_scale_fp32(-0x1p-127f, 8), 0.0f);
  EXPECT_EQ(stored_scale_bf16(0x1.8p-127f, 7).bits, 0);
  EXPECT_EQ(to_float(stored_scale_bf16(-0x1p-126f, 8)), -0x1p-126f);
  EXPECT_EQ(stored_super_scale(0x1p-120f).bits, 0);
  EXPECT_EQ(stored_block_scale(0x1p-120f, Bf16{0}, 1), 0);
}

TEST(Scales, SuperScaleIsRoundedUpSoThatTheLargestBlockScaleIs448) {
  for (std::uint64_t i = 0; i < 100000; ++i) {
    const float largest = std::exp2(80 * random_uniform({.seed = 4}, i) - 40);
    const Bf16 super = stored_super_scale(largest);
    EXPECT_GE(to_float(super) * 448.0, largest * (1 - 0x1p-23));
    EXPECT_LE(to_float(super) * 448.0, largest * (1 + 0x1p-7));
    EXPECT_EQ(decode<Code::kE4m3>(stored_block_scale(largest, super, 1)), 448.0f);
  }
}

TEST(Scales, NeverDecodeFiniteInputToInfinity) {
  const float largest = std::numeric_limits<float>::max();
  for (const Code code : {Code::kNf4, Code::kInt4, Code::kInt8, Code::kE4m3}) {
    const float maximum = code_maximum(code);
    EXPECT_LE(stored_scale_fp32(largest / maximum, maximum) * maximum, largest);
    EXPECT_LE(to_float(stored_scale_bf16(largest / maximum, maximum)) * maximum, largest);
    const Bf16 super = stored_super_scale(largest / maximum);
    const float scale = two_level_scale(stored_block_scale(largest / maximum, super, maximum), super);
    EXPECT_LE(scale * maximum, largest);
    EXPECT_GE(scale * maximum, largest * .85f);
  }
}

}  // namespace
}  // namespace agoq

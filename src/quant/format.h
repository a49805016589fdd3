// A quantisation format is data: a code, a block size, a scale type and a rounding. "Not quantised"
// (fp32, bf16, ...) is a format too, so nothing special-cases what is kept exactly.
//
// Written `code/block/scale[/stochastic]`, for instance `nf4/32/two-level`, `bnbfp4/128/fp32`,
// `e4m3/128/fp32`, or just `bf16`. A few formats have names of their own (`named_formats`).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/element_type.h"

namespace agoq {

enum class Code : std::uint8_t {
  // Elements stored as they are: no blocks, no scales.
  kFp64,
  kFp32,
  kBf16,
  kFp16,
  // 4 bits.
  kNf4,            // NormalFloat-4 (Dettmers et al., QLoRA, 2023): 16 quantiles of a normal
  kE2m1,           // OCP FP4: +-{0, .5, 1, 1.5, 2, 3, 4, 6} / 6
  kBnbFp4,         // bitsandbytes' FP4: +-{0, .0625, 2, 3, 4, 6, 8, 12} / 12
  kInt4,           // symmetric, -7..7
  kInt4FullRange,  // -8..7; the scale carries the sign of the block's largest element
  // A 4-bit plane and one bit plane per further bit.
  kInt5,  // -15..15
  kInt6,  // -31..31
  // 8 bits.
  kInt8,              // -127..127
  kE4m3,              // OCP FP8, finite variant: largest value 448
  kE5m2,              // OCP FP8: largest finite value 57,344
  kDynamic8,          // signed dynamic map (Dettmers, 8-bit optimizers, 2022)
  kDynamic8Unsigned,  // the same for non-negative values: the sign bit goes to the fraction
};

enum class ScaleType : std::uint8_t {
  kNone,      // elements stored as they are
  kFp32,      // one FP32 scale per block
  kBf16,      // one BF16 scale per block
  kTwoLevel,  // an E4M3 scale per block under one BF16 scale per super-block
};

enum class Rounding : std::uint8_t { kNearest, kStochastic };

/// Elements under one BF16 scale in two-level formats; a shorter segment has one of its own length.
inline constexpr std::int64_t kSuperBlock = 1024;

struct CodeTraits {
  Code code;
  std::string_view name;
  int bits;        // per element, without scales
  bool exact;      // stored as it is
  bool is_signed;  // can represent negative values
  float maximum;   // the code's largest magnitude: scale = absmax / maximum
  std::string_view note;
};

/// One row per code, in the order of the enum.
const std::vector<CodeTraits>& code_table();
const CodeTraits& traits_of(Code code);
std::string_view name_of(ScaleType scale);

struct QuantFormat {
  Code code = Code::kFp32;
  int block = 0;  // elements per scale: 16, 32, 64, 128 or 256; 0 for exact codes
  ScaleType scale = ScaleType::kNone;
  Rounding rounding = Rounding::kNearest;

  bool operator==(const QuantFormat&) const = default;
  bool is_exact() const { return traits_of(code).exact; }
  /// Bits per element, scales included, for rows that are multiples of every block.
  double bits_per_element() const;
  /// The form that parse_format reads back.
  std::string to_string() const;
};

/// The exact format that stores elements of `type` (floating-point types only).
QuantFormat exact_format(ElementType type);
/// The element type behind an exact format.
ElementType element_type_of(const QuantFormat& format);

/// Reads `code/block/scale[/stochastic]`, an exact code, or a name of named_formats().
/// Throws Error (kInput) that suggests the nearest valid text.
QuantFormat parse_format(std::string_view text);

struct NamedFormat {
  std::string_view name;
  QuantFormat format;
  std::string_view note;
};

/// Names for settings the literature refers to: `agoq` (nf4/32/two-level), `paper-fp4`
/// (bnbfp4/128/fp32), `authors-nf4` (nf4/64/fp32), `authors-gradient` (dynamic8/256/fp32).
const std::vector<NamedFormat>& named_formats();

/// Every combination of quantised code, block and scale type, nearest rounding.
std::vector<QuantFormat> all_quantised_formats();

}  // namespace agoq

#include "quant/format.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <limits>

#include "core/error.h"
#include "core/nearest_name.h"
#include "quant/codec.h"

namespace agoq {
namespace {

constexpr std::array<int, 5> kBlocks = {16, 32, 64, 128, 256};
constexpr std::array<ScaleType, 3> kBlockScales = {ScaleType::kFp32, ScaleType::kBf16,
                                                   ScaleType::kTwoLevel};

CodeTraits exact_traits(Code code, std::string_view name, int bits, std::string_view note) {
  return {code, name, bits, true, true, 1.0f, note};
}

CodeTraits block_traits(Code code, std::string_view name, std::string_view note) {
  return {code, name, code_bits(code), false, code != Code::kDynamic8Unsigned, code_maximum(code), note};
}

double scale_bits(ScaleType scale) {
  switch (scale) {
    case ScaleType::kNone: return 0;
    case ScaleType::kFp32: return 32;
    case ScaleType::kBf16: return 16;
    case ScaleType::kTwoLevel: return 8;
  }
  return 0;
}

/// Every text that parse_format reads, names first.
std::vector<std::string> valid_texts() {
  std::vector<std::string> texts;
  for (const NamedFormat& named : named_formats()) texts.emplace_back(named.name);
  for (const CodeTraits& traits : code_table()) {
    if (traits.exact) texts.emplace_back(traits.name);
  }
  for (QuantFormat format : all_quantised_formats()) {
    texts.push_back(format.to_string());
    format.rounding = Rounding::kStochastic;
    texts.push_back(format.to_string());
  }
  return texts;
}

/// The first `count` of the parts that slashes divide a format's text into.
std::string_view first_parts(std::string_view text, std::ptrdiff_t count) {
  std::size_t end = text.find('/');
  while (--count > 0 && end != std::string_view::npos) end = text.find('/', end + 1);
  return text.substr(0, end);
}

std::string either(const std::vector<std::string>& texts) {
  std::string joined;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const char* separator = i == 0 ? "" : i + 1 == texts.size() ? " or " : ", ";
    joined += separator + texts[i];
  }
  return joined;
}

/// What `text` may have been meant to be. Of formats only as many parts are compared as `text` has, so
/// that one which is cut short (nf4/32) is completed and not taken for another (bf16).
std::string suggestion(std::string_view text) {
  constexpr std::size_t kMost = 3;
  const std::ptrdiff_t parts = 1 + std::count(text.begin(), text.end(), '/');
  const std::vector<std::string> valid = valid_texts();
  std::string_view nearest;
  int least = std::numeric_limits<int>::max();
  for (const std::string& candidate : valid) {
    const std::string_view begin = first_parts(candidate, parts);
    const int distance = edit_distance(text, begin);
    if (distance < least) {
      least = distance;
      nearest = begin;
    }
  }
  std::vector<std::string> completions;
  for (const std::string& candidate : valid) {
    if (candidate == nearest) return fmt::format("'{}'", candidate);
    const bool completes = candidate.starts_with(nearest) && candidate[nearest.size()] == '/';
    if (completes && !candidate.ends_with("/stochastic")) {
      completions.push_back(fmt::format("'{}'", candidate));
    }
  }
  if (completions.size() <= kMost) return either(completions);
  std::vector<std::string> blocks, scales;
  for (const int block : kBlocks) blocks.push_back(std::to_string(block));
  for (const ScaleType scale : kBlockScales) scales.emplace_back(name_of(scale));
  return fmt::format("'{}/BLOCK/SCALE' with a block of {} and a scale {}", nearest, either(blocks),
                     either(scales));
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

/// False where `parts` is not a format.
bool read_format(const std::vector<std::string_view>& parts, QuantFormat& format) {
  const auto& codes = code_table();
  const auto traits = std::find_if(codes.begin(), codes.end(),
                                   [&](const CodeTraits& row) { return row.name == parts[0]; });
  if (traits == codes.end()) return false;
  format = {};
  format.code = traits->code;
  if (traits->exact) return parts.size() == 1;
  if (parts.size() != 3 && parts.size() != 4) return false;

  const char* end = parts[1].data() + parts[1].size();
  const auto [rest, failure] = std::from_chars(parts[1].data(), end, format.block);
  if (failure != std::errc() || rest != end) return false;
  if (std::find(kBlocks.begin(), kBlocks.end(), format.block) == kBlocks.end()) return false;

  const auto scale = std::find_if(kBlockScales.begin(), kBlockScales.end(),
                                  [&](ScaleType type) { return name_of(type) == parts[2]; });
  if (scale == kBlockScales.end()) return false;
  format.scale = *scale;

  if (parts.size() == 4) {
    if (parts[3] != "stochastic") return false;
    format.rounding = Rounding::kStochastic;
  }
  return true;
}

}  // namespace

const std::vector<CodeTraits>& code_table() {
  static const std::vector<CodeTraits> table = {
      exact_traits(Code::kFp64, "fp64", 64, "stored as it is"),
      exact_traits(Code::kFp32, "fp32", 32, "stored as it is"),
      exact_traits(Code::kBf16, "bf16", 16, "stored as it is"),
      exact_traits(Code::kFp16, "fp16", 16, "stored as it is; overflows above 65,504"),
      block_traits(Code::kNf4, "nf4", "NormalFloat-4: quantiles of a normal"),
      block_traits(Code::kE2m1, "e2m1", "OCP FP4"),
      block_traits(Code::kBnbFp4, "bnbfp4", "bitsandbytes FP4"),
      block_traits(Code::kInt4, "int4", "symmetric, -7..7"),
      block_traits(Code::kInt4FullRange, "int4-full-range", "-8..7, the scale carries the sign"),
      block_traits(Code::kInt5, "int5", "symmetric, -15..15"),
      block_traits(Code::kInt6, "int6", "symmetric, -31..31"),
      block_traits(Code::kInt8, "int8", "symmetric, -127..127"),
      block_traits(Code::kE4m3, "e4m3", "OCP FP8, largest value 448"),
      block_traits(Code::kE5m2, "e5m2", "OCP FP8, largest value 57,344"),
      block_traits(Code::kDynamic8, "dynamic8", "8-bit dynamic map"),
      block_traits(Code::kDynamic8Unsigned, "dynamic8-unsigned",
                   "8-bit dynamic map of non-negative values"),
  };
  return table;
}

const CodeTraits& traits_of(Code code) { return code_table()[static_cast<std::size_t>(code)]; }

std::string_view name_of(ScaleType scale) {
  switch (scale) {
    case ScaleType::kNone: return "none";
    case ScaleType::kFp32: return "fp32";
    case ScaleType::kBf16: return "bf16";
    case ScaleType::kTwoLevel: return "two-level";
  }
  return "?";
}

double QuantFormat::bits_per_element() const {
  const double bits = traits_of(code).bits;
  if (is_exact()) return bits;
  const double super = scale == ScaleType::kTwoLevel ? 16.0 / static_cast<double>(kSuperBlock) : 0.0;
  return bits + scale_bits(scale) / block + super;
}

std::string QuantFormat::to_string() const {
  if (is_exact()) return std::string(traits_of(code).name);
  return fmt::format("{}/{}/{}{}", traits_of(code).name, block, name_of(scale),
                     rounding == Rounding::kStochastic ? "/stochastic" : "");
}

QuantFormat exact_format(ElementType type) {
  QuantFormat format;
  switch (type) {
    case ElementType::kFp64: format.code = Code::kFp64; return format;
    case ElementType::kFp32: format.code = Code::kFp32; return format;
    case ElementType::kBf16: format.code = Code::kBf16; return format;
    case ElementType::kFp16: format.code = Code::kFp16; return format;
    default: fail("a format of floating-point elements was expected; {} has none", name_of(type));
  }
}

ElementType element_type_of(const QuantFormat& format) {
  switch (format.code) {
    case Code::kFp64: return ElementType::kFp64;
    case Code::kFp32: return ElementType::kFp32;
    case Code::kBf16: return ElementType::kBf16;
    case Code::kFp16: return ElementType::kFp16;
    default:
      fail("an exact format was expected; {} is quantised: dequantise it first", format.to_string());
  }
}

QuantFormat parse_format(std::string_view text) {
  for (const NamedFormat& named : named_formats()) {
    if (named.name == text) return named.format;
  }
  QuantFormat format;
  if (read_format(split(text, '/'), format)) return format;
  fail_input(
      "a format `code/block/scale[/stochastic]`, an exact type or a name was expected; '{}' came: "
      "did you mean {}? (`agoq formats` lists them)",
      text, suggestion(text));
}

const std::vector<NamedFormat>& named_formats() {
  static const std::vector<NamedFormat> names = {
      {"agoq", {Code::kNf4, 32, ScaleType::kTwoLevel, Rounding::kNearest}, "default for activations"},
      {"paper-fp4",
       {Code::kBnbFp4, 128, ScaleType::kFp32, Rounding::kNearest},
       "the paper's FP4, block 128"},
      {"authors-nf4",
       {Code::kNf4, 64, ScaleType::kFp32, Rounding::kNearest},
       "activations of the authors' release"},
      {"authors-gradient",
       {Code::kDynamic8, 256, ScaleType::kFp32, Rounding::kNearest},
       "gradients of the authors' release"},
  };
  return names;
}

std::vector<QuantFormat> all_quantised_formats() {
  std::vector<QuantFormat> formats;
  for (const CodeTraits& traits : code_table()) {
    if (traits.exact) continue;
    for (const int block : kBlocks) {
      for (const ScaleType scale : kBlockScales) {
        formats.push_back({traits.code, block, scale, Rounding::kNearest});
      }
    }
  }
  return formats;
}

}  // namespace agoq

#include "cli/formats.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "backend/format_error.h"
#include "checkpoint/json_text.h"
#include "cli/table.h"

namespace agoq {
namespace {

constexpr std::int64_t kSamples = 1 << 20;

struct FormatRow {
  QuantFormat format;
  std::string name;  // of named_formats(), or empty
  std::string note;
  FormatError normal;
  FormatError student_t4;
};

/// Exact types; every 4-bit code from the default block to the paper's; the wider codes at the blocks of
/// activations, gradients and moments; and whatever has a name.
std::vector<QuantFormat> listed_formats() {
  std::vector<QuantFormat> formats;
  const auto add = [&](const QuantFormat& format) {
    if (std::find(formats.begin(), formats.end(), format) == formats.end()) formats.push_back(format);
  };
  for (const CodeTraits& traits : code_table()) {
    if (traits.exact) {
      add({traits.code, 0, ScaleType::kNone, Rounding::kNearest});
      continue;
    }
    if (traits.code != Code::kDynamic8 && traits.code != Code::kDynamic8Unsigned) {
      add({traits.code, 32, ScaleType::kTwoLevel, Rounding::kNearest});
      add({traits.code, 32, ScaleType::kBf16, Rounding::kNearest});
      if (traits.bits == 4) {
        add({traits.code, 64, ScaleType::kBf16, Rounding::kNearest});
        add({traits.code, 128, ScaleType::kBf16, Rounding::kNearest});
      }
      add({traits.code, 128, ScaleType::kFp32, Rounding::kNearest});
    } else {
      add({traits.code, 128, ScaleType::kFp32, Rounding::kNearest});
      add({traits.code, 256, ScaleType::kFp32, Rounding::kNearest});
    }
    for (const NamedFormat& named : named_formats()) {
      if (named.format.code == traits.code) add(named.format);
    }
  }
  return formats;
}

std::vector<FormatRow> measure_rows() {
  const std::vector<float> normal = draw_samples(TestDistribution::kNormal, kSamples);
  const std::vector<float> student_t4 = draw_samples(TestDistribution::kStudentT4, kSamples);
  std::vector<FormatRow> rows;
  for (const QuantFormat& format : listed_formats()) {
    FormatRow row{format, "", std::string(traits_of(format.code).note), {}, {}};
    for (const NamedFormat& named : named_formats()) {
      if (named.format != format) continue;
      row.name = named.name;
      row.note = named.note;
    }
    row.normal = measure_format_error(cpu_backend(), format, normal);
    row.student_t4 = measure_format_error(cpu_backend(), format, student_t4);
    rows.push_back(std::move(row));
  }
  return rows;
}

std::string error_text(const FormatError& error) {
  if (error.relative_l2 == 0) return "0";
  return error.relative_l2 < .001 ? fmt::format("{:.1e}", error.relative_l2)
                                  : fmt::format("{:.4f}", error.relative_l2);
}

std::string sqnr_text(const FormatError& error) {
  return std::isinf(error.sqnr_db) ? "exact" : fmt::format("{:.1f}", error.sqnr_db);
}

void print_table(const std::vector<FormatRow>& rows) {
  Table table({{"format"},
               {"name"},
               {"bits", Align::kRight},
               {"N(0,1) error", Align::kRight},
               {"SQNR dB", Align::kRight},
               {"Student-t4 error", Align::kRight},
               {"SQNR dB", Align::kRight},
               {"note"}});
  for (const FormatRow& row : rows) {
    table.add_row({row.format.to_string(), row.name,
                   fmt::format("{:.3f}", row.format.bits_per_element()), error_text(row.normal),
                   sqnr_text(row.normal), error_text(row.student_t4), sqnr_text(row.student_t4),
                   row.note});
  }
  fmt::print(
      "{}\nBits per element include scales. Error is relative L2 over {} samples, measured now; codes\n"
      "without negative values see magnitudes. Any code goes with blocks of 16, 32, 64, 128 or 256 and\n"
      "scales fp32, bf16 or two-level: code/block/scale, and /stochastic for stochastic rounding.\n",
      table.to_string(), kSamples);
}

nlohmann::ordered_json error_json(const FormatError& error) {
  nlohmann::ordered_json json;
  json["relative_l2"] = error.relative_l2;
  json["sqnr_db"] =
      std::isinf(error.sqnr_db) ? nlohmann::ordered_json() : nlohmann::ordered_json(error.sqnr_db);
  return json;
}

void print_json(const std::vector<FormatRow>& rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const FormatRow& row : rows) {
    nlohmann::ordered_json entry;
    entry["format"] = row.format.to_string();
    entry["name"] = row.name.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(row.name);
    entry["bits_per_element"] = row.format.bits_per_element();
    entry["normal"] = error_json(row.normal);
    entry["student_t4"] = error_json(row.student_t4);
    entry["note"] = row.note;
    list.push_back(std::move(entry));
  }
  nlohmann::ordered_json json;
  json["samples"] = kSamples;
  json["formats"] = std::move(list);
  fmt::print("{}\n", to_text(json));
}

}  // namespace

void run_formats(bool json) {
  const std::vector<FormatRow> rows = measure_rows();
  if (json) {
    print_json(rows);
  } else {
    print_table(rows);
  }
}

Action declare_formats(Arguments& arguments) {
  const auto json = std::make_shared<bool>(false);
  arguments.flag("--json", *json, "print JSON");
  return [json](ProcessRanks&) { run_formats(*json); };
}

}  // namespace agoq

// The formats' errors held to method.md's figures on 2^20 samples, from both sides: too good fails too.
#include "backend/format_error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace agoq {
namespace {

constexpr std::int64_t kSamples = 1 << 20;

const std::vector<float>& samples_of(TestDistribution distribution) {
  static const std::vector<float> normal = draw_samples(TestDistribution::kNormal, kSamples);
  static const std::vector<float> student = draw_samples(TestDistribution::kStudentT4, kSamples);
  return distribution == TestDistribution::kNormal ? normal : student;
}

/// Within 3 % of a figure that was printed in steps of `unit`, so that it stands for +- unit / 2.
void expect_near_printed(double measured, double printed, double unit, const std::string& what) {
  EXPECT_GE(measured, (printed - unit / 2) * .97) << what;
  EXPECT_LE(measured, (printed + unit / 2) * 1.03) << what;
}

TEST(FormatError, EqualsThePublishedRelativeErrorsAtBlock128) {
  struct Row {
    const char* code;
    double normal, normal_unit, student, student_unit;
  };
  const std::vector<Row> rows = {
      {"bnbfp4", .128, .001, .203, .001}, {"e2m1", .108, .001, .134, .001},
      {"nf4", .095, .001, .131, .001},    {"int4", .118, .001, .196, .001},
      {"int5", .055, .001, .092, .001},   {"int6", .026, .001, .045, .001},
      {"int8", .0064, .0001, .011, .001}, {"e4m3", .026, .001, .024, .001},
      {"e5m2", .052, .001, .047, .001},   {"dynamic8", .010, .001, .013, .001},
  };
  for (const Row& row : rows) {
    const QuantFormat format = parse_format(std::string(row.code) + "/128/fp32");
    const auto error = [&](TestDistribution distribution) {
      return measure_format_error(cpu_backend(), format, samples_of(distribution)).relative_l2;
    };
    expect_near_printed(error(TestDistribution::kNormal), row.normal, row.normal_unit,
                        std::string(row.code) + " normal");
    expect_near_printed(error(TestDistribution::kStudentT4), row.student, row.student_unit,
                        std::string(row.code) + " student-t4");
  }
}

TEST(FormatError, EqualsThePublishedSqnrOfNormalData) {
  struct Row {
    const char* format;
    double bits, sqnr_db;
  };
  for (const Row& row : {Row{"nf4/32/two-level", 4.27, 21.1}, Row{"e2m1/32/bf16", 4.5, 19.9},
                         Row{"nf4/64/bf16", 4.25, 20.7}, Row{"nf4/128/bf16", 4.13, 20.4},
                         Row{"int4/128/bf16", 4.13, 18.6}, Row{"int8/32/bf16", 8.5, 45.4},
                         Row{"e4m3/32/bf16", 8.5, 32.4}}) {
    const QuantFormat format = parse_format(row.format);
    EXPECT_NEAR(format.bits_per_element(), row.bits, .0051) << row.format;
    const FormatError error =
        measure_format_error(cpu_backend(), format, samples_of(TestDistribution::kNormal));
    // 3 % of the error is .26 dB; the figures are printed in steps of .1 dB.
    EXPECT_NEAR(error.sqnr_db, row.sqnr_db, .26 + .05) << row.format;
    EXPECT_NEAR(error.sqnr_db, -20 * std::log10(error.relative_l2), 1e-9);
  }
}

TEST(FormatError, ExactFp32LosesNothingAndStochasticLosesMore) {
  const std::vector<float>& samples = samples_of(TestDistribution::kNormal);
  EXPECT_EQ(measure_format_error(cpu_backend(), parse_format("fp32"), samples).relative_l2, 0.0);
  const double nearest =
      measure_format_error(cpu_backend(), parse_format("int8/128/fp32"), samples).relative_l2;
  const double stochastic =
      measure_format_error(cpu_backend(), parse_format("int8/128/fp32/stochastic"), samples).relative_l2;
  EXPECT_NEAR(stochastic / nearest, std::sqrt(2.0),
              .03);  // uniform error: 1/6 against 1/12 of a step squared
}

TEST(FormatError, DrawsStandardDistributions) {
  for (const TestDistribution distribution : {TestDistribution::kNormal, TestDistribution::kStudentT4}) {
    double sum = 0, squares = 0;
    for (const float x : samples_of(distribution)) {
      sum += x;
      squares += double{x} * x;
    }
    EXPECT_NEAR(sum / kSamples, 0, .006) << name_of(distribution);
    // The variance of t4 is 2; its estimate converges slowly, for the fourth moment is infinite.
    EXPECT_NEAR(squares / kSamples, distribution == TestDistribution::kNormal ? 1.0 : 2.0,
                distribution == TestDistribution::kNormal ? .01 : .1);
  }
}

}  // namespace
}  // namespace agoq

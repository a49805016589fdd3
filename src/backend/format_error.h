// What a format loses: the error of quantising and dequantising standard test data.
//
//   relative L2 = |x' - x| / |x|        SQNR = -20 log10(relative L2), in dB
//
// Both in double precision over all samples. The samples are a fixed sequence, so the figures are
// the same on every machine.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "backend/backend.h"

namespace agoq {

enum class TestDistribution {
  kNormal,     // N(0, 1)
  kStudentT4,  // Student's t with 4 degrees of freedom: heavy tails
};

std::string_view name_of(TestDistribution distribution);

/// `count` samples, the same at each call.
std::vector<float> draw_samples(TestDistribution distribution, std::int64_t count);

struct FormatError {
  double relative_l2 = 0;
  double sqnr_db = 0;  // +infinity where nothing is lost
};

/// Quantises `samples` as rows of `row_length` elements (a divisor of their number) and reads them back.
/// For codes without negative values the samples' magnitudes are taken.
FormatError measure_format_error(Backend& backend, const QuantFormat& format,
                                 std::span<const float> samples, std::int64_t row_length = 4096);

}  // namespace agoq

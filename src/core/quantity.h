// Quantities as a reader wants them: bytes, durations, counts.
#pragma once

#include <cstdint>
#include <string>

namespace agoq {

/// Three significant digits in binary units: "512 B", "1.25 GiB", "47.8 KiB".
std::string format_bytes(std::int64_t bytes);

/// The two largest units: "0.42 s", "12.3 s", "3 min 12 s", "2 h 05 min", "3 d 04 h".
std::string format_duration(double seconds);

/// Digits in groups of three: "1,234,567".
std::string format_count(std::int64_t count);

}  // namespace agoq

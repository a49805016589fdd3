// Quantities as a reader wants them: bytes, durations, counts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace agoq {

/// Three significant digits in binary units: "512 B", "1.25 GiB", "47.8 KiB".
std::string format_bytes(std::int64_t bytes);

/// The number of bytes that a person wrote: "85899345920", "80GiB", "1.5 TiB"; nothing for other texts,
/// and for more than 2^63 - 1.
std::optional<std::int64_t> parse_bytes(std::string_view text);

/// The two largest units: "0.42 s", "12.3 s", "3 min 12 s", "2 h 05 min", "3 d 04 h".
std::string format_duration(double seconds);

/// Digits in groups of three: "1,234,567".
std::string format_count(std::int64_t count);

}  // namespace agoq

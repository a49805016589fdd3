#include "core/checksum.h"

#include <zlib.h>

#include <algorithm>

#include "core/error.h"

namespace agoq {

std::uint32_t checksum(const void* data, std::size_t bytes, std::uint32_t before) {
  return static_cast<std::uint32_t>(crc32_z(before, static_cast<const Bytef*>(data), bytes));
}

std::uint32_t combined_checksum(std::span<const PieceChecksum> pieces, std::uint64_t begin,
                                std::uint64_t end) {
  auto piece =
      std::lower_bound(pieces.begin(), pieces.end(), begin,
                       [](const PieceChecksum& a, std::uint64_t first) { return a.begin < first; });
  std::uint64_t covered = begin;
  std::uint32_t value = 0;
  for (; covered < end && piece != pieces.end(); ++piece) {
    check(piece->begin == covered && piece->bytes <= end - covered,
          "the pieces of a file do not fit: one of bytes [{}, {}) follows those up to {}", piece->begin,
          piece->begin + piece->bytes, covered);
    value = static_cast<std::uint32_t>(
        crc32_combine(value, piece->value, static_cast<z_off_t>(piece->bytes)));
    covered += piece->bytes;
  }
  check(covered == end, "bytes [{}, {}) of a file are in none of its pieces", covered, end);
  return value;
}

}  // namespace agoq

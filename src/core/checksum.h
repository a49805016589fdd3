// CRC-32 (ISO-HDLC, as in zlib and gzip) of a file whose pieces are read or written by several threads
// and ranks: the checksums of the pieces give that of the whole without its bytes.
//
// It finds every error within 32 bits in a row, and any other with a probability of 1 - 2^-32. It is no
// protection from those who forge a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace agoq {

/// The checksum of bytes behind others, whose checksum is `before`.
std::uint32_t checksum(const void* data, std::size_t bytes, std::uint32_t before = 0);

/// The checksum of a piece of a file.
struct PieceChecksum {
  std::uint64_t begin = 0;  // bytes, from the start of the file
  std::uint64_t bytes = 0;
  std::uint32_t value = 0;
};

/// The checksum of bytes [begin, end) of the file. `pieces` are sorted by their begin. Throws Error
/// unless those in that range cover it without overlap or hole.
std::uint32_t combined_checksum(std::span<const PieceChecksum> pieces, std::uint64_t begin,
                                std::uint64_t end);

}  // namespace agoq

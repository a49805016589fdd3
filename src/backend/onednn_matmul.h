// One tile of an FP32 matrix product by oneDNN's matmul primitive: c (+)= a^T b, with a stored as
// [depth, rows], b as [depth, columns] and c as [rows, columns], each with a row stride of its own.
//
// Why tiles, and why a is always stored transposed. A primitive that runs its own threads may split
// `depth` between them, and then the sum depends on their number; so the caller spreads whole tiles over
// threads, and a primitive runs in one. And without AVX-512 the implementation that oneDNN has
// ("gemm:jit", 2.6) ignores the user scratchpad: it takes 16 KiB to 1 MiB from malloc in every call,
// except for tiles no larger than kMatmulTile with a stored transposed, for which it needs none.
//
// Primitives are built once per geometry and kept for the life of the program; calls are thread-safe.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>

namespace agoq {

/// Most rows and columns of a tile.
inline constexpr std::int64_t kMatmulTile = 128;

struct MatmulTile {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t depth = 0;
  std::int64_t a_stride = 0;  // elements from one row of storage to the next
  std::int64_t b_stride = 0;
  std::int64_t c_stride = 0;
  bool accumulate = false;

  auto operator<=>(const MatmulTile&) const = default;
};

class OnednnMatmul;

/// The primitive for `tile`, from the cache or built now.
const OnednnMatmul& onednn_matmul(const MatmulTile& tile);

/// Scratch that one call needs, aligned to kArenaAlignment.
std::size_t scratch_bytes(const OnednnMatmul& matmul);

/// Runs in the calling thread, which must have its OpenMP thread count set to 1.
void run(const OnednnMatmul& matmul, const float* a, const float* b, float* c, std::byte* scratch);

}  // namespace agoq

// c (+)= op(a) b on tiles that lie in cache, for attention.
//
// a [rows, depth] is read through two strides, so its transpose costs nothing; b [depth, columns] and
// c [rows, columns] are row-major. rows is a multiple of kTileRows and columns of kLanes<T>: tiles are
// padded with zeros. A kTileRows x kLanes block of c stays in registers over the whole depth, which is
// summed in order.
#pragma once

#include "backend/cpu/storage.h"

namespace agoq::cpu::AGOQ_CPU_ISA {

/// 4 x 16 floats are 8 of the 16 AVX registers: enough sums in flight to hide the latency of an FMA.
inline constexpr std::int64_t kTileRows = 4;

template <typename T>
struct TileOperand {
  const T* data;
  std::int64_t row_stride;
  std::int64_t depth_stride;
};

enum class TileSum { kSet, kAdd };

template <TileSum kSum, typename T>
void tile_product(std::int64_t rows, std::int64_t columns, std::int64_t depth, TileOperand<T> a,
                  const T* b, std::int64_t b_stride, T* c, std::int64_t c_stride) {
  for (std::int64_t row = 0; row < rows; row += kTileRows) {
    for (std::int64_t column = 0; column < columns; column += kLanes<T>) {
      const T* a_block = a.data + row * a.row_stride;
      const T* b_block = b + column;
      T* c_block = c + row * c_stride + column;
      T sum[kTileRows][kLanes<T>] = {};
      if constexpr (kSum == TileSum::kAdd) {
        for (std::int64_t r = 0; r < kTileRows; ++r) {
          for (std::int64_t lane = 0; lane < kLanes<T>; ++lane)
            sum[r][lane] = c_block[r * c_stride + lane];
        }
      }
      for (std::int64_t d = 0; d < depth; ++d) {
#pragma GCC unroll 4
        for (std::int64_t r = 0; r < kTileRows; ++r) {
          const T factor = a_block[r * a.row_stride + d * a.depth_stride];
#pragma omp simd
          for (std::int64_t lane = 0; lane < kLanes<T>; ++lane) {
            sum[r][lane] = multiply_add(factor, b_block[d * b_stride + lane], sum[r][lane]);
          }
        }
      }
      for (std::int64_t r = 0; r < kTileRows; ++r) {
        for (std::int64_t lane = 0; lane < kLanes<T>; ++lane)
          c_block[r * c_stride + lane] = sum[r][lane];
      }
    }
  }
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA

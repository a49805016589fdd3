// c = op(a) op(b) (+ c), c [M, N], sums over K in the compute type.
//
// FP32 and BF16 go to oneDNN in tiles of kMatmulTile x kMatmulTile elements of c, each by one thread
// over the whole of K (backend/onednn_matmul.h says why); FP64, which only tests use, goes to a plain
// loop over the same tiles. Either takes op(a) as [K, M] and op(b) as [K, N] in the compute type:
// operands that are not stored so are widened or transposed into the workspace, kSlab rows of c and
// kSlab columns at a time, so that the workspace is bounded by K and not by the matrix. There they lie
// as one panel [K, kPanelStride] per tile: a tile reads memory in order, and one primitive serves
// matrices of every width. A BF16 result is rounded tile by tile. The partition depends on the shape
// alone, so the result does not depend on the number of threads.
#include <omp.h>

#include <algorithm>
#include <array>

#include "backend/cpu/storage.h"
#include "backend/onednn_matmul.h"

namespace agoq::cpu::AGOQ_CPU_ISA {
namespace {

constexpr std::int64_t kSlab = 2048;  // a multiple of kMatmulTile
// One cache line more than a tile is wide: at a power of two, the rows that a tile reads together share
// a few sets of the cache.
constexpr std::int64_t kPanelStride = kMatmulTile + 16;

struct Extents {
  std::int64_t m, n, k;
};

// A matrix op(x) as seen by the tiles: [K, `columns`], taken from storage [., stride].
struct Operand {
  const Tensor& tensor;
  bool flip;    // storage is [columns, K]
  bool direct;  // storage is [K, columns] in the compute type: used where it is
};

Operand operand_of(const Tensor& tensor, bool stored_depth_first, ElementType compute) {
  return {tensor, !stored_depth_first, stored_depth_first && tensor.type == compute};
}

// out[d][i] = in[i][d] for a square of kSide: whole rows in and out, so that the compiler turns the
// square in registers.
constexpr std::int64_t kSide = 8;
template <typename Storage, typename T>
void transpose_square(const Storage* __restrict in, std::int64_t stride, T* __restrict out) {
  T square[kSide][kSide];
  for (std::int64_t i = 0; i < kSide; ++i) {
    for (std::int64_t d = 0; d < kSide; ++d) square[i][d] = load(in[i * stride + d]);
  }
  for (std::int64_t d = 0; d < kSide; ++d) {
    for (std::int64_t i = 0; i < kSide; ++i) out[d * kPanelStride + i] = square[i][d];
  }
}

// Depths [begin, end) of one panel of `columns` columns from `first`, widened and, if need be,
// transposed.
template <typename Storage, typename T>
void pack_block(const Operand& operand, std::int64_t begin, std::int64_t end, std::int64_t first,
                std::int64_t columns, T* out) {
  const std::int64_t stride = operand.tensor.width();
  const Storage* in = operand.tensor.as<Storage>();
  if (!operand.flip) {
    for (std::int64_t d = begin; d < end; ++d) {
      const Storage* __restrict row = in + d * stride + first;
      T* __restrict packed = out + d * kPanelStride;
      for (std::int64_t c = 0; c < columns; ++c) packed[c] = load(row[c]);
    }
    return;
  }
  const std::int64_t squares_end = begin + (end - begin) / kSide * kSide;
  std::int64_t c = 0;
  for (; c + kSide <= columns; c += kSide) {
    const Storage* rows = in + (first + c) * stride;
    for (std::int64_t d = begin; d < squares_end; d += kSide) {
      transpose_square(rows + d, stride, out + d * kPanelStride + c);
    }
    for (std::int64_t d = squares_end; d < end; ++d) {
      for (std::int64_t i = 0; i < kSide; ++i)
        out[d * kPanelStride + c + i] = load(rows[i * stride + d]);
    }
  }
  for (; c < columns; ++c) {
    for (std::int64_t d = begin; d < end; ++d)
      out[d * kPanelStride + c] = load(in[(first + c) * stride + d]);
  }
}

// `columns` columns from `first` as panels [k, kPanelStride], one per tile.
template <typename Storage, typename T>
void pack(const Operand& operand, std::int64_t k, std::int64_t first, std::int64_t columns, T* out) {
  constexpr std::int64_t kBlock = 64;
#pragma omp parallel for collapse(2) schedule(static) if (k * columns > kSerialElements)
  for (std::int64_t column = 0; column < columns; column += kMatmulTile) {
    for (std::int64_t depth = 0; depth < k; depth += kBlock) {
      pack_block<Storage>(operand, depth, std::min(k, depth + kBlock), first + column,
                          std::min(kMatmulTile, columns - column),
                          out + column / kMatmulTile * k * kPanelStride);
    }
  }
}

Shape panels_shape(std::int64_t columns, std::int64_t k) {
  return {(std::min(columns, kSlab) + kMatmulTile - 1) / kMatmulTile, k, kPanelStride};
}

template <typename T>
void pack_as(const Operand& operand, std::int64_t k, std::int64_t first, std::int64_t columns, T* out) {
  if constexpr (std::is_same_v<T, double>) {
    pack<double>(operand, k, first, columns, out);
  } else {
    if (operand.tensor.type == ElementType::kBf16)
      pack<Bf16>(operand, k, first, columns, out);
    else
      pack<float>(operand, k, first, columns, out);
  }
}

template <typename T>
struct Panels {
  const T* data;
  std::int64_t step;  // from one tile's first element to the next tile's
  const T* at(std::int64_t column) const { return data + column / kMatmulTile * step; }
};

template <typename T>
Panels<T> panels(const Operand& operand, std::int64_t k, std::int64_t first, std::int64_t columns,
                 const Tensor& packed) {
  if (operand.direct) return {operand.tensor.as<T>() + first, kMatmulTile};
  pack_as(operand, k, first, columns, packed.as<T>());
  return {packed.as<T>(), k * kPanelStride};
}

// The plain loop for double: a [k, rows], b [k, columns].
void multiply_tile(const MatmulTile& tile, const double* a, const double* b, double* c) {
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    double* sum = c + row * tile.c_stride;
    if (!tile.accumulate) std::fill_n(sum, tile.columns, 0.0);
    for (std::int64_t d = 0; d < tile.depth; ++d) {
      const double factor = a[d * tile.a_stride + row];
      const double* b_row = b + d * tile.b_stride;
      for (std::int64_t column = 0; column < tile.columns; ++column) {
        sum[column] = multiply_add(factor, b_row[column], sum[column]);
      }
    }
  }
}

// The tile shapes of one slab of c: inner, right edge, bottom edge, corner.
struct Primitives {
  std::array<const OnednnMatmul*, 4> of{};
  const OnednnMatmul*& at(bool short_rows, bool short_columns) {
    return of[(short_rows ? 2u : 0u) + (short_columns ? 1u : 0u)];
  }
};

struct Slab {
  std::int64_t first_row, rows, first_column, columns;
};

MatmulTile tile_of(const Slab& slab, std::int64_t row, std::int64_t column, const MatmulTile& strides) {
  MatmulTile tile = strides;
  tile.rows = std::min(kMatmulTile, slab.rows - row);
  tile.columns = std::min(kMatmulTile, slab.columns - column);
  return tile;
}

template <typename Visit>
void for_each_slab(const Extents& e, Visit visit) {
  for (std::int64_t row = 0; row < e.m; row += kSlab) {
    for (std::int64_t column = 0; column < e.n; column += kSlab) {
      visit(Slab{row, std::min(kSlab, e.m - row), column, std::min(kSlab, e.n - column)});
    }
  }
}

// Strides of the tiles of `slab`; a tile of a BF16 result is made in a buffer of its own first.
MatmulTile strides_of(const Operand& a, const Operand& b, const Tensor& c, ElementType compute,
                      std::int64_t k, bool accumulate) {
  MatmulTile tile;
  tile.depth = k;
  tile.a_stride = a.direct ? a.tensor.width() : kPanelStride;
  tile.b_stride = b.direct ? b.tensor.width() : kPanelStride;
  tile.c_stride = c.type == compute ? c.width() : kMatmulTile;
  tile.accumulate = accumulate;
  return tile;
}

Primitives primitives_of(const Slab& slab, const MatmulTile& strides) {
  Primitives primitives;
  const std::int64_t last_row = (slab.rows - 1) / kMatmulTile * kMatmulTile;
  const std::int64_t last_column = (slab.columns - 1) / kMatmulTile * kMatmulTile;
  for (const std::int64_t row : {std::int64_t{0}, last_row}) {
    for (const std::int64_t column : {std::int64_t{0}, last_column}) {
      const MatmulTile tile = tile_of(slab, row, column, strides);
      primitives.at(tile.rows < kMatmulTile, tile.columns < kMatmulTile) = &onednn_matmul(tile);
    }
  }
  return primitives;
}

// The tile of a BF16 c, between memory and the FP32 buffer it is made in.
void widen_tile(const Bf16* c, std::int64_t stride, const MatmulTile& tile, float* buffer) {
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    for (std::int64_t i = 0; i < tile.columns; ++i)
      buffer[row * kMatmulTile + i] = load(c[row * stride + i]);
  }
}
void round_tile(const float* buffer, const MatmulTile& tile, Bf16* c, std::int64_t stride) {
  for (std::int64_t row = 0; row < tile.rows; ++row) {
    for (std::int64_t i = 0; i < tile.columns; ++i)
      store(buffer[row * kMatmulTile + i], c[row * stride + i]);
  }
}

void multiply_slab(const Slab& slab, const MatmulTile& strides, const Panels<float>& a,
                   const Panels<float>& b, const Tensor& c, float* buffers, std::byte* scratch,
                   std::int64_t scratch_per_thread, int threads) {
  Primitives primitives = primitives_of(slab, strides);
  const std::int64_t across = (slab.columns + kMatmulTile - 1) / kMatmulTile;
  const std::int64_t down = (slab.rows + kMatmulTile - 1) / kMatmulTile;
  float* exact = c.type == ElementType::kFp32 ? c.as<float>() : nullptr;
  Bf16* rounded = c.type == ElementType::kBf16 ? c.as<Bf16>() : nullptr;
#pragma omp parallel num_threads(across* down > 1 ? threads : 1)
  {
    omp_set_num_threads(1);  // in this thread and to the end of the region: oneDNN starts no others
    const std::int64_t thread = omp_get_thread_num();
    std::byte* my_scratch = scratch + thread * scratch_per_thread;
#pragma omp for schedule(static)
    for (std::int64_t index = 0; index < across * down; ++index) {
      const std::int64_t row = index / across * kMatmulTile, column = index % across * kMatmulTile;
      const MatmulTile tile = tile_of(slab, row, column, strides);
      const OnednnMatmul& primitive =
          *primitives.at(tile.rows < kMatmulTile, tile.columns < kMatmulTile);
      const std::int64_t offset = (slab.first_row + row) * c.width() + slab.first_column + column;
      if (exact != nullptr) {
        run(primitive, a.at(row), b.at(column), exact + offset, my_scratch);
        continue;
      }
      float* buffer = buffers + thread * kMatmulTile * kMatmulTile;
      if (tile.accumulate) widen_tile(rounded + offset, c.width(), tile, buffer);
      run(primitive, a.at(row), b.at(column), buffer, my_scratch);
      round_tile(buffer, tile, rounded + offset, c.width());
    }
  }
}

void multiply_slab(const Slab& slab, const MatmulTile& strides, const Panels<double>& a,
                   const Panels<double>& b, const Tensor& c) {
  double* out = c.as<double>();
#pragma omp parallel for collapse(2) schedule(static) if (slab.rows * slab.columns > kSerialElements)
  for (std::int64_t row = 0; row < slab.rows; row += kMatmulTile) {
    for (std::int64_t column = 0; column < slab.columns; column += kMatmulTile) {
      multiply_tile(tile_of(slab, row, column, strides), a.at(row), b.at(column),
                    out + (slab.first_row + row) * c.width() + slab.first_column + column);
    }
  }
}

// Scratch that the most demanding primitive of the product needs.
std::int64_t scratch_per_thread(const Operand& a, const Operand& b, const Tensor& c, const Extents& e,
                                bool accumulate) {
  std::size_t most = 0;
  for_each_slab(e, [&](const Slab& slab) {
    const MatmulTile strides = strides_of(a, b, c, ElementType::kFp32, e.k, accumulate);
    for (const OnednnMatmul* primitive : primitives_of(slab, strides).of) {
      if (primitive != nullptr) most = std::max(most, scratch_bytes(*primitive));
    }
  });
  return round_up(static_cast<std::int64_t>(most), kArenaAlignment);
}

}  // namespace

void CpuBackend::matmul(const Context& context, const Tensor& a, Transpose transpose_a, const Tensor& b,
                        Transpose transpose_b, const Tensor& c, bool accumulate) {
  const bool flip_a = transpose_a == Transpose::kYes, flip_b = transpose_b == Transpose::kYes;
  check(a && b && c, "matmul: a, b and c are required, and one was not given");
  const Extents e{flip_a ? a.width() : a.rows(), flip_b ? b.rows() : b.width(),
                  flip_a ? a.rows() : a.width()};
  check((flip_b ? b.width() : b.rows()) == e.k && c.rows() == e.m && c.width() == e.n,
        "matmul: op(a) is [{}, {}], op(b) [{}, {}] and c {}: they do not multiply", e.m, e.k,
        flip_b ? b.width() : b.rows(), e.n, c.shape.to_string());
  const ElementType compute = statistics_type(c.type);
  for (const Tensor* tensor : {&a, &b, &c}) {
    check(
        tensor->type == compute || (tensor->type == ElementType::kBf16 && compute == ElementType::kFp32),
        "matmul: a is {}, b {} and c {}: either all are fp64, or each is fp32 or bf16", name_of(a.type),
        name_of(b.type), name_of(c.type));
  }
  if (e.m == 0 || e.n == 0) return;
  check(e.k > 0, "matmul: the inner extent is 0: there is nothing to sum");
  const Arena::Scope scope(context.workspace);
  const Operand left = operand_of(a, flip_a, compute), right = operand_of(b, !flip_b, compute);
  Tensor packed_a, packed_b, buffers;
  if (!left.direct) packed_a = context.workspace.take(compute, panels_shape(e.m, e.k));
  if (!right.direct) packed_b = context.workspace.take(compute, panels_shape(e.n, e.k));
  const int threads = omp_get_max_threads();
  if (c.type != compute) {
    buffers = context.workspace.take(compute, Shape{threads, kMatmulTile, kMatmulTile});
  }
  std::int64_t per_thread = 0;
  std::byte* scratch = nullptr;
  if (compute == ElementType::kFp32) {
    per_thread = scratch_per_thread(left, right, c, e, accumulate);
    if (per_thread > 0) scratch = context.workspace.take(static_cast<std::size_t>(threads * per_thread));
  }
  if (context.workspace.is_measuring()) return;

  const auto multiply = [&]<typename T>() {
    Panels<T> rows{};
    std::int64_t rows_of = -1;
    for_each_slab(e, [&](const Slab& slab) {
      if (slab.first_row != rows_of) rows = panels<T>(left, e.k, slab.first_row, slab.rows, packed_a);
      rows_of = slab.first_row;
      const Panels<T> columns = panels<T>(right, e.k, slab.first_column, slab.columns, packed_b);
      const MatmulTile strides = strides_of(left, right, c, compute, e.k, accumulate);
      if constexpr (std::is_same_v<T, double>) {
        multiply_slab(slab, strides, rows, columns, c);
      } else {
        multiply_slab(slab, strides, rows, columns, c, buffers ? buffers.as<float>() : nullptr, scratch,
                      per_thread, threads);
      }
    });
  };
  if (compute == ElementType::kFp64)
    multiply.template operator()<double>();
  else
    multiply.template operator()<float>();
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA

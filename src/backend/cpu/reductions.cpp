// Sums in double precision whose value does not depend on the number of threads or the instruction set.
//
//   sum              one running sum in element order
//   sum_of_squares   per row 8 running sums, lane l over elements l, l + 8, ..., folded in lane order;
//                    then the sum of rows in row order; of pieces, the row is their sum (row_codec.h)
#include <omp.h>

#include "backend/cpu/row_codec.h"
#include "backend/cpu/storage.h"
#include "backend/operand_checks.h"
#include "core/error.h"

namespace agoq::cpu::AGOQ_CPU_ISA {
namespace {

template <typename T>
double sum_in_order(const T* x, std::int64_t count) {
  double total = 0;
  for (std::int64_t i = 0; i < count; ++i) total += load(x[i]);
  return total;
}

template <typename T>
double row_sum_of_squares(const T* x, std::int64_t count) {
  double lanes[kLanes<double>] = {};
  const std::int64_t whole = count / kLanes<double> * kLanes<double>;
  for (std::int64_t i = 0; i < whole; i += kLanes<double>) {
    for (std::int64_t lane = 0; lane < kLanes<double>; ++lane) {
      const double value = x[i + lane];
      lanes[lane] += value * value;
    }
  }
  for (std::int64_t i = whole; i < count; ++i) {
    const double value = x[i];
    lanes[i - whole] += value * value;
  }
  double total = 0;
  for (const double lane : lanes) total += lane;
  return total;
}

/// Of the rows of the sum of `pieces`. scratch: two rows for each thread.
template <typename Compute>
void row_sums_of_squares(std::span<const QuantTensor> pieces, Compute* scratch, double* row_sums) {
  const std::int64_t rows = pieces.front().rows();
  const std::int64_t width = pieces.front().width();
#pragma omp parallel for schedule(static) if (rows * width > kSerialElements)
  for (std::int64_t row = 0; row < rows; ++row) {
    Compute* sum = scratch + 2 * omp_get_thread_num() * width;
    sum_row(pieces, row, sum, sum + width);
    row_sums[row] = row_sum_of_squares(sum, width);
  }
}

/// total[0] = the sum of squares of the sum of the pieces.
void add_squares(const Context& context, const TensorPieces& pieces, const Tensor& total) {
  const QuantTensor& shape = pieces.front();
  const bool in_fp64 = shape.format.code == Code::kFp64;
  if (shape.rows() == 0) {
    if (!context.workspace.is_measuring()) *total.as<double>() = 0;
    return;
  }
  const Arena::Scope scope(context.workspace);
  const Tensor row_sums = context.workspace.take(ElementType::kFp64, Shape{shape.rows()});
  const Tensor scratch = context.workspace.take(in_fp64 ? ElementType::kFp64 : ElementType::kFp32,
                                                Shape{omp_get_max_threads(), 2, shape.width()});
  if (context.workspace.is_measuring()) return;
  if (in_fp64) {
    row_sums_of_squares(pieces, scratch.as<double>(), row_sums.as<double>());
  } else {
    row_sums_of_squares(pieces, scratch.as<float>(), row_sums.as<double>());
  }
  *total.as<double>() = sum_in_order(row_sums.as<double>(), shape.rows());
}

}  // namespace

void CpuBackend::sum(const Context& context, const Tensor& x, const Tensor& total) {
  check_totals("sum", total, 1);
  if (context.workspace.is_measuring()) return;
  double* out = total.as<double>();
  switch (x.type) {
    case ElementType::kFp64: *out = sum_in_order(x.as<double>(), x.count()); return;
    case ElementType::kFp32: *out = sum_in_order(x.as<float>(), x.count()); return;
    case ElementType::kBf16: *out = sum_in_order(x.as<Bf16>(), x.count()); return;
    case ElementType::kFp16: *out = sum_in_order(x.as<Fp16>(), x.count()); return;
    default: fail("sum: floating-point elements were expected; {} was given", name_of(x.type));
  }
}

void CpuBackend::sums_of_squares(const Context& context, std::span<const QuantTensor> xs,
                                 const Tensor& totals) {
  check_totals("sums_of_squares", totals, xs.size());
  for (std::size_t i = 0; i < xs.size(); ++i) {
    add_squares(context, {&xs[i], 1}, total_of(totals, i));
  }
}

void CpuBackend::pieces_sums_of_squares(const Context& context, std::span<const TensorPieces> tensors,
                                        const Tensor& totals) {
  check_totals("pieces_sums_of_squares", totals, tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    expect_pieces("pieces_sums_of_squares", tensors[i]);
    add_squares(context, tensors[i], total_of(totals, i));
  }
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA

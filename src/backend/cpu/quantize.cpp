// Tensors to and from a QuantFormat, row by row (backend/cpu/row_codec.h).
//
//   quantize     destination = Q(source)
//   add_pieces   sum = Q(Q^-1(p0) + Q^-1(p1) + ...)
//   accumulate   main = Q(Q^-1(main) + addend), block scales fresh: the sum is made in FP32, in FP64
//                where main is stored in FP64
//
// Rows are independent: threads share them out, and counts are integers, so that nothing depends on how.
#include <omp.h>

#include <algorithm>

#include "backend/cpu/row_codec.h"
#include "backend/cpu/storage.h"
#include "backend/operand_checks.h"
#include "core/error.h"
#include "quant/codec.h"

namespace agoq::cpu::AGOQ_CPU_ISA {
namespace {

[[noreturn]] void refuse(std::string_view operation, ElementType type) {
  fail("{}: fp32, bf16 or fp64 was expected; {} was given", operation, name_of(type));
}

void add_counts(const QuantCounts& counts, const Tensor& counters) {
  if (!counters) return;
  auto* total = counters.as<std::int64_t>();
  total[static_cast<int>(QuantCounter::kNonFinite)] += counts.non_finite;
  total[static_cast<int>(QuantCounter::kSaturated)] += counts.saturated;
  total[static_cast<int>(QuantCounter::kFlushedBlocks)] += counts.flushed_blocks;
}

/// Calls encode(row, counts) for every row of `destination` and returns the counts of all.
template <typename Encode>
QuantCounts for_each_row(const QuantTensor& destination, const Encode& encode) {
  std::int64_t non_finite = 0, saturated = 0, flushed_blocks = 0;
#pragma omp parallel for schedule(static) reduction( \
        + : non_finite, saturated, flushed_blocks) if (destination.grid.count() > kSerialElements)
  for (std::int64_t row = 0; row < destination.rows(); ++row) {
    QuantCounts counts;
    encode(row, counts);
    non_finite += counts.non_finite;
    saturated += counts.saturated;
    flushed_blocks += counts.flushed_blocks;
  }
  return {non_finite, saturated, flushed_blocks};
}

template <typename Source>
QuantCounts encode_rows(const Tensor& source, const QuantTensor& destination, const RandomKey& key) {
  const Source* in = source.as<Source>();
  return for_each_row(destination, [&](std::int64_t row, QuantCounts& counts) {
    encode_row(destination, row, in + row * destination.width(), key, counts);
  });
}

template <typename Target>
void decode_rows(const QuantTensor& source, const Tensor& destination) {
  Target* out = destination.as<Target>();
#pragma omp parallel for schedule(static) if (source.grid.count() > kSerialElements)
  for (std::int64_t row = 0; row < source.rows(); ++row) {
    decode_row(source, row, out + row * source.width());
  }
}

/// Element types that decode_row does not write, through a row of FP32 per thread.
template <typename Target, typename Narrow>
void decode_rows_through(const QuantTensor& source, const Tensor& destination, float* scratch,
                         const Narrow& narrow) {
  Target* out = destination.as<Target>();
  const std::int64_t width = source.width();
#pragma omp parallel for schedule(static) if (source.grid.count() > kSerialElements)
  for (std::int64_t row = 0; row < source.rows(); ++row) {
    float* decoded = scratch + omp_get_thread_num() * width;
    decode_row(source, row, decoded);
    for (std::int64_t i = 0; i < width; ++i) out[row * width + i] = narrow(decoded[i]);
  }
}

template <typename Compute, typename Addend>
QuantCounts accumulate_rows(const Tensor& addend, const QuantTensor& main, const RandomKey& key,
                            Compute* scratch) {
  const Addend* in = addend.as<Addend>();
  const std::int64_t width = main.width();
  return for_each_row(main, [&](std::int64_t row, QuantCounts& counts) {
    Compute* sum = scratch + omp_get_thread_num() * width;
    decode_row(main, row, sum);
    const Addend* added = in + row * width;
    for (std::int64_t i = 0; i < width; ++i) sum[i] += static_cast<Compute>(load(added[i]));
    encode_row(main, row, sum, key, counts);
  });
}

template <typename Compute>
QuantCounts accumulate_as(const Tensor& addend, const QuantTensor& main, const RandomKey& key,
                          Compute* scratch) {
  switch (addend.type) {
    case ElementType::kFp32: return accumulate_rows<Compute, float>(addend, main, key, scratch);
    case ElementType::kBf16: return accumulate_rows<Compute, Bf16>(addend, main, key, scratch);
    case ElementType::kFp64: return accumulate_rows<Compute, double>(addend, main, key, scratch);
    default: refuse("accumulate", addend.type);
  }
}

/// scratch: two rows for each thread.
template <typename Compute>
QuantCounts add_rows(std::span<const QuantTensor> pieces, const QuantTensor& sum, const RandomKey& key,
                     const std::int32_t* row_numbers, Compute* scratch) {
  const std::int64_t width = sum.width();
  return for_each_row(sum, [&](std::int64_t row, QuantCounts& counts) {
    Compute* values = scratch + 2 * omp_get_thread_num() * width;
    sum_row(pieces, row, values, values + width);
    QuantTensor standing = sum;
    if (row_numbers != nullptr) standing.first_row = row_numbers[row] - row;
    encode_row(standing, row, values, key, counts);
  });
}

/// One row of `type` for every thread.
Tensor take_rows(const Context& context, ElementType type, std::int64_t width) {
  return context.workspace.take(type, Shape{omp_get_max_threads(), width});
}

}  // namespace

void CpuBackend::quantize(const Context& context, const Tensor& source, const QuantTensor& destination,
                          const RandomKey& key, const Tensor& counters) {
  expect_same_shape("quantize", source, destination);
  expect_counters("quantize", counters);
  if (context.workspace.is_measuring()) return;
  switch (source.type) {
    case ElementType::kFp32: return add_counts(encode_rows<float>(source, destination, key), counters);
    case ElementType::kBf16: return add_counts(encode_rows<Bf16>(source, destination, key), counters);
    case ElementType::kFp64: return add_counts(encode_rows<double>(source, destination, key), counters);
    default: refuse("quantize", source.type);
  }
}

void CpuBackend::dequantize(const Context& context, const QuantTensor& source,
                            const Tensor& destination) {
  expect_same_shape("dequantize", destination, source);
  const Arena::Scope scope(context.workspace);
  const bool through_fp32 = destination.type == ElementType::kBf16;
  const Tensor scratch =
      through_fp32 ? take_rows(context, ElementType::kFp32, source.width()) : Tensor{};
  if (context.workspace.is_measuring()) return;
  switch (destination.type) {
    case ElementType::kFp32: return decode_rows<float>(source, destination);
    case ElementType::kFp64: return decode_rows<double>(source, destination);
    case ElementType::kBf16:
      return decode_rows_through<Bf16>(source, destination, scratch.as<float>(),
                                       [](float x) { return to_bf16(x); });
    default: refuse("dequantize", destination.type);
  }
}

void CpuBackend::accumulate(const Context& context, const Tensor& addend, const QuantTensor& main,
                            const RandomKey& key, const Tensor& counters) {
  expect_same_shape("accumulate", addend, main);
  expect_counters("accumulate", counters);
  const bool in_fp64 = main.format.code == Code::kFp64;
  const Arena::Scope scope(context.workspace);
  const Tensor scratch =
      take_rows(context, in_fp64 ? ElementType::kFp64 : ElementType::kFp32, main.width());
  if (context.workspace.is_measuring()) return;
  add_counts(in_fp64 ? accumulate_as(addend, main, key, scratch.as<double>())
                     : accumulate_as(addend, main, key, scratch.as<float>()),
             counters);
}

void CpuBackend::add_pieces(const Context& context, std::span<const QuantTensor> pieces,
                            const QuantTensor& sum, const RandomKey& key, const Tensor& counters,
                            const Tensor& row_numbers) {
  expect_pieces("add_pieces", pieces, sum.grid);
  expect_counters("add_pieces", counters);
  expect_row_numbers(sum, row_numbers);
  const bool in_fp64 = pieces.front().format.code == Code::kFp64;
  const Arena::Scope scope(context.workspace);
  const Tensor scratch =
      take_rows(context, in_fp64 ? ElementType::kFp64 : ElementType::kFp32, 2 * sum.width());
  if (context.workspace.is_measuring()) return;
  const std::int32_t* const numbers = row_numbers ? row_numbers.as<std::int32_t>() : nullptr;
  add_counts(in_fp64 ? add_rows(pieces, sum, key, numbers, scratch.as<double>())
                     : add_rows(pieces, sum, key, numbers, scratch.as<float>()),
             counters);
}

void CpuBackend::add_pieces_naively(const Context& context, std::span<const QuantTensor> pieces,
                                    const QuantTensor& sum, float scale) {
  expect_naive_pieces(pieces, sum);
  const std::int64_t width = sum.width();
  const Arena::Scope scope(context.workspace);
  const Tensor scratch = take_rows(context, ElementType::kFp32, 2 * width);
  if (context.workspace.is_measuring()) return;
  const RowBytes bytes = row_bytes(sum.format, sum.grid);
  const float reciprocal = scale > 0 ? 1.0f / scale : 0.0f;
  const auto rounded = [](float y) { return decode<Code::kE4m3>(encode<Code::kE4m3>(y)); };
#pragma omp parallel for schedule(static) if (sum.grid.count() > kSerialElements)
  for (std::int64_t row = 0; row < sum.rows(); ++row) {
    float* const total = scratch.as<float>() + 2 * omp_get_thread_num() * width;
    float* const piece = total + width;
    std::fill(total, total + width, 0.0f);
    for (const QuantTensor& of_rank : pieces) {
      decode_row(of_rank, row, piece);
      for (std::int64_t i = 0; i < width; ++i) {
        total[i] = rounded(total[i] + rounded(piece[i] * reciprocal));
      }
    }
    auto* const codes = reinterpret_cast<std::uint8_t*>(sum.codes + row * bytes.codes);
    for (std::int64_t i = 0; i < width; ++i) {
      codes[i] = static_cast<std::uint8_t>(encode<Code::kE4m3>(total[i]));
    }
    auto* const scales = reinterpret_cast<float*>(sum.scales + row * bytes.scales);
    std::fill(scales, scales + bytes.scales / static_cast<std::int64_t>(sizeof(float)), scale);
  }
}

}  // namespace agoq::cpu::AGOQ_CPU_ISA

// Encodes and decodes single rows of a QuantTensor: the two functions behind quantize, dequantize,
// accumulate, the optimizer's moments and the embedding's gradient.
//
//   scale = absmax / maximum     per block, rounded to the format's scale type
//   code  = encode(x * (1 / scale))     decoded x = decode(code) * scale      (quant/codec.h)
//
// Layout: quant/quant_tensor.h. A row is encoded segment by segment, a segment block by block; the
// unused half of a segment's last code byte and the unused bits of its last bit-plane byte are zero.
//
// Invariants. The bytes of a row are a function of the format, the row's input and, under stochastic
// rounding, of key and element index (first_row + row) * row_length + column: not of threads or
// instruction set.
// A block whose scale is zero decodes to +0 whatever its codes, so zeroed memory is a zero tensor in
// every format. Neither function allocates; both may run on different rows at the same time.
//
// Non-finite input. In a quantised format absmax is taken over finite elements, NaN is stored as
// zero and Inf as the largest value of its sign; an exact format stores both as they are. Either way
// they are counted. A finite element that an exact FP16, BF16 or FP32 overflows to Inf, and a
// negative element of dynamic8-unsigned (stored as zero), count as saturated.
#pragma once

#include <cstdint>
#include <span>

#include "core/random.h"
#include "core/small_float.h"
#include "quant/quant_counters.h"
#include "quant/quant_tensor.h"

#ifndef AGOQ_CPU_ISA
#define AGOQ_CPU_ISA baseline
#endif

namespace agoq::cpu::AGOQ_CPU_ISA {

/// out[0, row_length) = row `row` of `source`. To double: an fp64 source as it is, others widened.
void decode_row(const QuantTensor& source, std::int64_t row, float* out);
void decode_row(const QuantTensor& source, std::int64_t row, double* out);

/// sum[0, row_length) = row `row` of the sum of `pieces`, in their order: in FP32, or FP64 for double.
/// addend: scratch for a row.
void sum_row(std::span<const QuantTensor> pieces, std::int64_t row, float* sum, float* addend);
void sum_row(std::span<const QuantTensor> pieces, std::int64_t row, double* sum, double* addend);

/// Row `row` of `destination` = in[0, row_length), counting into `counts`. From double: an fp64
/// destination as it is; for every other one the input is rounded to FP32 first.
void encode_row(const QuantTensor& destination, std::int64_t row, const float* in, const RandomKey& key,
                QuantCounts& counts);
void encode_row(const QuantTensor& destination, std::int64_t row, const double* in, const RandomKey& key,
                QuantCounts& counts);
void encode_row(const QuantTensor& destination, std::int64_t row, const Bf16* in, const RandomKey& key,
                QuantCounts& counts);

}  // namespace agoq::cpu::AGOQ_CPU_ISA

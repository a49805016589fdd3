// Cosines and sines for rotary position embedding (Su et al., RoFormer, 2021).
//
// table[p][i] = (cos, sin) of p * f_i, f_i = theta^(-2i / head_size), for i < head_size / 2;
// scaling changes f_i: kLinear divides by factor; kLlama3 divides frequencies whose wavelength is above
// original / low by factor, keeps those below original / high, and blends between (Llama 3.1).
#pragma once

#include <cstdint>
#include <vector>

#include "model/model_config.h"

namespace agoq {

/// The inverse wavelengths f_i, head_size / 2 of them.
std::vector<double> rope_frequencies(const RopeConfig& config, int head_size);

/// The table [positions, head_size / 2, 2] in the compute type of `dtype`, in `arena`.
Tensor make_rope_table(const Context& context, Arena& arena, const RopeConfig& config, int head_size,
                       std::int64_t positions, ElementType dtype);

}  // namespace agoq

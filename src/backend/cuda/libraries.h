// Handles of cuBLASLt and cuDNN and what is kept per shape. Made at first use: plans run on machines
// without a GPU, where cublasLtCreate fails. Host code only.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>

#include "backend/cuda/cudnn_attention.h"
#include "backend/gpu_requirements.h"
#include "core/element_type.h"
#include "quant/format.h"

namespace agoq::cuda {

/// What decides which algorithm a product gets. Matrices as cuBLASLt sees them, by columns.
struct ProductKey {
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t a_stride = 0, b_stride = 0, c_stride = 0;  // elements between columns
  bool transpose_a = false, transpose_b = false, accumulate = false;
  cudaDataType_t operand_type = CUDA_R_32F, result_type = CUDA_R_32F;
  std::uint32_t a_alignment = 0, b_alignment = 0, c_alignment = 0;  // bytes

  auto operator<=>(const ProductKey&) const = default;
};

/// A product ready to run. The descriptors are plain memory (the Init functions), so that a lookup
/// allocates nothing.
struct Product {
  cublasLtMatmulDescOpaque_t operation{};
  cublasLtMatrixLayoutOpaque_t a{}, b{}, c{};
  cublasLtMatmulAlgo_t algorithm{};
};

/// What decides into how many slabs a weight's gradient is cut.
struct WeightGradientKey {
  std::int64_t rows = 0, columns = 0, tokens = 0;
  ElementType operand_type = ElementType::kFp32;
  Code code = Code::kE4m3;
  std::int64_t block = 0;
  std::int64_t segments = 1;

  auto operator<=>(const WeightGradientKey&) const = default;
};

struct Libraries {
  Libraries();
  ~Libraries();
  Libraries(const Libraries&) = delete;
  Libraries& operator=(const Libraries&) = delete;

  /// Of the library that the loader found.
  static LibraryVersion cublas_version();
  /// cuBLASLt's handle; throws Error when there is no usable GPU.
  cublasLtHandle_t cublas();

  /// Set: the heuristic's first candidate that runs, untimed, and plain attention, so that every run
  /// computes the same bits.
  bool deterministic = false;
  /// Calls into which backward attention is cut, at most: Backend::set_attention_groups.
  int attention_groups = 1;
  std::map<ProductKey, Product> products;
  std::map<WeightGradientKey, std::int64_t> slab_rows;
  /// Between what is timed, of which there are up to eight at a time; made with the handle.
  std::array<cudaEvent_t, 9> events{};
  CudnnAttention attention;

 private:
  cublasLtHandle_t cublas_ = nullptr;
};

}  // namespace agoq::cuda

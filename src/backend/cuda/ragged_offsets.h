// What cuDNN wants to know of documents of unequal length, in device memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace agoq::cuda {

/// For each of `batch` documents its length (0 from `count` on); for each of batch + 1 its first element
/// in tensors with qkv_width (of q alone where it has a tensor of its own), out_width, kv_width and
/// heads elements per token.
struct RaggedOffsets {
  std::int32_t* lengths;
  std::int64_t *qkv, *out, *kv, *statistics;
};

void make_ragged_offsets(const std::int32_t* starts, std::int64_t count, std::int64_t batch,
                         std::int64_t qkv_width, std::int64_t out_width, std::int64_t kv_width,
                         std::int64_t heads, const RaggedOffsets& offsets, cudaStream_t stream);

}  // namespace agoq::cuda

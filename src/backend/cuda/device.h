// The GPU at hand and the checks of calls to it. Host code only.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/stream.h"

namespace agoq::cuda {

/// The GPU that this process uses: the calling thread's current device.
struct Device {
  std::string name;  // "NVIDIA H200"
  int multiprocessors = 0;
  int capability = 0;      // 10 * major + minor
  std::size_t memory = 0;  // bytes
};

/// Throws Error (kInput), saying what is missing, when there is no GPU, no driver, or one too old.
const Device& device();

/// Throws Error naming the operation when `status` is not success.
inline void expect_success(cudaError_t status, std::string_view operation) {
  check(status == cudaSuccess, "{}: CUDA reports '{}' ({}); the last saved state is intact", operation,
        cudaGetErrorString(status), cudaGetErrorName(status));
}

/// To be called after each launch: an error in the launch itself is known at once.
inline void expect_launched(std::string_view operation) {
  expect_success(cudaGetLastError(), operation);
}

inline cudaStream_t stream_of(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace agoq::cuda

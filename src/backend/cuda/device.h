// The GPU at hand and the checks of calls to it. Host code only.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "backend/gpu_requirements.h"
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

/// Throws Error (kDevice) naming the operation when `status` is not success.
inline void expect_success(cudaError_t status, std::string_view operation) {
  if (status == cudaSuccess) return;
  const std::string reported =
      fmt::format("{} ({})", cudaGetErrorString(status), cudaGetErrorName(status));
  throw Error(ErrorKind::kDevice,
              device_failure(operation, "CUDA", reported, waits_for_each_operation()));
}

/// To be called after each launch. An error in the launch itself is known at once; one that a kernel
/// meets shows in a later operation, unless CUDA_LAUNCH_BLOCKING is set: then each is waited for.
inline void expect_launched(std::string_view operation) {
  expect_success(cudaGetLastError(), operation);
  if (waits_for_each_operation()) expect_success(cudaDeviceSynchronize(), operation);
}

inline cudaStream_t stream_of(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

}  // namespace agoq::cuda

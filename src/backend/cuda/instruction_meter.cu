// The clock of the multiprocessors (backend/instruction_meter.h): a block on each stores its cycle
// counter and the nanoseconds of the GPU's timer, before and after.
#include "backend/instruction_meter.h"

#include <cuda_profiler_api.h>

#include <vector>

#include "backend/cuda/device.h"
#include "core/median.h"

namespace agoq::cuda {
namespace {

constexpr unsigned kMostMultiprocessors = 256;

struct Sample {
  unsigned long long cycles, nanoseconds;
};
struct Samples {
  Sample of[2][kMostMultiprocessors];
};
__device__ Samples samples;

__global__ void sample_kernel(int which) {
  unsigned multiprocessor;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
  if (multiprocessor >= kMostMultiprocessors) return;
  Sample sample;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(sample.cycles));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(sample.nanoseconds));
  samples.of[which][multiprocessor] = sample;
}

class Meter : public InstructionMeter {
 public:
  int multiprocessors() const override { return device().multiprocessors; }
  int capability() const override { return device().capability; }

  void start(const Stream& stream) override {
    void* place = nullptr;
    expect_success(cudaGetSymbolAddress(&place, samples), "measuring the clock");
    expect_success(cudaMemsetAsync(place, 0, sizeof(Samples), stream_of(stream)), "measuring the clock");
    sample(0, stream);
  }

  double stop(const Stream& stream) override {
    sample(1, stream);
    static Samples taken;
    expect_success(cudaMemcpyFromSymbolAsync(&taken, samples, sizeof(Samples), 0, cudaMemcpyDeviceToHost,
                                             stream_of(stream)),
                   "measuring the clock");
    expect_success(cudaStreamSynchronize(stream_of(stream)), "measuring the clock");
    std::vector<double> clocks;
    for (unsigned i = 0; i < kMostMultiprocessors; ++i) {
      const Sample &first = taken.of[0][i], &last = taken.of[1][i];
      if (first.nanoseconds == 0 || last.nanoseconds <= first.nanoseconds) continue;
      clocks.push_back(1e9 * static_cast<double>(last.cycles - first.cycles) /
                       static_cast<double>(last.nanoseconds - first.nanoseconds));
    }
    check(!clocks.empty(), "measuring the clock: no multiprocessor was sampled twice");
    return median(clocks);
  }

  void begin_profile() override { expect_success(cudaProfilerStart(), "profiling"); }
  void end_profile() override {
    expect_success(cudaDeviceSynchronize(), "profiling");
    expect_success(cudaProfilerStop(), "profiling");
  }

 private:
  /// Two blocks for each multiprocessor, of which some get one only; most get one.
  static void sample(int which, const Stream& stream) {
    sample_kernel<<<2 * static_cast<unsigned>(device().multiprocessors), 1, 0, stream_of(stream)>>>(
        which);
    expect_launched("measuring the clock");
  }
};

}  // namespace
}  // namespace agoq::cuda

/// What backend/cuda_backend.cpp looks up in the module.
extern "C" agoq::InstructionMeter* agoq_cuda_instruction_meter() {
  static agoq::cuda::Meter meter;
  return &meter;
}

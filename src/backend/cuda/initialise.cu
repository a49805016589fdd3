// Initial weights: normal numbers, and weights with their masters from FP32 values. A thread makes one
// element after another.
//
// fill_normal computes as the CPU does, in double precision; the device's log and cos may differ from
// the host's in the last bit of a double, so that an FP32 value differs by one unit in the last place in
// about one of 10^8 elements.
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/launch.cuh"
#include "backend/initial_weight_checks.h"
#include "core/master_weight.h"
#include "core/random.h"

namespace agoq::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;

__device__ double open_uniform(std::uint32_t bits) {
  return (static_cast<double>(bits) + 0.5) * 0x1p-32;
}

// The device's counterpart of random_normal (core/random.cpp).
__global__ void __launch_bounds__(kThreads)
    fill_normal_kernel(RandomWords key, double deviation, float* x, std::int64_t count) {
  await_predecessors();
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const RandomWords words = random_words(key, static_cast<std::uint64_t>(i) / 2);
    const bool odd = i % 2 != 0;
    const double radius = sqrt(-2.0 * log(open_uniform(odd ? words.word[2] : words.word[0])));
    const double angle =
        2.0 * 3.14159265358979323846 * open_uniform(odd ? words.word[3] : words.word[1]);
    x[i] = static_cast<float>(deviation * (radius * cos(angle)));
  }
}

template <typename Storage>
__global__ void __launch_bounds__(kThreads)
    initialise_weight_kernel(const float* initial, Storage* weight, float* exact,
                             std::int16_t* remainder, std::int64_t count) {
  await_predecessors();
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    if constexpr (std::is_same_v<Storage, Bf16>) {
      const SplitMaster split = split_master(initial[i]);
      weight[i] = split.weight;
      if (exact != nullptr) exact[i] = initial[i];
      if (remainder != nullptr) remainder[i] = split.remainder;
    } else {
      weight[i] = initial[i];
    }
  }
}

unsigned blocks_for(std::int64_t count) {
  return grid_blocks((count + kThreads - 1) / kThreads, kBlocksPerMultiprocessor);
}

}  // namespace

void CudaBackend::fill_normal(const Context& context, const RandomKey& key, double deviation,
                              const Tensor& x) {
  expect("fill_normal", "x", x, ElementType::kFp32, x.count());
  if (context.workspace.is_measuring() || x.count() == 0) return;
  Launch{blocks_for(x.count()), kThreads, 0, stream_of(context.stream)}(
      fill_normal_kernel, mixed_key(key), deviation, x.as<float>(), x.count());
  expect_launched("fill_normal");
}

void CudaBackend::initialise_weight(const Context& context, const Tensor& initial, MasterKind kind,
                                    const Tensor& weight, const Tensor& master) {
  check_initial_weight(initial, kind, weight, master);
  if (context.workspace.is_measuring() || weight.count() == 0) return;
  float* const exact = master && kind == MasterKind::kFp32 ? master.as<float>() : nullptr;
  std::int16_t* const remainder =
      master && kind == MasterKind::kRemainder ? master.as<std::int16_t>() : nullptr;
  for_storage("initialise_weight", weight.type, [&]<typename Storage>() {
    Launch{blocks_for(weight.count()), kThreads, 0, stream_of(context.stream)}(
        initialise_weight_kernel<Storage>, initial.as<float>(), weight.as<Storage>(), exact, remainder,
        weight.count());
  });
  expect_launched("initialise_weight");
}

}  // namespace agoq::cuda

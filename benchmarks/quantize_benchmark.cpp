// Quantise and dequantise, in bytes of FP32 per second, for each code at its usual format.
//   build/benchmarks/quantize_benchmark --benchmark_counters_tabular=true
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/format_error.h"

namespace agoq {
namespace {

constexpr std::int64_t kRows = 256;
constexpr std::int64_t kWidth = 4096;

/// Tensors of one format, normal samples in `values`.
struct Operands {
  explicit Operands(const QuantFormat& format)
      : arena("benchmark", backend.allocator(),
              kRows * kWidth * sizeof(float) + storage_bytes(format, {kRows, kWidth, 1}) +
                  2 * kArenaAlignment),
        workspace("benchmark workspace", backend.allocator(), std::size_t{1} << 20) {
    values = arena.take(ElementType::kFp32, Shape{kRows, kWidth});
    quantised = take(arena, format, {kRows, kWidth, 1});
    const std::vector<float> samples = draw_samples(TestDistribution::kNormal, values.count());
    backend.upload(context, samples.data(), values.data, values.bytes());
    backend.quantize(context, values, quantised, {}, {});
  }
  Backend& backend = cpu_backend();
  Arena arena;
  Arena workspace;
  Context context{backend, {}, workspace, {}};
  Tensor values;
  QuantTensor quantised;
};

void report(benchmark::State& state, const Operands& operands) {
  state.SetBytesProcessed(static_cast<std::int64_t>(state.iterations()) *
                          static_cast<std::int64_t>(operands.values.bytes()));
  state.SetItemsProcessed(static_cast<std::int64_t>(state.iterations()) * operands.values.count());
}

void quantize(benchmark::State& state, const QuantFormat& format) {
  Operands operands(format);
  for (auto _ : state) {
    operands.backend.quantize(operands.context, operands.values, operands.quantised, {}, {});
    benchmark::ClobberMemory();
  }
  report(state, operands);
}

void dequantize(benchmark::State& state, const QuantFormat& format) {
  Operands operands(format);
  for (auto _ : state) {
    operands.backend.dequantize(operands.context, operands.quantised, operands.values);
    benchmark::ClobberMemory();
  }
  report(state, operands);
}

void register_all() {
  for (const char* text :
       {"nf4/32/two-level", "nf4/128/fp32", "e2m1/32/bf16", "bnbfp4/128/fp32", "int4/128/bf16",
        "int4-full-range/128/bf16", "int5/32/two-level", "int6/32/two-level", "int8/32/bf16",
        "e4m3/128/fp32", "e5m2/128/fp32", "dynamic8/256/fp32", "dynamic8-unsigned/256/fp32",
        "nf4/32/two-level/stochastic", "e4m3/128/fp32/stochastic", "bf16", "fp32"}) {
    const QuantFormat format = parse_format(text);
    benchmark::RegisterBenchmark((std::string("quantize/") + text).c_str(), quantize, format)
        ->UseRealTime();
    benchmark::RegisterBenchmark((std::string("dequantize/") + text).c_str(), dequantize, format)
        ->UseRealTime();
  }
}

}  // namespace
}  // namespace agoq

int main(int argc, char** argv) {
  agoq::register_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}

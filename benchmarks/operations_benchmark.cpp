// Throughput of the CPU backend's model operations at the quickstart's training shape: micro-batch 2 of
// 256 tokens, hidden 256, feed-forward 704, 4 heads and 2 kv heads of 64, BF16 tensors.
//
// FLOP/s are per second of CPU time of the whole process, that is per core in use, so that other load on
// the machine does not count. Attention counts 2 products of head_size multiply-adds forward and 5
// backward for each pair at or below the diagonal.
#include <benchmark/benchmark.h>

#include "backend/backend.h"
#include "core/random.h"

namespace agoq {
namespace {

constexpr std::int64_t kSequences = 2, kSequence = 256, kTokens = kSequences * kSequence;
constexpr std::int64_t kHidden = 256, kFeedForward = 704;
constexpr AttentionShape kShape{4, 2, 64};
constexpr auto kBf16 = ElementType::kBf16, kFp32 = ElementType::kFp32;

class Bench {
 public:
  Tensor random(ElementType type, Shape shape) {
    const Arena::Scope scope(workspace_);
    const Tensor values = workspace_.take(kFp32, shape);
    const RandomKey key = RandomKey{.seed = 1}.with(RandomPurpose::kTest, ++drawn_);
    for (std::int64_t i = 0; i < values.count(); ++i) {
      values.as<float>()[i] = static_cast<float>(random_normal(key, static_cast<std::uint64_t>(i)));
    }
    const Tensor tensor = memory_.take(type, shape);
    context.backend.copy(context, values, tensor);
    return tensor;
  }
  Documents documents() {
    const Tensor starts = memory_.take(ElementType::kInt32, Shape{kSequences + 1});
    for (std::int64_t i = 0; i <= kSequences; ++i) {
      starts.as<std::int32_t>()[i] = static_cast<std::int32_t>(i * kSequence);
    }
    return {starts, kSequences, kSequence};
  }

 private:
  Arena memory_{"benchmark tensors", host_allocator(), std::size_t{64} << 20};
  Arena workspace_{"benchmark workspace", host_allocator(), std::size_t{64} << 20};
  std::uint32_t drawn_ = 0;

 public:
  Context context{cpu_backend(), {}, workspace_, {}};
};

void count_flops(benchmark::State& state, double flops) {
  state.counters["FLOP/s"] = benchmark::Counter(flops, benchmark::Counter::kIsIterationInvariantRate);
}

// m x n x k, transpositions and accumulation as the layers of a model use them.
enum class Product { kForward, kDataGradient, kWeightGradient };

template <Product kProduct>
void matmul(benchmark::State& state) {
  const std::int64_t tokens = state.range(0), in = state.range(1), out = state.range(2);
  Bench bench;
  const Tensor x = bench.random(kBf16, Shape{tokens, in}), w = bench.random(kBf16, Shape{out, in});
  const Tensor y = bench.random(kBf16, Shape{tokens, out}), dw = bench.random(kFp32, Shape{out, in});
  Backend& backend = bench.context.backend;
  for (auto _ : state) {
    switch (kProduct) {
      case Product::kForward:
        backend.matmul(bench.context, x, Transpose::kNo, w, Transpose::kYes, y);
        break;
      case Product::kDataGradient:
        backend.matmul(bench.context, y, Transpose::kNo, w, Transpose::kNo, x);
        break;
      case Product::kWeightGradient:
        backend.matmul(bench.context, y, Transpose::kYes, x, Transpose::kNo, dw);
        break;
    }
  }
  count_flops(state, 2.0 * static_cast<double>(tokens * in * out));
}

void shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"M", "K", "N"});
  benchmark->Args({kTokens, kHidden, 2 * kFeedForward});
  benchmark->Args({kTokens, kFeedForward, kHidden});
  benchmark->Args({kTokens, kHidden, kShape.qkv_width()});
  benchmark->Args({kTokens, kHidden, kShape.output_width()});
  benchmark->MeasureProcessCPUTime();
}
BENCHMARK(matmul<Product::kForward>)->Name("matmul/forward")->Apply(shapes);
BENCHMARK(matmul<Product::kDataGradient>)->Name("matmul/data_gradient")->Apply(shapes);
BENCHMARK(matmul<Product::kWeightGradient>)->Name("matmul/weight_gradient")->Apply(shapes);

void attention(benchmark::State& state, bool backward) {
  Bench bench;
  const Documents documents = bench.documents();
  const Tensor qkv = bench.random(kBf16, Shape{kTokens, kShape.qkv_width()});
  const Tensor dqkv = bench.random(kBf16, qkv.shape);
  const Tensor out = bench.random(kBf16, Shape{kTokens, kShape.output_width()});
  const Tensor dout = bench.random(kBf16, out.shape);
  const Tensor lse = bench.random(kFp32, Shape{kTokens, kShape.heads});
  Backend& backend = bench.context.backend;
  backend.attention_forward(bench.context, kShape, qkv, documents, out, lse);
  for (auto _ : state) {
    if (backward) {
      backend.attention_backward(bench.context, kShape, dout, qkv, out, lse, documents, dqkv);
    } else {
      backend.attention_forward(bench.context, kShape, qkv, documents, out, lse);
    }
  }
  const double pairs = static_cast<double>(kSequences * kSequence * (kSequence + 1) / 2 * kShape.heads);
  count_flops(state, pairs * (backward ? 5 : 2) * 2 * kShape.head_size);
}
BENCHMARK_CAPTURE(attention, forward, false)->MeasureProcessCPUTime();
BENCHMARK_CAPTURE(attention, backward, true)->MeasureProcessCPUTime();

void count_elements(benchmark::State& state, std::int64_t elements) {
  state.counters["elements/s"] =
      benchmark::Counter(static_cast<double>(elements), benchmark::Counter::kIsIterationInvariantRate);
}

void norm(benchmark::State& state, bool backward) {
  Bench bench;
  const Tensor x = bench.random(kBf16, Shape{kTokens, kHidden}), dy = bench.random(kBf16, x.shape);
  const Tensor weight = bench.random(kBf16, Shape{kHidden}),
               dweight = bench.random(kFp32, Shape{kHidden});
  const Tensor y = bench.random(kBf16, x.shape), dx = bench.random(kBf16, x.shape);
  for (auto _ : state) {
    if (backward) {
      bench.context.backend.norm_backward(bench.context, NormKind::kRmsNorm, dy, x, weight, 1e-5, {}, dx,
                                          dweight);
    } else {
      bench.context.backend.norm_forward(bench.context, NormKind::kRmsNorm, x, weight, 1e-5, y, {});
    }
  }
  count_elements(state, x.count());
}
BENCHMARK_CAPTURE(norm, forward, false)->MeasureProcessCPUTime();
BENCHMARK_CAPTURE(norm, backward, true)->MeasureProcessCPUTime();

void swiglu(benchmark::State& state, bool backward) {
  Bench bench;
  const Tensor gate_up = bench.random(kBf16, Shape{kTokens, 2 * kFeedForward});
  const Tensor dgate_up = bench.random(kBf16, gate_up.shape);
  const Tensor hidden = bench.random(kBf16, Shape{kTokens, kFeedForward});
  const Tensor dhidden = bench.random(kBf16, hidden.shape);
  for (auto _ : state) {
    if (backward) {
      bench.context.backend.swiglu_backward(bench.context, dhidden, gate_up, dgate_up, hidden);
    } else {
      bench.context.backend.swiglu_forward(bench.context, gate_up, hidden);
    }
  }
  count_elements(state, hidden.count());
}
BENCHMARK_CAPTURE(swiglu, forward, false)->MeasureProcessCPUTime();
BENCHMARK_CAPTURE(swiglu, backward_and_recompute, true)->MeasureProcessCPUTime();

void cross_entropy(benchmark::State& state) {
  Bench bench;
  const std::int64_t chunk = 256, vocabulary = 257;
  const Tensor logits = bench.random(kFp32, Shape{chunk, vocabulary});
  const Tensor targets = bench.random(ElementType::kFp32, Shape{chunk});
  const Tensor ids{targets.data, ElementType::kInt32, targets.shape};
  for (std::int64_t i = 0; i < chunk; ++i) ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(i);
  const Tensor weights = bench.random(kFp32, Shape{chunk}), loss = bench.random(kFp32, Shape{chunk});
  for (auto _ : state) {
    bench.context.backend.cross_entropy(bench.context, logits, ids, weights, loss, logits);
  }
  count_elements(state, logits.count());
}
BENCHMARK(cross_entropy)->MeasureProcessCPUTime();

void rope(benchmark::State& state) {
  Bench bench;
  const Tensor qkv = bench.random(kBf16, Shape{kTokens, kShape.qkv_width()});
  const Tensor table = bench.random(kFp32, Shape{kSequence, kShape.head_size / 2, 2});
  const Tensor positions = bench.random(kFp32, Shape{kTokens});
  const Tensor ids{positions.data, ElementType::kInt32, positions.shape};
  for (std::int64_t i = 0; i < kTokens; ++i) {
    ids.as<std::int32_t>()[i] = static_cast<std::int32_t>(i % kSequence);
  }
  bool inverse = false;
  for (auto _ : state) {
    bench.context.backend.rope(bench.context, kShape, qkv, ids, table, inverse);
    inverse = !inverse;
  }
  count_elements(state, qkv.count());
}
BENCHMARK(rope)->MeasureProcessCPUTime();

}  // namespace
}  // namespace agoq

BENCHMARK_MAIN();

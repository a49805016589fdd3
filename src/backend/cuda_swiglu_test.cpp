// The gated activation on CUDA against the CPU: plain, with the codec, from packed gate and up.
//
// Tolerances: FP32 1e-5 in L2 (the hardware's exp and reciprocal are within 1e-6). BF16: 4e-3 in L2, and
// at most kUlpShare of the elements more than one unit in the last place apart. From packed input the
// CPU rounds what it decodes to BF16 once more, gate and up each: then 8e-3.
#include "backend/cuda_testing.h"

namespace agoq {
namespace {

using namespace testing_cuda;

constexpr auto kFp32 = ElementType::kFp32, kBf16 = ElementType::kBf16;
constexpr double kFp32Tolerance = 1e-5, kBf16Tolerance = 4e-3, kUlpShare = 1e-3;

const char* const kFormats[] = {"nf4/32/two-level",
                                "e4m3/128/fp32",
                                "int8/32/bf16",
                                "e2m1/128/fp32",
                                "bnbfp4/128/fp32",
                                "int5/64/bf16",
                                "nf4/16/two-level",
                                "nf4/32/two-level/stochastic",
                                "bf16",
                                "fp32",
                                "fp16"};

struct Size {
  std::int64_t rows, width;  // of hidden
};
const Size kSizes[] = {{1, 14336},  {65, 14336}, {257, 1376}, {100, 1792},
                       {1000, 129}, {1, 1},      {33, 1025}};

void expect_close(Pair& pair, const Twin& twin, const char* name) {
  SCOPED_TRACE(name);
  if (twin.cpu.type == kFp32) {
    EXPECT_LE(pair.error(twin), kFp32Tolerance);
    return;
  }
  EXPECT_LE(pair.error(twin), kBf16Tolerance);
  const Values a = pair.values(twin.cuda), b = testing_operations::Bench::get(twin.cpu);
  std::int64_t beyond = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double larger = std::max(std::abs(a[i]), std::abs(b[i]));
    // Where 1 + g (1 - s) is near zero dg is a difference of larger terms, of size 1: its rounding
    // counts.
    const double ulp = larger == 0 ? 0 : std::max(std::ldexp(1.0, std::ilogb(larger) - 7), 1e-6);
    if (!(std::abs(a[i] - b[i]) <= ulp)) ++beyond;
  }
  EXPECT_LE(static_cast<double>(beyond), kUlpShare * static_cast<double>(a.size()));
}

TEST(CudaSwiglu, ForwardAndBackwardEqualTheCpu) {
  AGOQ_NEEDS_GPU();
  for (const ElementType type : {kFp32, kBf16}) {
    for (const Size& size : kSizes) {
      for (const bool in_place : {false, true}) {
        for (const bool with_hidden : {false, true}) {
          SCOPED_TRACE(fmt::format("{} [{}, {}] in place {} hidden {}", name_of(type), size.rows,
                                   size.width, in_place, with_hidden));
          Pair pair;
          const Shape narrow{size.rows, size.width}, wide{size.rows, 2 * size.width};
          const Twin gate_up = pair.random(type, wide, 3.0), hidden = pair.empty(type, narrow),
                     dhidden = pair.random(type, narrow),
                     again = with_hidden ? pair.empty(type, narrow) : Twin{};
          cpu_backend().swiglu_forward(pair.cpu, gate_up.cpu, hidden.cpu);
          cuda_backend().swiglu_forward(pair.cuda, gate_up.cuda, hidden.cuda);
          expect_close(pair, hidden, "hidden");
          const Twin dgate_up = in_place ? gate_up : pair.empty(type, wide);
          cpu_backend().swiglu_backward(pair.cpu, dhidden.cpu, gate_up.cpu, dgate_up.cpu, again.cpu);
          cuda_backend().swiglu_backward(pair.cuda, dhidden.cuda, gate_up.cuda, dgate_up.cuda,
                                         again.cuda);
          expect_close(pair, dgate_up, "dgate_up");
          if (with_hidden) {
            EXPECT_EQ(pair.values(again.cuda), pair.values(hidden.cuda));
          }
        }
      }
    }
  }
}

TEST(CudaSwiglu, OfLargeGatesIsTheLimit) {
  AGOQ_NEEDS_GPU();
  Pair pair;
  const Values gates{-1000, -200, -100, -88, -50, 50, 88, 100, 1000, 0};
  Values values = gates;
  values.resize(20, 2.0);
  const Twin gate_up = pair.of(kFp32, Shape{1, 20}, values), hidden = pair.empty(kFp32, Shape{1, 10}),
             dhidden = pair.of(kFp32, Shape{1, 10}, Values(10, 1.0)),
             dgate_up = pair.empty(kFp32, Shape{1, 20});
  cuda_backend().swiglu_forward(pair.cuda, gate_up.cuda, hidden.cuda);
  cuda_backend().swiglu_backward(pair.cuda, dhidden.cuda, gate_up.cuda, dgate_up.cuda, {});
  const Values h = pair.values(hidden.cuda), d = pair.values(dgate_up.cuda);
  for (std::size_t i = 0; i < gates.size(); ++i) {
    EXPECT_NEAR(h[i], gates[i] > 0 ? 2 * gates[i] : 0, 1e-4) << gates[i];
    EXPECT_NEAR(d[i], gates[i] == 0 ? 1 : gates[i] > 0 ? 2 : 0, 1e-5) << gates[i];
    EXPECT_NEAR(d[10 + i], std::max(gates[i], 0.0), 1e-4) << gates[i];
  }
}

TEST(CudaSwiglu, ForwardQuantisesToTheBytesOfTheCpu) {
  AGOQ_NEEDS_GPU();
  for (const char* text : kFormats) {
    for (const ElementType type : {kFp32, kBf16}) {
      // Two segments, many, and an odd number, whose groups lie across gate and up: the composition.
      for (const auto& [size, segments] : {std::pair{Size{1, 14336}, 2},
                                           {Size{33, 14336}, 32},
                                           {Size{129, 1376}, 2},
                                           {Size{100, 1792}, 2},
                                           {Size{65, 129}, 2},
                                           {Size{33, 1792}, 1},
                                           {Size{33, 1728}, 3}}) {
        SCOPED_TRACE(fmt::format("{} {} [{}, {}] segments {}", name_of(type), text, size.rows,
                                 size.width, segments));
        Pair pair;
        const Shape narrow{size.rows, size.width}, wide{size.rows, 2 * size.width};
        const Twin gate_up = pair.random(type, wide, 3.0), hidden = pair.empty(type, narrow),
                   counters = pair.counters();
        const QuantTwin saved =
            pair.quant(parse_format(text), BlockGrid{size.rows, 2 * size.width, segments});
        const RandomKey key = pair.key();
        cpu_backend().swiglu_forward_save(pair.cpu, gate_up.cpu, hidden.cpu, saved.cpu, key,
                                          counters.cpu);
        cuda_backend().swiglu_forward_save(pair.cuda, gate_up.cuda, hidden.cuda, saved.cuda, key,
                                           counters.cuda);
        EXPECT_EQ(pair.differing_bytes(saved), 0);
        const auto* counted = counters.cpu.as<std::int64_t>();
        EXPECT_EQ(pair.values(counters.cuda), Values(counted, counted + kQuantCounters));
        expect_close(pair, hidden, "hidden");
      }
    }
  }
}

TEST(CudaSwiglu, BackwardFromPackedInputEqualsTheCpu) {
  AGOQ_NEEDS_GPU();
  for (const char* text : kFormats) {
    for (const ElementType type : {kFp32, kBf16}) {
      for (const auto& [size, segments] : {std::pair{Size{1, 14336}, 2},
                                           {Size{33, 14336}, 32},
                                           {Size{129, 1376}, 2},
                                           {Size{100, 1792}, 2},
                                           {Size{65, 129}, 2},
                                           {Size{33, 1792}, 1}}) {
        for (const bool with_hidden : {true, false}) {
          SCOPED_TRACE(fmt::format("{} {} [{}, {}] segments {} hidden {}", name_of(type), text,
                                   size.rows, size.width, segments, with_hidden));
          Pair pair;
          const Shape narrow{size.rows, size.width}, wide{size.rows, 2 * size.width};
          const QuantTwin saved =
              pair.random_quant(parse_format(text), BlockGrid{size.rows, 2 * size.width, segments}, 3.0);
          const Twin dhidden = pair.random(type, narrow), dgate_up = pair.empty(type, wide),
                     hidden = with_hidden ? pair.empty(type, narrow) : Twin{};
          cpu_backend().swiglu_backward_saved(pair.cpu, dhidden.cpu, saved.cpu, dgate_up.cpu,
                                              hidden.cpu);
          cuda_backend().swiglu_backward_saved(pair.cuda, dhidden.cuda, saved.cuda, dgate_up.cuda,
                                               hidden.cuda);
          const double tolerance = type == kFp32 ? kFp32Tolerance : 8e-3;
          EXPECT_LE(pair.error(dgate_up), tolerance);
          if (with_hidden) {
            EXPECT_LE(pair.error(hidden), tolerance);
          }
        }
      }
    }
  }
}

// 74,900 rows of 2 x 14,336 are 2^31 elements and more: the last rows equal a small tensor's.
TEST(CudaSwiglu, CountsBeyondTwoToTheThirtyOne) {
  AGOQ_NEEDS_GPU();
  const std::int64_t rows = 74904, width = 14336, last = 8;
  static_assert(2 * 74904LL * 14336LL > (1LL << 31));
  Arena memory("large tensors", cuda_backend().allocator(), std::size_t{8} << 30);
  Pair pair;
  const Tensor gate_up = memory.take(kBf16, Shape{rows, 2 * width}),
               hidden = memory.take(kBf16, Shape{rows, width});
  const QuantTensor saved = take(memory, parse_format("agoq"), BlockGrid{rows, 2 * width, 2});
  const Twin end = pair.random(kBf16, Shape{last, 2 * width}),
             expected = pair.empty(kBf16, Shape{last, width});
  cuda_backend().zero(pair.cuda, gate_up.data, gate_up.bytes());
  cuda_backend().copy(pair.cuda, end.cuda, gate_up.slice_rows(rows - last, rows));
  cuda_backend().swiglu_forward_save(pair.cuda, gate_up, hidden, saved, {}, {});
  cuda_backend().swiglu_forward(pair.cuda, end.cuda, expected.cuda);
  EXPECT_EQ(pair.values(hidden.slice_rows(rows - last, rows)), pair.values(expected.cuda));
  EXPECT_EQ(pair.values(hidden.slice_rows(rows / 2, rows / 2 + 1)),
            Values(static_cast<std::size_t>(width)));
  // And back: gate_up is overwritten by its gradient for a dhidden of the same values.
  const Twin backward = pair.empty(kBf16, Shape{last, 2 * width});
  cuda_backend().swiglu_backward_saved(pair.cuda, expected.cuda, saved.slice_rows(rows - last, rows),
                                       backward.cuda, {});
  cuda_backend().swiglu_backward_saved(pair.cuda, hidden, saved, gate_up, {});
  EXPECT_EQ(pair.values(gate_up.slice_rows(rows - last, rows)), pair.values(backward.cuda));
}

}  // namespace
}  // namespace agoq

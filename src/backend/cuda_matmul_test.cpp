// matmul and accumulate_weight_gradient on the GPU against the CPU.
#include <cstring>
#include <iterator>
#include <limits>
#include <string>

#include "backend/cuda_testing.h"

namespace agoq {
namespace {

using namespace testing_cuda;

constexpr auto kFp32 = ElementType::kFp32, kBf16 = ElementType::kBf16;

struct Types {
  ElementType operand, result;
  double tolerance;
};
// FP32: the order of the sums. BF16: both sides round the same sum to nearest, and seldom apart.
// Where a BF16 c is added to, some of cuBLASLt's Hopper kernels round the product to BF16, add c and
// round again; the CPU rounds once. One rounding is 0.0017 relative in L2 (measured against the exact
// result: CPU 0.0017, GPU up to 0.0024), two sides that round apart sqrt(2) of it for each rounding of
// the GPU's, so together they stay below the largest error of one rounding, 2^-8.
constexpr double kTwiceRounded = 0x1p-8;
constexpr Types kTypes[] = {{kBf16, kBf16, 1e-3}, {kBf16, kFp32, 1e-5}, {kFp32, kFp32, 1e-5}};

struct Extents {
  std::int64_t m, n, k;
};
constexpr Extents kExtents[] = {{1, 1, 1},       {1, 576, 129},   {7, 129, 1025},  {200, 576, 64},
                                {1025, 129, 33}, {128, 256, 512}, {257, 344, 100}, {33, 512, 1500}};

Twin matrix(Pair& pair, ElementType type, std::int64_t rows, std::int64_t columns, bool flipped) {
  return pair.random(type, flipped ? Shape{columns, rows} : Shape{rows, columns});
}

Transpose transpose_if(bool flipped) { return flipped ? Transpose::kYes : Transpose::kNo; }

TEST(CudaMatmul, AgreesWithTheCpu) {
  AGOQ_NEEDS_GPU();
  for (const Extents& e : kExtents) {
    for (const Types& types : kTypes) {
      for (int variant = 0; variant < 8; ++variant) {
        const bool flip_a = variant & 1, flip_b = variant & 2, accumulate = variant & 4;
        SCOPED_TRACE(std::to_string(e.m) + " x " + std::to_string(e.n) + " x " + std::to_string(e.k) +
                     " " + std::string(name_of(types.operand)) + " to " +
                     std::string(name_of(types.result)) + " variant " + std::to_string(variant));
        Pair pair(std::size_t{64} << 20);
        const Twin a = matrix(pair, types.operand, e.m, e.k, flip_a);
        const Twin b = matrix(pair, types.operand, e.k, e.n, flip_b);
        // Not accumulating, c holds NaN before: it must not be read.
        const Twin c = accumulate ? pair.random(types.result, Shape{e.m, e.n}, 10.0)
                                  : pair.empty(types.result, Shape{e.m, e.n});
        cpu_backend().matmul(pair.cpu, a.cpu, transpose_if(flip_a), b.cpu, transpose_if(flip_b), c.cpu,
                             accumulate);
        cuda_backend().matmul(pair.cuda, a.cuda, transpose_if(flip_a), b.cuda, transpose_if(flip_b),
                              c.cuda, accumulate);
        const bool twice = accumulate && types.result == kBf16;
        EXPECT_LE(pair.error(c), twice ? kTwiceRounded : types.tolerance);
        EXPECT_EQ(pair.cuda.workspace.used(), 0u);
      }
    }
  }
}

// The three products of a linear layer y = x w^T: y, dx = dy w and dw = dy^T x.
struct Layer {
  std::int64_t rows, out, in;
};
// Widths of LLaMA3-8B, LLaMA-7B, OLMo and SmolLM, whole and cut for eight ranks. Those of 14,336 by few
// others: 1.6e11 multiplications and additions in all are what the CPU has to do.
constexpr Layer kLayers[] = {{1, 14336, 576},   {1, 4096, 2048},   {1, 1792, 1376},   {1000, 2048, 1376},
                             {1000, 1792, 576}, {1025, 4096, 576}, {1025, 14336, 192}};

TEST(CudaMatmul, AgreesWithTheCpuAtTheWidthsOfModels) {
  AGOQ_NEEDS_GPU();
  for (const Layer& layer : kLayers) {
    for (const Types& types : kTypes) {
      SCOPED_TRACE(fmt::format("{} rows, {} to {}, {} to {}", layer.rows, layer.in, layer.out,
                               name_of(types.operand), name_of(types.result)));
      Pair pair(std::size_t{512} << 20);
      const Twin x = pair.drawn(types.operand, Shape{layer.rows, layer.in}),
                 w = pair.drawn(types.operand, Shape{layer.out, layer.in}),
                 dy = pair.drawn(types.operand, Shape{layer.rows, layer.out});
      const auto expect_same = [&](const char* name, const Twin& a, Transpose flip_a, const Twin& b,
                                   Transpose flip_b, Shape shape, std::int64_t terms) {
        const Twin c = pair.empty(types.result, shape);
        cpu_backend().matmul(pair.cpu, a.cpu, flip_a, b.cpu, flip_b, c.cpu, false);
        cuda_backend().matmul(pair.cuda, a.cuda, flip_a, b.cuda, flip_b, c.cuda, false);
        // The tensor cores cut what they add to the sum's last bit, towards zero, every 16 terms: with
        // 14,336 terms 1.1e-5 of a sum (emulated), with 4,096 a third of that.
        const double longer = terms > 4096 ? 5.0 : 1.0;
        EXPECT_LE(pair.error(c), types.result == kBf16 ? types.tolerance : longer * types.tolerance)
            << name;
      };
      const Transpose no = Transpose::kNo, yes = Transpose::kYes;
      expect_same("y", x, no, w, yes, Shape{layer.rows, layer.out}, layer.in);
      expect_same("dx", dy, no, w, no, Shape{layer.rows, layer.in}, layer.out);
      expect_same("dw", dy, yes, x, no, Shape{layer.out, layer.in}, layer.rows);
    }
  }
}

// 81,920 tokens of gate and up, 2 x 14,336 wide: more than 2^31 elements, as a result and as either
// operand. Rows where bytes and elements pass 2^31, the first and the last are the CPU's.
TEST(CudaMatmul, CountsBeyondTwoToTheThirtyOne) {
  AGOQ_NEEDS_GPU();
  constexpr std::int64_t kTokens = 81920, kWide = 28672, kNarrow = 64;
  static_assert(kTokens * kWide > (std::int64_t{1} << 31));
  constexpr std::int64_t kRows[] = {0, 37449, 74898, 74899, kTokens - 1};
  constexpr auto kSampled = static_cast<std::int64_t>(std::size(kRows));
  std::optional<Arena> memory;
  try {
    memory.emplace("a huge tensor", cuda_backend().allocator(),
                   static_cast<std::size_t>(kTokens * kWide) * sizeof(Bf16));
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  Pair pair;
  const Transpose no = Transpose::kNo, yes = Transpose::kYes;
  const Twin x = pair.drawn(kBf16, Shape{kTokens, kNarrow}),
             w = pair.drawn(kBf16, Shape{kWide, kNarrow});
  const Tensor y = memory->take(kBf16, Shape{kTokens, kWide});
  cuda_backend().matmul(pair.cuda, x.cuda, no, w.cuda, yes, y, false);

  const Twin y_rows = pair.empty(kBf16, Shape{kSampled, kWide});
  const Twin x_rows = pair.empty(kBf16, Shape{kSampled, kNarrow});
  for (std::int64_t i = 0; i < kSampled; ++i) {
    const std::int64_t row = kRows[i];
    const Tensor from = x.cpu.slice_rows(row, row + 1), got = y.slice_rows(row, row + 1);
    std::memcpy(x_rows.cpu.slice_rows(i, i + 1).data, from.data, from.bytes());
    cuda_backend().copy(pair.cuda, got, y_rows.cuda.slice_rows(i, i + 1));
  }
  cpu_backend().matmul(pair.cpu, x_rows.cpu, no, w.cpu, yes, y_rows.cpu, false);
  for (std::int64_t i = 0; i < kSampled; ++i) {
    EXPECT_LE(pair.error({y_rows.cpu.slice_rows(i, i + 1), y_rows.cuda.slice_rows(i, i + 1)}), 1e-3)
        << "y, row " << kRows[i];
  }

  // What the GPU made of y is the operand on both sides from here on.
  cuda_backend().read(pair.cuda, y_rows.cuda.data, y_rows.cpu.data, y_rows.cpu.bytes());
  const Twin dx = pair.empty(kFp32, x.cpu.shape), dx_rows = pair.empty(kFp32, x_rows.cpu.shape);
  cuda_backend().matmul(pair.cuda, y, no, w.cuda, no, dx.cuda, false);
  cpu_backend().matmul(pair.cpu, y_rows.cpu, no, w.cpu, no, dx_rows.cpu, false);
  for (std::int64_t i = 0; i < kSampled; ++i) {
    // 28,672 terms: what the tensor cores cut off is 2e-5 of a sum (emulated).
    EXPECT_LE(pair.error({dx_rows.cpu.slice_rows(i, i + 1), dx.cuda.slice_rows(kRows[i], kRows[i] + 1)}),
              1e-4)
        << "dx, row " << kRows[i];
  }

  // Of x only these rows are left, so that their y alone makes dw.
  cuda_backend().zero(pair.cuda, x.cuda.data, x.cuda.bytes());
  for (std::int64_t i = 0; i < kSampled; ++i) {
    const Tensor row = x_rows.cpu.slice_rows(i, i + 1);
    cuda_backend().upload(pair.cuda, row.data, x.cuda.slice_rows(kRows[i], kRows[i] + 1).data,
                          row.bytes());
  }
  const Twin dw = pair.empty(kFp32, w.cpu.shape);
  cuda_backend().matmul(pair.cuda, y, yes, x.cuda, no, dw.cuda, false);
  cpu_backend().matmul(pair.cpu, y_rows.cpu, yes, x_rows.cpu, no, dw.cpu, false);
  EXPECT_LE(pair.error(dw), 1e-5) << "dw";
}

// Each call of an accumulating product adds once, the timed first one too.
TEST(CudaMatmul, AddsOncePerCall) {
  AGOQ_NEEDS_GPU();
  Pair pair;
  const Twin a = pair.random(kBf16, Shape{300, 260}), b = pair.random(kBf16, Shape{260, 412});
  const Twin c = pair.random(kFp32, Shape{300, 412});
  for (int call = 0; call < 3; ++call) {
    cpu_backend().matmul(pair.cpu, a.cpu, Transpose::kNo, b.cpu, Transpose::kNo, c.cpu, true);
    cuda_backend().matmul(pair.cuda, a.cuda, Transpose::kNo, b.cuda, Transpose::kNo, c.cuda, true);
    EXPECT_LE(pair.error(c), 1e-5) << "call " << call;
  }
}

// Rows of odd width start at any multiple of an element.
TEST(CudaMatmul, TakesRowsThatAreNotAligned) {
  AGOQ_NEEDS_GPU();
  for (const Types& types : kTypes) {
    Pair pair;
    const Twin a = pair.random(types.operand, Shape{66, 129}),
               b = pair.random(types.operand, Shape{90, 129});
    const Twin c = pair.empty(types.result, Shape{65, 87});
    cpu_backend().matmul(pair.cpu, a.cpu.slice_rows(1, 66), Transpose::kNo, b.cpu.slice_rows(3, 90),
                         Transpose::kYes, c.cpu, false);
    cuda_backend().matmul(pair.cuda, a.cuda.slice_rows(1, 66), Transpose::kNo, b.cuda.slice_rows(3, 90),
                          Transpose::kYes, c.cuda, false);
    EXPECT_LE(pair.error(c), types.tolerance);
  }
}

TEST(CudaMatmul, RefusesMixedOperandsAndShapesThatDoNotMultiply) {
  AGOQ_NEEDS_GPU();
  Pair pair;
  const Twin a = pair.random(kFp32, Shape{8, 16}), b = pair.random(kBf16, Shape{16, 8});
  const Twin c = pair.empty(kFp32, Shape{8, 8});
  EXPECT_THROW(
      cuda_backend().matmul(pair.cuda, a.cuda, Transpose::kNo, b.cuda, Transpose::kNo, c.cuda, false),
      Error);
  EXPECT_THROW(
      cuda_backend().matmul(pair.cuda, a.cuda, Transpose::kNo, a.cuda, Transpose::kNo, c.cuda, false),
      Error);
}

TEST(CudaMatmul, DeterministicRunsHaveTheSameBits) {
  AGOQ_NEEDS_GPU();
  Pair pair;
  const Twin a = pair.random(kBf16, Shape{64, 8000}), b = pair.random(kBf16, Shape{8000, 64});
  const Twin c = pair.empty(kFp32, Shape{64, 64});
  std::vector<Values> results;
  for (int run = 0; run < 3; ++run) {
    cuda_backend().set_deterministic(run != 1);  // leaving the mode in between forgets the choice
    cuda_backend().matmul(pair.cuda, a.cuda, Transpose::kNo, b.cuda, Transpose::kNo, c.cuda, false);
    results.push_back(pair.values(c.cuda));
  }
  cuda_backend().set_deterministic(false);
  EXPECT_EQ(results[0], results[2]);
}

// A plan takes the workspace of a real call, with no GPU.
TEST(CudaMatmul, PlansTheWorkspaceOfARealCall) {
  std::optional<std::string> missing;
  try {
    cuda_backend();
  } catch (const Error& error) {
    missing = error.what();
  }
  if (missing) GTEST_SKIP() << *missing;
  const auto run = [](const Context& context, const Tensor& dy, const Tensor& x,
                      const QuantTensor& main) {
    cuda_backend().accumulate_weight_gradient(context, dy, x, main, {}, {});
  };
  const QuantFormat format = parse_format("e4m3/128/fp32");
  const BlockGrid grid{5000, 4096, 1};
  Arena operands = Arena::measuring("operands"), workspace = Arena::measuring("workspace");
  const Context measuring{cuda_backend(), {}, workspace, {}};
  run(measuring, operands.take(kBf16, Shape{16, 5000}), operands.take(kBf16, Shape{16, 4096}),
      take(operands, format, grid));
  EXPECT_EQ(workspace.high_water(), (std::size_t{64} << 20) + (std::size_t{32} << 20));
  if (unavailable()) return;
  Pair pair;
  run(pair.cuda, pair.random(kBf16, Shape{16, 5000}).cuda, pair.random(kBf16, Shape{16, 4096}).cuda,
      pair.random_quant(format, grid).cuda);
  EXPECT_EQ(pair.cuda.workspace.high_water(), workspace.high_water());
}

// Small integers: their sums are exact in any order, so the quantiser's input is the same on both.
Twin integers_as(Pair& pair, ElementType type, Shape shape, std::uint32_t drawn) {
  Values values = normal(shape.count(), drawn);
  for (double& value : values) value = std::round(value);
  return pair.of(type, shape, values);
}

/// Of a weight's gradient: the main gradient, and the tokens of a micro-batch.
struct GradientCase {
  const char* format;
  BlockGrid grid;
  std::int64_t tokens;
};

TEST(CudaWeightGradient, GivesTheBytesOfTheCpu) {
  AGOQ_NEEDS_GPU();
  // 5,000 rows of 4,096 are two slabs or more; stochastic rounding depends on the row of each element.
  for (const GradientCase& c :
       {GradientCase{"e4m3/128/fp32", {5000, 4096, 1}, 16},
        GradientCase{"e4m3/128/fp32/stochastic", {5000, 4096, 16}, 16},
        GradientCase{"fp32", {1025, 129, 1}, 40}, GradientCase{"bf16", {300, 129, 1}, 40},
        GradientCase{"int8/64/bf16", {1000, 576, 4}, 33},
        GradientCase{"e4m3/128/fp32/stochastic", {1376, 576, 1}, 33},
        GradientCase{"dynamic8/256/fp32", {129, 2048, 16}, 7}}) {
    SCOPED_TRACE(c.format);
    for (const ElementType type : {kBf16, kFp32}) {
      Pair pair(std::size_t{384} << 20);
      const Twin dy = integers_as(pair, type, Shape{c.tokens, c.grid.rows}, 1);
      const Twin x = integers_as(pair, type, Shape{c.tokens, c.grid.row_length}, 2);
      const QuantTwin main = pair.quant(parse_format(c.format), c.grid);
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        cpu_backend().accumulate_weight_gradient(pair.cpu, dy.cpu, x.cpu, main.cpu, pair.key(), {});
        cuda_backend().accumulate_weight_gradient(pair.cuda, dy.cuda, x.cuda, main.cuda, pair.key(), {});
        EXPECT_EQ(pair.differing_bytes(main), 0) << "micro-batch " << micro_batch;
      }
    }
  }
}

/// Where an e4m3 code stands among the levels, negative ones below zero.
int level_of(std::byte code) {
  const int magnitude = static_cast<int>(code) & 127;
  return (static_cast<int>(code) & 128) == 0 ? magnitude : -magnitude;
}

/// How far two main gradients in e4m3 under FP32 scales are apart.
struct CodeDistance {
  double differing = 0;    // share of the elements whose codes do
  double far = 0;          // of those with more than a level between
  int most_steps = 0;      // levels between two codes of an element
  double scale_error = 0;  // largest relative one
};

CodeDistance distance(Pair& pair, const QuantTwin& twin) {
  const std::vector<std::byte> cpu = pair.bytes(twin, false), cuda = pair.bytes(twin, true);
  const auto count = static_cast<std::size_t>(twin.cpu.grid.count());
  std::int64_t differing = 0, far = 0;
  CodeDistance found;
  for (std::size_t i = 0; i < count; ++i) {
    const int steps = std::abs(level_of(cpu[i]) - level_of(cuda[i]));
    differing += steps == 0 ? 0 : 1;
    far += steps > 1 ? 1 : 0;
    found.most_steps = std::max(found.most_steps, steps);
  }
  found.differing = static_cast<double>(differing) / static_cast<double>(count);
  found.far = static_cast<double>(far) / static_cast<double>(count);
  const auto first = static_cast<std::size_t>(twin.cpu.scales - twin.cpu.codes);
  const auto bytes =
      static_cast<std::size_t>(row_bytes(twin.cpu.format, twin.cpu.grid).scales * twin.cpu.grid.rows);
  for (std::size_t at = first; at < first + bytes; at += sizeof(float)) {
    float a = 0, b = 0;
    std::memcpy(&a, cpu.data() + at, sizeof(a));
    std::memcpy(&b, cuda.data() + at, sizeof(b));
    const double error = std::abs(double{b} / double{a} - 1);
    found.scale_error =
        std::max(found.scale_error, std::isnan(error) ? std::numeric_limits<double>::infinity() : error);
  }
  return found;
}

// Sums in another order are not the same quantiser input. A sum of 1,025 products is off by 8e-7 of its
// deviation (tensor cores emulated), and a step of e4m3 is a 16th to an 8th of a value, so that a
// level's bound lies between the two sums of 3e-5 of the elements (emulated; 2e-6 for 64 products), of
// small values first. Scales follow the largest sum of their block and move all codes of the block by as
// little.
//
// Stochastic rounding takes the level nearest to a number or, where the random number is small, the one
// beyond the number. Two sums with a level between them can so leave it both ways, two levels apart:
// 2e-7 of the elements (emulated).
TEST(CudaWeightGradient, OfNormalOperandsIsAtMostOneCodeStepFromTheCpus) {
  AGOQ_NEEDS_GPU();
  for (const GradientCase& c : {GradientCase{"e4m3/128/fp32", {1376, 2048, 1}, 64},
                                GradientCase{"e4m3/128/fp32", {4096, 576, 1}, 1000},
                                GradientCase{"e4m3/128/fp32", {2048, 1792, 14}, 1025},
                                GradientCase{"e4m3/128/fp32/stochastic", {14336, 576, 1}, 33},
                                GradientCase{"e4m3/128/fp32/stochastic", {1792, 2048, 1}, 1025}}) {
    for (const ElementType type : {kBf16, kFp32}) {
      Pair pair(std::size_t{384} << 20);
      const QuantTwin main = pair.quant(parse_format(c.format), c.grid);
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        SCOPED_TRACE(fmt::format("{} [{}, {}] of {} tokens, {}, micro-batch {}", c.format, c.grid.rows,
                                 c.grid.row_length, c.tokens, name_of(type), micro_batch));
        const Twin dy = pair.drawn(type, Shape{c.tokens, c.grid.rows}),
                   x = pair.drawn(type, Shape{c.tokens, c.grid.row_length});
        cpu_backend().accumulate_weight_gradient(pair.cpu, dy.cpu, x.cpu, main.cpu, pair.key(), {});
        cuda_backend().accumulate_weight_gradient(pair.cuda, dy.cuda, x.cuda, main.cuda, pair.key(), {});
        const CodeDistance apart = distance(pair, main);
        EXPECT_LE(apart.differing, 1e-4);
        const bool nearest = parse_format(c.format).rounding == Rounding::kNearest;
        EXPECT_LE(apart.most_steps, nearest ? 1 : 2);
        EXPECT_LE(apart.far, 1e-5);
        EXPECT_LE(apart.scale_error, 1e-5);
        // The next micro-batch is added to the same gradient on both sides.
        cuda_backend().upload(pair.cuda, main.cpu.codes, main.cuda.codes,
                              storage_bytes(main.cpu.format, main.cpu.grid));
      }
    }
  }
}

}  // namespace
}  // namespace agoq

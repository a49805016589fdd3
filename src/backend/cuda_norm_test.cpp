// Normalisation on CUDA against the CPU: plain, with the residual sum and the codec, from packed input.
//
// Tolerances. FP32: sums of up to 4,096 terms in another order, 1e-5 in L2. BF16 results: both sides
// round to BF16 what differs by that, so that few elements land on the other side of a rounding: 4e-3 in
// L2, and at most kUlpShare of the elements more than one unit in the last place apart. From packed
// input the CPU rounds the decoded x to BF16 once more, which moves y by another half unit: then 6e-3,
// and shares are compared with an FP32 composition instead.
#include <iterator>

#include "backend/cuda_testing.h"

namespace agoq {
namespace {

using namespace testing_cuda;

constexpr auto kFp32 = ElementType::kFp32, kBf16 = ElementType::kBf16;
constexpr double kEpsilon = 1e-5, kFp32Tolerance = 1e-5, kBf16Tolerance = 4e-3, kUlpShare = 1e-3;

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
  std::int64_t rows, width;
};
// Widths of one group and of several, a whole and a cut last vector, unaligned rows; more rows than
// blocks.
const Size kSizes[] = {{1, 4096},  {531, 4096}, {530, 2048}, {1025, 576}, {1000, 129}, {3, 1376},
                       {65, 1792}, {7, 8192},   {1, 1},      {2500, 256}, {5, 1025}};
// Fewer of them for each format.
const Size kFormatSizes[] = {{33, 4096}, {130, 576}, {100, 129}, {65, 1792}, {1, 1025}};
// Rows that no team of warps holds.
const Size kLongSizes[] = {{3, 14336}, {270, 8200}, {2, 8193}};

/// Share of elements that are more than one BF16 unit in the last place of the larger apart.
double share_beyond_one_ulp(const Values& a, const Values& b) {
  std::int64_t beyond = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double larger = std::max(std::abs(a[i]), std::abs(b[i]));
    const double ulp = larger == 0 ? 0 : std::ldexp(1.0, std::ilogb(larger) - 7);
    if (!(std::abs(a[i] - b[i]) <= ulp)) ++beyond;
  }
  return a.empty() ? 0 : static_cast<double>(beyond) / static_cast<double>(a.size());
}

/// The twins' floats agree as this file's head says.
void expect_close(Pair& pair, const Twin& twin, const char* name) {
  SCOPED_TRACE(name);
  if (twin.cpu.type == kFp32) {
    EXPECT_LE(pair.error(twin), kFp32Tolerance);
    return;
  }
  EXPECT_LE(pair.error(twin), kBf16Tolerance);
  EXPECT_LE(share_beyond_one_ulp(pair.values(twin.cuda), testing_operations::Bench::get(twin.cpu)),
            kUlpShare);
}

std::string text_of(ElementType type, NormKind kind, const Size& size) {
  return fmt::format("{} {} [{}, {}]", name_of(type),
                     kind == NormKind::kRmsNorm ? "RMSNorm" : "LayerNorm", size.rows, size.width);
}

/// Calls test(type, kind, size) for every combination.
template <typename Sizes, typename Test>
void for_cases(const Sizes& sizes, Test test) {
  for (const ElementType type : {kBf16, kFp32}) {
    for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
      for (const Size& size : sizes) {
        SCOPED_TRACE(text_of(type, kind, size));
        // A row of one element has no variance: LayerNorm's result is rounding noise over epsilon.
        if (kind == NormKind::kLayerNorm && size.width == 1) continue;
        test(type, kind, size);
      }
    }
  }
}

Twin weight_for(Pair& pair, NormKind kind, ElementType type, std::int64_t width) {
  return kind == NormKind::kRmsNorm ? pair.random(type, Shape{width}) : Twin{};
}

template <typename Sizes>
void test_forward(const Sizes& sizes) {
  for_cases(sizes, [](ElementType type, NormKind kind, const Size& size) {
    Pair pair;
    const Twin x = pair.random(type, Shape{size.rows, size.width}, 3.0),
               weight = weight_for(pair, kind, type, size.width), y = pair.empty(type, x.cpu.shape),
               rstd = pair.empty(kFp32, Shape{size.rows});
    cpu_backend().norm_forward(pair.cpu, kind, x.cpu, weight.cpu, kEpsilon, y.cpu, rstd.cpu);
    cuda_backend().norm_forward(pair.cuda, kind, x.cuda, weight.cuda, kEpsilon, y.cuda, rstd.cuda);
    expect_close(pair, y, "y");
    expect_close(pair, rstd, "rstd");
  });
}

TEST(CudaNorm, ForwardEqualsTheCpu) {
  AGOQ_NEEDS_GPU();
  test_forward(kSizes);
}

TEST(CudaNorm, ForwardOfLongRowsEqualsTheCpu) {
  AGOQ_NEEDS_GPU();
  test_forward(kLongSizes);
}

template <typename Sizes>
void test_backward(const Sizes& sizes) {
  for_cases(sizes, [](ElementType type, NormKind kind, const Size& size) {
    for (const bool with_rstd : {false, true}) {
      Pair pair;
      const Shape shape{size.rows, size.width};
      const Twin x = pair.random(type, shape, 2.0), dy = pair.random(type, shape),
                 dx = pair.random(type, shape), weight = weight_for(pair, kind, type, size.width),
                 dweight = kind == NormKind::kRmsNorm ? pair.random(kFp32, Shape{size.width}) : Twin{};
      Twin rstd;
      if (with_rstd) {
        rstd = pair.empty(kFp32, Shape{size.rows});
        cpu_backend().norm_forward(pair.cpu, kind, x.cpu, weight.cpu, kEpsilon,
                                   pair.empty(type, shape).cpu, rstd.cpu);
        pair.upload(rstd);
      }
      cpu_backend().norm_backward(pair.cpu, kind, dy.cpu, x.cpu, weight.cpu, kEpsilon, rstd.cpu, dx.cpu,
                                  dweight.cpu);
      cuda_backend().norm_backward(pair.cuda, kind, dy.cuda, x.cuda, weight.cuda, kEpsilon, rstd.cuda,
                                   dx.cuda, dweight.cuda);
      expect_close(pair, dx, "dx");
      if (dweight.cpu) {
        expect_close(pair, dweight, "dweight");
      }
    }
  });
}

TEST(CudaNorm, BackwardEqualsTheCpu) {
  AGOQ_NEEDS_GPU();
  test_backward(kSizes);
}

TEST(CudaNorm, BackwardOfLongRowsEqualsTheCpu) {
  AGOQ_NEEDS_GPU();
  test_backward(kLongSizes);
}

TEST(CudaNorm, BackwardIsTheSameInEveryRun) {
  AGOQ_NEEDS_GPU();
  Pair pair;
  const Shape shape{1101, 4096};
  const Twin x = pair.random(kBf16, shape), dy = pair.random(kBf16, shape),
             weight = pair.random(kBf16, Shape{4096});
  Values first;
  for (int run = 0; run < 3; ++run) {
    const Twin dx = pair.of(kBf16, shape, Values(static_cast<std::size_t>(shape.count()))),
               dweight = pair.of(kFp32, Shape{4096}, Values(4096));
    cuda_backend().norm_backward(pair.cuda, NormKind::kRmsNorm, dy.cuda, x.cuda, weight.cuda, kEpsilon,
                                 {}, dx.cuda, dweight.cuda);
    const Values values = pair.values(dweight.cuda);
    if (run == 0) first = values;
    EXPECT_EQ(values, first);
  }
}

// Sum, quantised bytes and counters are the CPU's to the bit: the sum is rounded before it is quantised.
void test_residual(const QuantFormat& format, ElementType type, NormKind kind, const Size& size,
                   std::int64_t segments, bool with_delta) {
  SCOPED_TRACE(fmt::format("{} {} segments {} delta {}", text_of(type, kind, size), format.to_string(),
                           segments, with_delta));
  Pair pair(std::size_t{128} << 20);
  const Shape shape{size.rows, size.width};
  const Twin x = pair.random(type, shape, 3.0),
             delta = with_delta ? pair.random(type, shape, .37) : Twin{},
             weight = weight_for(pair, kind, type, size.width), y = pair.empty(type, shape),
             rstd = pair.empty(kFp32, Shape{size.rows}), counters = pair.counters();
  const QuantTwin saved = pair.quant(format, BlockGrid{size.rows, size.width, segments});
  const RandomKey key = pair.key();
  cpu_backend().residual_norm_forward(pair.cpu, kind, x.cpu, delta.cpu, weight.cpu, kEpsilon, y.cpu,
                                      rstd.cpu, saved.cpu, key, counters.cpu);
  cuda_backend().residual_norm_forward(pair.cuda, kind, x.cuda, delta.cuda, weight.cuda, kEpsilon,
                                       y.cuda, rstd.cuda, saved.cuda, key, counters.cuda);
  EXPECT_EQ(pair.values(x.cuda), testing_operations::Bench::get(x.cpu));
  EXPECT_EQ(pair.differing_bytes(saved), 0);
  const auto* counted = counters.cpu.as<std::int64_t>();
  EXPECT_EQ(pair.values(counters.cuda), Values(counted, counted + kQuantCounters));
  expect_close(pair, y, "y");
  expect_close(pair, rstd, "rstd");
}

TEST(CudaNorm, ResidualForwardQuantisesToTheBytesOfTheCpu) {
  AGOQ_NEEDS_GPU();
  for (const ElementType type : {kBf16, kFp32}) {
    for (const Size& size : kSizes) {
      test_residual(parse_format("agoq"), type, NormKind::kRmsNorm, size, 1, true);
    }
  }
  for (const char* text : kFormats) {
    const QuantFormat format = parse_format(text);
    for (const ElementType type : {kBf16, kFp32}) {
      for (const Size& size : kFormatSizes) {
        test_residual(format, type, NormKind::kRmsNorm, size, 1, true);
      }
      test_residual(format, type, NormKind::kRmsNorm, {33, 4096}, 1, false);
      test_residual(format, type, NormKind::kLayerNorm, {33, 1376}, 1, true);
      test_residual(format, type, NormKind::kRmsNorm, {33, 576}, 4, true);    // segments in registers
      test_residual(format, type, NormKind::kRmsNorm, {33, 4096}, 16, true);  // the composition
      test_residual(format, type, NormKind::kRmsNorm, {3, 9216}, 1, true);
    }
  }
}

TEST(CudaNorm, ResidualForwardSavesNothingWhereNothingIsAsked) {
  AGOQ_NEEDS_GPU();
  for (const ElementType type : {kBf16, kFp32}) {
    Pair pair;
    const Shape shape{257, 2048};
    const Twin x = pair.random(type, shape, 3.0), delta = pair.random(type, shape),
               weight = pair.random(type, Shape{2048}), y = pair.empty(type, shape);
    cpu_backend().residual_norm_forward(pair.cpu, NormKind::kRmsNorm, x.cpu, delta.cpu, weight.cpu,
                                        kEpsilon, y.cpu, {}, {}, {}, {});
    cuda_backend().residual_norm_forward(pair.cuda, NormKind::kRmsNorm, x.cuda, delta.cuda, weight.cuda,
                                         kEpsilon, y.cuda, {}, {}, {}, {});
    EXPECT_EQ(pair.values(x.cuda), testing_operations::Bench::get(x.cpu));
    expect_close(pair, y, "y");
  }
}

// NaN and Inf are counted, and only their rows' y is affected.
TEST(CudaNorm, ResidualForwardCountsWhatIsNotFinite) {
  AGOQ_NEEDS_GPU();
  Pair pair;
  const Shape shape{70, 2048};
  Values values = testing_operations::normal(shape.count(), 5);
  values[3] = std::numeric_limits<double>::infinity();
  values[2048 * 40 + 100] = std::numeric_limits<double>::quiet_NaN();
  const Twin x = pair.of(kBf16, shape, values), delta = pair.random(kBf16, shape),
             weight = pair.random(kBf16, Shape{2048}), y = pair.empty(kBf16, shape),
             counters = pair.counters();
  const QuantTwin saved = pair.quant(parse_format("agoq"), BlockGrid{70, 2048, 1});
  cpu_backend().residual_norm_forward(pair.cpu, NormKind::kRmsNorm, x.cpu, delta.cpu, weight.cpu,
                                      kEpsilon, y.cpu, {}, saved.cpu, {}, counters.cpu);
  cuda_backend().residual_norm_forward(pair.cuda, NormKind::kRmsNorm, x.cuda, delta.cuda, weight.cuda,
                                       kEpsilon, y.cuda, {}, saved.cuda, {}, counters.cuda);
  EXPECT_EQ(pair.differing_bytes(saved), 0);
  EXPECT_EQ(pair.values(counters.cuda)[static_cast<int>(QuantCounter::kNonFinite)], 2);
  const Values cuda = pair.values(y.cuda), cpu = testing_operations::Bench::get(y.cpu);
  for (std::size_t i = 0; i < cuda.size(); ++i) {
    ASSERT_EQ(std::isnan(cuda[i]), std::isnan(cpu[i])) << i;
  }
}

/// FP32 tensors judge the kernels that read packed input: no rounding stands between codec and norm.
TEST(CudaNorm, FromPackedInputEqualsTheCpu) {
  AGOQ_NEEDS_GPU();
  for (const char* text : kFormats) {
    const QuantFormat format = parse_format(text);
    for (const ElementType type : {kFp32, kBf16}) {
      for (const NormKind kind : {NormKind::kRmsNorm, NormKind::kLayerNorm}) {
        for (const auto& [size, segments] : {std::pair{Size{130, 4096}, 1},
                                             {Size{130, 576}, 1},
                                             {Size{33, 129}, 1},
                                             {Size{65, 2048}, 2},
                                             {Size{9, 4096}, 16},
                                             {Size{3, 9216}, 1},
                                             {Size{1, 1376}, 1}}) {
          SCOPED_TRACE(fmt::format("{} {} segments {}", text_of(type, kind, size), text, segments));
          Pair pair(std::size_t{64} << 20);
          const Shape shape{size.rows, size.width};
          const QuantTwin x = pair.random_quant(format, BlockGrid{size.rows, size.width, segments}, 2.0);
          const Twin weight = weight_for(pair, kind, type, size.width), y = pair.empty(type, shape),
                     dy = pair.random(type, shape), dx = pair.random(type, shape),
                     dweight =
                         kind == NormKind::kRmsNorm ? pair.random(kFp32, Shape{size.width}) : Twin{};
          cpu_backend().norm_forward_saved(pair.cpu, kind, x.cpu, weight.cpu, kEpsilon, y.cpu);
          cuda_backend().norm_forward_saved(pair.cuda, kind, x.cuda, weight.cuda, kEpsilon, y.cuda);
          cpu_backend().norm_backward_saved(pair.cpu, kind, dy.cpu, x.cpu, weight.cpu, kEpsilon, {},
                                            dx.cpu, dweight.cpu);
          cuda_backend().norm_backward_saved(pair.cuda, kind, dy.cuda, x.cuda, weight.cuda, kEpsilon, {},
                                             dx.cuda, dweight.cuda);
          // The CPU rounds a decoded x to BF16; dweight sums those roundings over the rows.
          const double tolerance = type == kFp32 ? kFp32Tolerance : 6e-3;
          EXPECT_LE(pair.error(y), tolerance);
          EXPECT_LE(pair.error(dx), tolerance);
          if (dweight.cpu) {
            EXPECT_LE(pair.error(dweight), tolerance);
          }
        }
      }
    }
  }
}

// A BF16 y from packed input is the rounded FP32 y, but for the sums' order.
TEST(CudaNorm, FromPackedInputRoundsOnce) {
  AGOQ_NEEDS_GPU();
  Pair pair;
  const Shape shape{257, 4096};
  const QuantTwin x = pair.random_quant(parse_format("agoq"), BlockGrid{257, 4096, 1}, 2.0);
  const Values w = testing_operations::normal(4096, 77);
  const Twin weight32 = pair.of(kFp32, Shape{4096}, w), weight16 = pair.of(kBf16, Shape{4096}, w),
             y32 = pair.empty(kFp32, shape), y16 = pair.empty(kBf16, shape);
  cpu_backend().norm_forward_saved(pair.cpu, NormKind::kRmsNorm, x.cpu, weight32.cpu, kEpsilon, y32.cpu);
  cpu_backend().copy(pair.cpu, y32.cpu, y16.cpu);
  cuda_backend().norm_forward_saved(pair.cuda, NormKind::kRmsNorm, x.cuda, weight16.cuda, kEpsilon,
                                    y16.cuda);
  expect_close(pair, y16, "y");
}

/// The bytes of all planes, one after the other.
std::vector<std::byte> planes_of(const Context& context, const QuantTensor& tensor) {
  const RowBytes row = row_bytes(tensor.format, tensor.grid);
  std::vector<std::byte> all;
  for (const auto& [plane, row_bytes] : {std::pair{tensor.codes, row.codes},
                                         {tensor.bits, row.bits},
                                         {tensor.scales, row.scales},
                                         {tensor.super, row.super}}) {
    if (row_bytes == 0) continue;
    const std::size_t begin = all.size();
    all.resize(begin + static_cast<std::size_t>(row_bytes * tensor.rows()));
    context.backend.read(context, plane, all.data() + begin, all.size() - begin);
  }
  return all;
}

// 524,304 rows of 4,096 are more than 2^31 elements. All are zero but the same eight in four places: the
// first, where bytes and where elements pass 2^31, and the last. These are the CPU's.
TEST(CudaNorm, CountsBeyondTwoToTheThirtyOne) {
  AGOQ_NEEDS_GPU();
  constexpr std::int64_t kRows = 524304, kWidth = 4096, kFew = 8;
  static_assert(kRows * kWidth > (std::int64_t{1} << 31));
  constexpr std::int64_t kPlaces[] = {0, 262140, 524284, kRows - kFew};
  const Shape shape{kRows, kWidth}, small{kFew, kWidth};
  const BlockGrid grid{kRows, kWidth, 1};
  const QuantFormat format = parse_format("agoq");
  std::optional<Arena> memory;
  try {
    memory.emplace(
        "large tensors", cuda_backend().allocator(),
        3 * static_cast<std::size_t>(kRows * kWidth) * sizeof(Bf16) + storage_bytes(format, grid));
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  Pair pair;
  const Tensor x = memory->take(kBf16, shape), delta = memory->take(kBf16, shape),
               y = memory->take(kBf16, shape);
  const QuantTensor saved = take(*memory, format, grid);
  const Twin few_x = pair.random(kBf16, small, 3.0), few_delta = pair.random(kBf16, small, .37),
             weight = pair.random(kBf16, Shape{kWidth}), few_y = pair.empty(kBf16, small);
  const QuantTwin few_saved = pair.quant(format, BlockGrid{kFew, kWidth, 1});
  const auto at = [](const Tensor& tensor, std::int64_t row) {
    return tensor.slice_rows(row, row + kFew);
  };
  cuda_backend().zero(pair.cuda, x.data, x.bytes());
  cuda_backend().zero(pair.cuda, delta.data, delta.bytes());
  for (const std::int64_t row : kPlaces) {
    cuda_backend().copy(pair.cuda, few_x.cuda, at(x, row));
    cuda_backend().copy(pair.cuda, few_delta.cuda, at(delta, row));
  }
  cpu_backend().residual_norm_forward(pair.cpu, NormKind::kRmsNorm, few_x.cpu, few_delta.cpu, weight.cpu,
                                      kEpsilon, few_y.cpu, {}, few_saved.cpu, {}, {});
  cuda_backend().residual_norm_forward(pair.cuda, NormKind::kRmsNorm, x, delta, weight.cuda, kEpsilon, y,
                                       {}, saved, {}, {});
  const std::vector<std::byte> saved_bytes = planes_of(pair.cpu, few_saved.cpu);
  const Values y_values = pair.values(at(y, 0));
  for (const std::int64_t row : kPlaces) {
    SCOPED_TRACE(row);
    EXPECT_EQ(pair.values(at(x, row)), testing_operations::Bench::get(few_x.cpu));
    EXPECT_EQ(planes_of(pair.cuda, saved.slice_rows(row, row + kFew)), saved_bytes);
    expect_close(pair, {few_y.cpu, at(y, row)}, "y");
    EXPECT_EQ(pair.values(at(y, row)), y_values);
  }
  const Values zeros(static_cast<std::size_t>(kFew * kWidth));
  EXPECT_EQ(pair.values(at(y, kRows / 3)), zeros);

  // Backward with this y for its own gradient, into what is left in delta.
  testing_operations::Bench::set(few_y.cpu, y_values);
  const Twin dweight = pair.of(kFp32, Shape{kWidth}, Values(kWidth));
  cpu_backend().norm_backward_saved(pair.cpu, NormKind::kRmsNorm, few_y.cpu, few_saved.cpu, weight.cpu,
                                    kEpsilon, {}, few_delta.cpu, dweight.cpu);
  cuda_backend().norm_backward_saved(pair.cuda, NormKind::kRmsNorm, y, saved, weight.cuda, kEpsilon, {},
                                     delta, dweight.cuda);
  // The CPU rounds the decoded x to BF16, see FromPackedInputEqualsTheCpu.
  for (const std::int64_t row : kPlaces) {
    EXPECT_LE(pair.error({few_delta.cpu, at(delta, row)}), 6e-3) << "dx, row " << row;
  }
  EXPECT_EQ(pair.values(at(delta, kRows / 3)), zeros);
  Values of_all = testing_operations::Bench::get(dweight.cpu);
  for (double& value : of_all) value *= static_cast<double>(std::size(kPlaces));
  EXPECT_LE(relative_error(pair.values(dweight.cuda), of_all), 6e-3);
}

TEST(CudaNorm, TakesTheSameWorkspaceWhenMeasuring) {
  AGOQ_NEEDS_GPU();
  for (const std::int64_t width : {576, 4096, 9216}) {
    Pair pair;
    const Shape shape{400, width};
    const QuantTwin x = pair.random_quant(parse_format("agoq"), BlockGrid{400, width, 1});
    const Twin dy = pair.random(kBf16, shape), dx = pair.random(kBf16, shape),
               weight = pair.random(kBf16, Shape{width}), dweight = pair.random(kFp32, Shape{width});
    Arena measured = Arena::measuring("measured");
    const Context measuring{cuda_backend(), {}, measured, {}};
    const auto run = [&](const Context& context) {
      cuda_backend().norm_backward_saved(context, NormKind::kRmsNorm, dy.cuda, x.cuda, weight.cuda,
                                         kEpsilon, {}, dx.cuda, dweight.cuda);
    };
    run(measuring);
    run(pair.cuda);
    EXPECT_GT(measured.high_water(), 0u);
    EXPECT_EQ(measured.high_water(), pair.cuda.workspace.high_water());
  }
}

TEST(CudaNorm, NamesTheOperandThatDoesNotFit) {
  Arena measured = Arena::measuring("measured");
  const Context context{cpu_backend(), {}, measured, {}};
  const Tensor x = measured.take(kBf16, Shape{4, 64}), y = measured.take(kBf16, Shape{4, 32}),
               weight = measured.take(kBf16, Shape{64});
  AGOQ_NEEDS_GPU();
  for (Backend* backend : {&cpu_backend(), &cuda_backend()}) {
    try {
      backend->norm_forward(context, NormKind::kRmsNorm, x, weight, kEpsilon, y, {});
      FAIL() << "accepted";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "norm_forward: y must be bf16 [4, 64] and is bf16 [4, 32]");
    }
    EXPECT_THROW(backend->norm_forward(context, NormKind::kLayerNorm, x, weight, kEpsilon, x, {}),
                 Error);
  }
}

}  // namespace
}  // namespace agoq

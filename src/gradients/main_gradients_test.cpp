#include "gradients/main_gradients.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <set>

#include "gradients/lone_reducer.h"

namespace agoq {
namespace {

constexpr QuantFormat kE4m3{Code::kE4m3, 128, ScaleType::kFp32, Rounding::kNearest};
constexpr QuantFormat kE4m3Stochastic{Code::kE4m3, 128, ScaleType::kFp32, Rounding::kStochastic};
constexpr QuantFormat kE5m2{Code::kE5m2, 128, ScaleType::kFp32, Rounding::kNearest};
constexpr QuantFormat kInt8{Code::kInt8, 128, ScaleType::kFp32, Rounding::kNearest};

struct Bench {
  Arena memory{"test tensors", host_allocator(), std::size_t{96} << 20};
  Arena workspace{"workspace", host_allocator(), std::size_t{16} << 20};
  Context context{cpu_backend(), {}, workspace, {.seed = 17, .step = 1}};

  Tensor fp32(std::int64_t rows, std::int64_t columns,
              const std::function<double(std::int64_t)>& value) {
    const Tensor tensor = memory.take(ElementType::kFp32, Shape{rows, columns});
    for (std::int64_t i = 0; i < tensor.count(); ++i)
      tensor.as<float>()[i] = static_cast<float>(value(i));
    return tensor;
  }
  Tensor int32(const std::vector<std::int32_t>& values) {
    const Tensor tensor =
        memory.take(ElementType::kInt32, Shape{static_cast<std::int64_t>(values.size())});
    std::copy(values.begin(), values.end(), tensor.as<std::int32_t>());
    return tensor;
  }
  std::vector<float> decoded(const QuantTensor& tensor) {
    const Arena::Scope scope(memory);
    const Tensor out = memory.take(ElementType::kFp32, Shape{tensor.rows(), tensor.width()});
    context.backend.dequantize(context, tensor, out);
    return {out.as<float>(), out.as<float>() + out.count()};
  }
};

Parameter matrix(std::string name, std::int64_t rows, std::int64_t columns, std::int64_t segments = 1) {
  return {std::move(name), ParameterKind::kGateUp, rows, columns, segments};
}
Parameter norm_weight(std::string name, std::int64_t columns) {
  return {std::move(name), ParameterKind::kNorm, 1, columns, 1};
}

double normal(std::uint32_t tensor, std::uint32_t micro_batch, std::int64_t index) {
  RandomKey key{.seed = 99, .micro_batch = micro_batch};
  return random_normal(key.with(RandomPurpose::kTest, tensor), static_cast<std::uint64_t>(index));
}

// ||a - b|| / ||b||
double relative_l2(const std::vector<float>& a, const std::vector<double>& b) {
  double difference = 0;
  double total = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    total += b[i] * b[i];
  }
  return std::sqrt(difference / total);
}

std::vector<std::byte> bytes_of_row(const QuantTensor& tensor, std::int64_t row) {
  const RowBytes bytes = row_bytes(tensor.format, tensor.grid);
  std::vector<std::byte> all(tensor.codes + row * bytes.codes, tensor.codes + (row + 1) * bytes.codes);
  all.insert(all.end(), tensor.scales + row * bytes.scales, tensor.scales + (row + 1) * bytes.scales);
  return all;
}

// Relative L2 error of the sum after 1, 8, 32 and 64 micro-batches. The input: every element keeps a
// deviation of its own over the micro-batches, log-normal with sigma = 0.7 as gradients of one matrix
// spread over its rows and columns, times an independent N(0, 1) per micro-batch. Each requantisation
// then adds an error of e1 times the running sum, so that after k micro-batches the error is
// e1 sqrt((k + 1) / 2): 2.1, 4.1 and 5.7 times e1 for 8, 32 and 64.
TEST(MainGradients, AccumulationErrorsAreThoseOfTheSimulation) {
  struct Case {
    const char* name;
    QuantFormat format;
    double expected[4];  // per cent
  };
  const Case cases[] = {{"E4M3", kE4m3, {2.3, 4.9, 9.3, 13.2}},
                        {"E4M3 stochastic", kE4m3Stochastic, {3.3, 7.1, 13.5, 18.4}},
                        {"E5M2", kE5m2, {4.6, 9.8, 18.6, 26.4}},
                        {"INT8", kInt8, {1.2, 2.6, 5.1, 7.3}}};
  constexpr std::int64_t kRows = 32;
  constexpr std::int64_t kColumns = 1024;
  constexpr auto kElements = static_cast<std::size_t>(kRows * kColumns);
  Bench bench;
  std::vector<MainGradients> gradients;
  for (const Case& c : cases) {
    gradients.emplace_back(bench.memory, std::vector{matrix("w", kRows, kColumns)},
                           GradientConfig{c.format}, ElementType::kBf16);
    gradients.back().zero(bench.context);
  }
  std::vector<double> deviation(kElements);
  for (std::size_t i = 0; i < kElements; ++i)
    deviation[i] = std::exp(0.7 * normal(1, 0, static_cast<std::int64_t>(i)));
  std::vector<double> exact(kElements, 0.0);
  const Tensor addend = bench.fp32(kRows, kColumns, [](std::int64_t) { return 0.0; });
  int column = 0;
  for (std::uint32_t micro_batch = 0; micro_batch < 64; ++micro_batch) {
    for (std::size_t i = 0; i < kElements; ++i) {
      const auto value =
          static_cast<float>(deviation[i] * normal(2, micro_batch, static_cast<std::int64_t>(i)));
      addend.as<float>()[i] = value;
      exact[i] += value;
    }
    bench.context.random.micro_batch = micro_batch;
    for (MainGradients& g : gradients) g.add(bench.context, 0, addend);
    const std::uint32_t done = micro_batch + 1;
    if (done != 1 && done != 8 && done != 32 && done != 64) continue;
    for (std::size_t c = 0; c < std::size(cases); ++c) {
      const double error = 100.0 * relative_l2(bench.decoded(gradients[c].gradient(0)), exact);
      EXPECT_NEAR(error, cases[c].expected[column], 0.1 * cases[c].expected[column])
          << cases[c].name << " after " << done << " micro-batches";
    }
    ++column;
  }
}

// A plain E4M3 rounding to nearest even of |y| <= 448, for the trap below.
double round_e4m3(double y) {
  const double magnitude = std::abs(y);
  const double spacing = std::exp2(std::floor(std::log2(std::max(magnitude, 0x1p-6))) - 3);
  return std::copysign(std::nearbyint(magnitude / spacing) * spacing, y);
}

std::vector<double> requantised(std::vector<double> values, bool power_of_two_scale) {
  constexpr std::size_t kBlock = 128;
  for (std::size_t begin = 0; begin < values.size(); begin += kBlock) {
    double absmax = 0;
    for (std::size_t i = begin; i < begin + kBlock; ++i) absmax = std::max(absmax, std::abs(values[i]));
    double scale = absmax / 448.0;
    if (power_of_two_scale) scale = std::exp2(std::ceil(std::log2(scale)));
    for (std::size_t i = begin; i < begin + kBlock; ++i)
      values[i] = round_e4m3(values[i] / scale) * scale;
  }
  return values;
}

// The share of the exact sum that its stored form has lost, 1 - <stored, exact> / <exact, exact>.
double lost_share(const std::vector<double>& stored, const std::vector<double>& exact) {
  double product = 0;
  double total = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    product += stored[i] * exact[i];
    total += exact[i] * exact[i];
  }
  return 1.0 - product / total;
}

// A power-of-two scale stands still while the sum grows, and an addend of less than half a step is
// rounded away, every time. absmax / 448 moves with every addition and dithers. The gradient: one
// direction in all 64 micro-batches, with noise of half its deviation on top in each.
TEST(MainGradients, PowerOfTwoScalesLoseACoherentGradientAndAbsmaxScalesDoNot) {
  constexpr std::size_t kElements = 64 * 256;
  Bench bench;
  MainGradients gradients(bench.memory, {matrix("w", 64, 256)}, {kE4m3}, ElementType::kBf16);
  gradients.zero(bench.context);
  for (const double noise : {0.5, 0.0}) {
    gradients.zero(bench.context);
    std::vector<double> trapped(kElements, 0.0);
    std::vector<double> exact(kElements, 0.0);
    const Arena::Scope scope(bench.memory);
    const Tensor addend = bench.fp32(64, 256, [](std::int64_t) { return 0.0; });
    for (std::uint32_t micro_batch = 0; micro_batch < 64; ++micro_batch) {
      for (std::size_t i = 0; i < kElements; ++i) {
        const auto index = static_cast<std::int64_t>(i);
        const auto value =
            static_cast<float>(normal(3, 0, index) + noise * normal(4, micro_batch, index));
        addend.as<float>()[i] = value;
        exact[i] += value;
        trapped[i] += value;
      }
      trapped = requantised(trapped, true);
      bench.context.random.micro_batch = micro_batch;
      gradients.add(bench.context, 0, addend);
    }
    const std::vector<float> kept = bench.decoded(gradients.gradient(0));
    // 45 % with noise; without any, additions stall as soon as they are half a step: 64 %.
    EXPECT_NEAR(lost_share(trapped, exact), noise > 0 ? 0.45 : 0.64, 0.03);
    EXPECT_LT(std::abs(lost_share({kept.begin(), kept.end()}, exact)), 0.01);
  }
}

TEST(MainGradients, EmbeddingRowsOfAbsentTokensKeepTheirBytes) {
  constexpr std::int64_t kVocabulary = 40;
  constexpr std::int64_t kWidth = 272;  // segments of 68: a short block in each
  for (const QuantFormat& format : {kE4m3, kE4m3Stochastic, exact_format(ElementType::kFp32)}) {
    Bench bench;
    MainGradients gradients(bench.memory, {matrix("embedding", kVocabulary, kWidth, 4)}, {format},
                            ElementType::kBf16);
    gradients.zero(bench.context);
    const Tensor before =
        bench.fp32(kVocabulary, kWidth, [](std::int64_t i) { return normal(5, 0, i); });
    gradients.add(bench.context, 0, before);
    const std::vector<float> decoded_before = bench.decoded(gradients.gradient(0));
    std::vector<std::vector<std::byte>> rows_before;
    for (std::int64_t row = 0; row < kVocabulary; ++row) {
      rows_before.push_back(bytes_of_row(gradients.gradient(0), row));
    }

    const std::vector<std::int32_t> ids{7, 0, 39, 7, 7, 12, 0};
    const auto count = static_cast<std::int64_t>(ids.size());
    const Tensor dout = bench.fp32(count, kWidth, [](std::int64_t i) { return normal(6, 0, i); });
    gradients.add_embedding(bench.context, 0, bench.int32(ids), dout);

    // The dense reference: the sum of dout rows in position order, in FP32, on what was stored.
    std::vector<float> dense(static_cast<std::size_t>(kVocabulary * kWidth), 0.0f);
    for (std::int64_t n = 0; n < count; ++n) {
      for (std::int64_t c = 0; c < kWidth; ++c) {
        dense[static_cast<std::size_t>(ids[static_cast<std::size_t>(n)] * kWidth + c)] +=
            dout.as<float>()[n * kWidth + c];
      }
    }
    MainGradients reference(bench.memory, {matrix("embedding", kVocabulary, kWidth, 4)}, {format},
                            ElementType::kBf16);
    reference.zero(bench.context);
    const std::set<std::int32_t> present(ids.begin(), ids.end());
    const Tensor sum = bench.fp32(kVocabulary, kWidth, [&](std::int64_t i) {
      return decoded_before[static_cast<std::size_t>(i)] + dense[static_cast<std::size_t>(i)];
    });
    bench.context.backend.quantize(bench.context, sum, reference.gradient(0),
                                   bench.context.random.with(RandomPurpose::kGradientRounding, 0), {});
    for (std::int64_t row = 0; row < kVocabulary; ++row) {
      const std::vector<std::byte> after = bytes_of_row(gradients.gradient(0), row);
      if (present.contains(static_cast<std::int32_t>(row))) {
        EXPECT_EQ(after, bytes_of_row(reference.gradient(0), row))
            << format.to_string() << " row " << row;
        EXPECT_NE(after, rows_before[static_cast<std::size_t>(row)]);
      } else {
        EXPECT_EQ(after, rows_before[static_cast<std::size_t>(row)])
            << format.to_string() << " row " << row;
      }
    }
  }
}

TEST(MainGradients, AddsTheWeightGradientOfALinearLayer) {
  constexpr std::int64_t kTokens = 24;
  constexpr std::int64_t kRows = 20;
  constexpr std::int64_t kColumns = 132;
  Bench bench;
  MainGradients exact(bench.memory, {matrix("w", kRows, kColumns)}, {exact_format(ElementType::kFp32)},
                      ElementType::kBf16);
  MainGradients packed(bench.memory, {matrix("w", kRows, kColumns)}, {kE4m3}, ElementType::kBf16);
  exact.zero(bench.context);
  packed.zero(bench.context);
  std::vector<double> expected(static_cast<std::size_t>(kRows * kColumns), 0.0);
  for (std::uint32_t micro_batch = 0; micro_batch < 2; ++micro_batch) {
    const Tensor dy =
        bench.fp32(kTokens, kRows, [&](std::int64_t i) { return normal(7, micro_batch, i); });
    const Tensor x =
        bench.fp32(kTokens, kColumns, [&](std::int64_t i) { return normal(8, micro_batch, i); });
    bench.context.random.micro_batch = micro_batch;
    exact.add_weight_gradient(bench.context, 0, dy, x);
    packed.add_weight_gradient(bench.context, 0, dy, x);
    for (std::int64_t n = 0; n < kTokens; ++n) {
      for (std::int64_t r = 0; r < kRows; ++r) {
        for (std::int64_t c = 0; c < kColumns; ++c) {
          expected[static_cast<std::size_t>(r * kColumns + c)] +=
              static_cast<double>(dy.as<float>()[n * kRows + r]) * x.as<float>()[n * kColumns + c];
        }
      }
    }
  }
  EXPECT_LT(relative_l2(bench.decoded(exact.gradient(0)), expected), 1e-6);
  const double error = relative_l2(bench.decoded(packed.gradient(0)), expected);
  EXPECT_GT(error, 0.02);  // two roundings of 2.6 %
  EXPECT_LT(error, 0.04);
}

TEST(MainGradients, EightBitGradientsTakeAQuarterAndNoLargerBufferLivesThanTheWorkspace) {
  constexpr std::int64_t kTokens = 16;
  Bench bench;
  const std::vector<Parameter> parameters{matrix("a", 256, 512), matrix("b", 384, 256),
                                          norm_weight("norm", 256)};
  const std::size_t used = bench.memory.used();
  MainGradients gradients(bench.memory, parameters, {kE4m3}, ElementType::kBf16);
  const std::size_t taken = bench.memory.used() - used;
  std::size_t fp32_bytes = 0;
  std::size_t largest = 0;
  for (const Parameter& p : parameters) {
    fp32_bytes += static_cast<std::size_t>(p.count()) * 4;
    largest = std::max(largest, static_cast<std::size_t>(p.count()) * 4);
  }
  EXPECT_LE(static_cast<double>(gradients.bytes()), 0.265 * static_cast<double>(fp32_bytes));
  EXPECT_LE(taken, gradients.bytes() + 4 * kArenaAlignment);  // rounding and counters
  EXPECT_EQ(gradients.vector(2).type, ElementType::kFp32);
  EXPECT_THROW(gradients.vector(0), Error);

  // What the planner measures on arenas that own nothing is what the run takes.
  Arena workspace_plan = Arena::measuring("workspace plan");
  const Context measuring{cpu_backend(), {}, workspace_plan, bench.context.random};
  const auto accumulate_all = [&](const Context& context) {
    gradients.zero(context);
    for (std::size_t p = 0; p < 2; ++p) {
      const Tensor dy =
          bench.fp32(kTokens, parameters[p].rows, [](std::int64_t i) { return normal(9, 0, i); });
      const Tensor x =
          bench.fp32(kTokens, parameters[p].columns, [](std::int64_t i) { return normal(10, 0, i); });
      gradients.add_weight_gradient(context, p, dy, x);
    }
    norm_of(gradients, context, 1.0);
  };
  accumulate_all(measuring);
  accumulate_all(bench.context);
  EXPECT_EQ(bench.workspace.high_water(), workspace_plan.high_water());
  // One parameter's product at a time, and scratch of the matrix product and of rows beside it.
  EXPECT_GE(bench.workspace.high_water(), largest);
  EXPECT_LT(bench.workspace.high_water(), largest + largest / 2);
}

TEST(MainGradients, NormIsThatOfTheStoredGradients) {
  Bench bench;
  MainGradients gradients(bench.memory, {matrix("a", 16, 200), norm_weight("norm", 50)}, {kE4m3},
                          ElementType::kBf16);
  gradients.zero(bench.context);
  EXPECT_EQ(norm_of(gradients, bench.context, 1.0), 0.0);
  gradients.add(bench.context, 0, bench.fp32(16, 200, [](std::int64_t i) { return normal(11, 0, i); }));
  const Tensor vector = gradients.vector(1);
  for (std::int64_t i = 0; i < 50; ++i) vector.as<float>()[i] = static_cast<float>(i);
  double total = 0;
  for (std::size_t p = 0; p < 2; ++p) {
    for (const float value : bench.decoded(gradients.gradient(p)))
      total += static_cast<double>(value) * value;
  }
  EXPECT_NEAR(norm_of(gradients, bench.context, 0.125), std::sqrt(total) * 0.125,
              1e-12 * std::sqrt(total));
  EXPECT_TRUE(gradients.read_counters(bench.context).empty());
}

// E4M3 has no NaN or Inf to store, so the norm must not rely on what it decodes.
TEST(MainGradients, NormNamesTheParameterWhoseGradientIsNotFinite) {
  for (const QuantFormat& format :
       {kE4m3, kInt8, exact_format(ElementType::kFp32), exact_format(ElementType::kBf16)}) {
    for (const float poison :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      Bench bench;
      MainGradients gradients(bench.memory,
                              {matrix("layers.0.down", 4, 128), matrix("layers.1.down", 4, 128)},
                              {format}, ElementType::kBf16);
      gradients.zero(bench.context);
      const Tensor addend = bench.fp32(4, 128, [](std::int64_t i) { return normal(12, 0, i); });
      gradients.add(bench.context, 0, addend);
      addend.as<float>()[200] = poison;
      gradients.add(bench.context, 1, addend);
      try {
        norm_of(gradients, bench.context, 1.0);
        FAIL() << format.to_string() << " took " << poison << " in silence";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("'layers.1.down'"), std::string::npos) << error.what();
        EXPECT_EQ(error.kind(), ErrorKind::kNotFinite);
      }
      gradients.zero(bench.context);
      EXPECT_EQ(norm_of(gradients, bench.context, 1.0), 0.0);
    }
  }
  Bench bench;
  MainGradients gradients(bench.memory, {norm_weight("final_norm", 64)}, {kE4m3}, ElementType::kBf16);
  gradients.zero(bench.context);
  gradients.vector(0).as<float>()[3] = std::numeric_limits<float>::infinity();
  EXPECT_THROW(norm_of(gradients, bench.context, 1.0), Error);
}

TEST(MainGradients, CountersNameTheParameterAndRestartWithTheStep) {
  Bench bench;
  MainGradients gradients(bench.memory, {matrix("a", 2, 128), matrix("b", 2, 128)}, {kE4m3},
                          ElementType::kBf16);
  gradients.zero(bench.context);
  const Tensor tiny =
      bench.fp32(2, 128, [](std::int64_t) { return 1e-40; });  // its scale flushes to zero
  gradients.add(bench.context, 1, tiny);
  const auto counted = gradients.read_counters(bench.context);
  ASSERT_EQ(counted.size(), 1u);
  EXPECT_EQ(counted[0].name, "b");
  EXPECT_EQ(counted[0].counts.flushed_blocks, 2);
  gradients.zero(bench.context);
  EXPECT_TRUE(gradients.read_counters(bench.context).empty());
}

// Two parameters, and two micro-batches, must not share their rounding errors.
TEST(MainGradients, StochasticRoundingIsKeyedByParameterAndMicroBatch) {
  Bench bench;
  MainGradients gradients(bench.memory, {matrix("a", 4, 256), matrix("b", 4, 256)}, {kE4m3Stochastic},
                          ElementType::kBf16);
  const Tensor addend = bench.fp32(4, 256, [](std::int64_t i) { return normal(13, 0, i); });
  const auto stored = [&](std::size_t parameter, std::uint32_t micro_batch) {
    gradients.zero(bench.context);
    bench.context.random.micro_batch = micro_batch;
    gradients.add(bench.context, parameter, addend);
    return bench.decoded(gradients.gradient(parameter));
  };
  EXPECT_EQ(stored(0, 0), stored(0, 0));
  EXPECT_NE(stored(0, 0), stored(1, 0));
  EXPECT_NE(stored(0, 0), stored(0, 1));
}

}  // namespace
}  // namespace agoq

#include "optim/adamw.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <sstream>

#include "core/master_weight.h"
#include "gradients/lone_reducer.h"

namespace agoq {
namespace {

constexpr QuantFormat kE4m3{Code::kE4m3, 128, ScaleType::kFp32, Rounding::kNearest};

double normal(std::uint32_t tensor, std::uint32_t step, std::int64_t index) {
  const RandomKey key{.seed = 4242, .step = step};
  return random_normal(key.with(RandomPurpose::kTest, tensor), static_cast<std::uint64_t>(index));
}

Parameter matrix(std::string name, std::int64_t rows, std::int64_t columns, std::int64_t segments = 1) {
  return {std::move(name), ParameterKind::kGateUp, rows, columns, segments};
}
Parameter norm_weight(std::string name, std::int64_t columns) {
  return {std::move(name), ParameterKind::kNorm, 1, columns, 1};
}

// Value of element `index` of parameter `parameter`.
using Values = std::function<double(std::size_t parameter, std::int64_t index)>;

// Weights, gradients and an optimizer, with one arena per class.
struct Training {
  Arena weight_memory{"weights", host_allocator(), std::size_t{8} << 20};
  Arena gradient_memory{"gradients", host_allocator(), std::size_t{8} << 20};
  Arena moment_memory{"moments", host_allocator(), std::size_t{8} << 20};
  Arena master_memory{"masters", host_allocator(), std::size_t{8} << 20};
  Arena workspace{"workspace", host_allocator(), std::size_t{8} << 20};
  Context context{cpu_backend(), {}, workspace, {.seed = 5}};
  std::vector<Parameter> parameters;
  ElementType type;
  MainGradients gradients;
  LoneReducer alone{gradients};
  AdamW optimizer;
  std::vector<Tensor> weights;

  Training(std::vector<Parameter> list, const OptimizerConfig& config, ElementType model_type,
           const QuantFormat& gradient_format, const Values& initial)
      : parameters(std::move(list)),
        type(model_type),
        gradients(gradient_memory, parameters, {gradient_format}, model_type),
        optimizer(moment_memory, master_memory, parameters, config, model_type) {
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      weights.push_back(weight_memory.take(type, Shape{parameters[p].rows, parameters[p].columns}));
      optimizer.initialise(context, p, host_values(p, initial), weights[p]);
    }
  }

  Tensor host_values(std::size_t p, const Values& values) {
    const Tensor tensor =
        weight_memory.take(ElementType::kFp32, Shape{parameters[p].rows, parameters[p].columns});
    for (std::int64_t i = 0; i < tensor.count(); ++i)
      tensor.as<float>()[i] = static_cast<float>(values(p, i));
    return tensor;
  }

  double step(std::int64_t step, double learning_rate, const Values& gradient,
              double gradient_scale = 1.0) {
    context.random.step = static_cast<std::uint32_t>(step);
    gradients.zero(context);
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const Arena::Scope scope(weight_memory);
      gradients.add(context, p, host_values(p, gradient));
    }
    return optimizer.update(context, weights, alone.reducer, learning_rate, gradient_scale, step);
  }

  double weight(std::size_t p, std::int64_t i) const {
    if (type == ElementType::kFp64) return weights[p].as<double>()[i];
    if (type == ElementType::kFp32) return weights[p].as<float>()[i];
    return to_float(weights[p].as<Bf16>()[i]);
  }
  // The weight in the precision in which it is updated.
  double master(std::size_t p, std::int64_t i) const {
    switch (optimizer.master_kind()) {
      case MasterKind::kNone: return weight(p, i);
      case MasterKind::kFp32: return optimizer.master(p).as<float>()[i];
      case MasterKind::kRemainder:
        return join_master(weights[p].as<Bf16>()[i], optimizer.master(p).as<std::int16_t>()[i]);
    }
    return 0;
  }
};

OptimizerConfig plain_config() {
  OptimizerConfig config;
  config.weight_decay = 0;
  config.clip_norm = 0;
  return config;
}

// --- against PyTorch ---

struct Golden {
  std::int64_t rows, columns, steps;
  OptimizerConfig config = plain_config();
  std::vector<double> initial;
  struct Step {
    double learning_rate;
    std::vector<double> gradient, fp32, fp64;
  };
  std::vector<Step> trajectory;

  Golden() {
    std::ifstream file(AGOQ_TEST_DATA "/adamw.txt");
    std::string line;
    std::getline(file, line);
    check(line.starts_with("# torch"), "tests/golden/adamw.txt was expected to name its torch version");
    file >> rows >> columns >> steps >> config.beta1 >> config.beta2 >> config.epsilon >>
        config.weight_decay;
    initial = read(file);
    for (std::int64_t s = 0; s < steps; ++s) {
      Step step;
      file >> step.learning_rate;
      step.gradient = read(file);
      step.fp32 = read(file);
      step.fp64 = read(file);
      trajectory.push_back(step);
    }
    check(static_cast<bool>(file),
          "tests/golden/adamw.txt ends early: run scripts/make_adamw_golden.py");
  }
  std::vector<double> read(std::istream& file) const {
    std::vector<double> values(static_cast<std::size_t>(rows * columns));
    for (double& value : values) file >> value;
    return values;
  }
};

TEST(AdamW, EqualsPyTorchInFp32AndFp64) {
  const Golden golden;
  ASSERT_GE(golden.steps, 20);
  for (const ElementType type : {ElementType::kFp32, ElementType::kFp64}) {
    Training training(
        {matrix("w", golden.rows, golden.columns)}, golden.config, type, exact_format(type),
        [&](std::size_t, std::int64_t i) { return golden.initial[static_cast<std::size_t>(i)]; });
    EXPECT_EQ(training.optimizer.first_moment(0).format, exact_format(type));
    for (std::int64_t s = 0; s < golden.steps; ++s) {
      const Golden::Step& step = golden.trajectory[static_cast<std::size_t>(s)];
      training.step(s + 1, step.learning_rate, [&](std::size_t, std::int64_t i) {
        return step.gradient[static_cast<std::size_t>(i)];
      });
      for (std::int64_t i = 0; i < golden.rows * golden.columns; ++i) {
        const bool is_fp32 = type == ElementType::kFp32;
        const double expected = (is_fp32 ? step.fp32 : step.fp64)[static_cast<std::size_t>(i)];
        ASSERT_NEAR(training.weight(0, i), expected,
                    (is_fp32 ? 1e-6 : 1e-14) * std::max(1.0, std::abs(expected)))
            << name_of(type) << " step " << s + 1 << " element " << i;
      }
    }
  }
}

// A BF16 model with an FP32 master is PyTorch's FP32 trajectory, seen through rounded weights.
TEST(AdamW, MastersOfABf16ModelEqualPyTorchInFp32) {
  const Golden golden;
  for (const MasterKind kind : {MasterKind::kFp32, MasterKind::kRemainder}) {
    OptimizerConfig config = golden.config;
    config.master = kind;
    Training training({matrix("w", golden.rows, golden.columns)}, config, ElementType::kBf16,
                      exact_format(ElementType::kFp32), [&](std::size_t, std::int64_t i) {
                        return golden.initial[static_cast<std::size_t>(i)];
                      });
    for (std::int64_t s = 0; s < golden.steps; ++s) {
      const Golden::Step& step = golden.trajectory[static_cast<std::size_t>(s)];
      training.step(s + 1, step.learning_rate, [&](std::size_t, std::int64_t i) {
        return step.gradient[static_cast<std::size_t>(i)];
      });
    }
    for (std::int64_t i = 0; i < golden.rows * golden.columns; ++i) {
      const double expected = golden.trajectory.back().fp32[static_cast<std::size_t>(i)];
      EXPECT_NEAR(training.master(0, i), expected, 1e-6 * std::max(1.0, std::abs(expected)));
      EXPECT_EQ(training.weight(0, i),
                to_float(to_bf16_half_away(static_cast<float>(training.master(0, i)))));
    }
  }
}

// --- master weights ---

TEST(AdamW, SplitAndFp32MastersGiveTheSameBitsOver50Steps) {
  const std::vector<Parameter> parameters{matrix("w", 24, 520, 4), matrix("small", 3, 40),
                                          norm_weight("norm", 520)};
  const auto initial = [](std::size_t p, std::int64_t i) {
    return 0.02 * normal(static_cast<std::uint32_t>(p), 0, i);
  };
  OptimizerConfig config;
  config.master = MasterKind::kFp32;
  Training whole(parameters, config, ElementType::kBf16, kE4m3, initial);
  config.master = MasterKind::kRemainder;
  Training split(parameters, config, ElementType::kBf16, kE4m3, initial);
  config.master = MasterKind::kNone;
  Training none(parameters, config, ElementType::kBf16, kE4m3, initial);
  const auto equal_weights = [&](const Training& a, const Training& b) {
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      if (std::memcmp(a.weights[p].data, b.weights[p].data, a.weights[p].bytes()) != 0) return false;
    }
    return true;
  };
  EXPECT_TRUE(equal_weights(whole, split) && equal_weights(whole, none));
  for (std::uint32_t step = 1; step <= 50; ++step) {
    const auto gradient = [&](std::size_t p, std::int64_t i) {
      return 1e-3 * normal(10 + static_cast<std::uint32_t>(p), step, i);
    };
    for (Training* training : {&whole, &split, &none}) training->step(step, 1e-3, gradient);
    ASSERT_TRUE(equal_weights(whole, split)) << "step " << step;
  }
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    for (std::int64_t i = 0; i < parameters[p].count(); ++i)
      ASSERT_EQ(whole.master(p, i), split.master(p, i));
  }
  EXPECT_FALSE(equal_weights(whole, none));  // rounded stochastically instead
  EXPECT_EQ(whole.optimizer.master_bytes(), 2 * split.optimizer.master_bytes());
  EXPECT_EQ(none.optimizer.master_bytes(), 0u);
}

// Weights of 1 with a BF16 spacing of h = 2^-8 below; a steady gradient moves them by the learning rate
// of 1e-4 per step, a 39th of h, which nearest rounding would lose every time. Stochastic rounding moves
// by h with probability 1e-4 / h: unbiased, with a variance of about 1e-4 h per step and element.
TEST(AdamW, StochasticRoundingWithoutMasterLosesNoSmallUpdates) {
  constexpr std::int64_t kElements = 64 * 256;
  constexpr int kSteps = 200;
  constexpr double kRate = 1e-4;
  OptimizerConfig config = plain_config();
  config.master = MasterKind::kNone;
  config.moments_8bit = false;
  Training training({matrix("w", 64, 256)}, config, ElementType::kBf16, exact_format(ElementType::kFp32),
                    [](std::size_t, std::int64_t) { return 1.0; });
  for (int step = 1; step <= kSteps; ++step) {
    // The micro-batch that the context saw last is not part of the key.
    training.context.random.micro_batch = static_cast<std::uint32_t>(step % 3);
    training.step(step, kRate, [](std::size_t, std::int64_t) { return 0.5; });
  }
  double moved = 0;
  int distinct = 0;
  for (std::int64_t i = 0; i < kElements; ++i) {
    moved += 1.0 - training.weight(0, i);
    distinct += training.weight(0, i) != training.weight(0, 0);
  }
  moved /= kElements;
  const double deviation = std::sqrt(kSteps * kRate * 0x1p-8 / kElements);
  EXPECT_NEAR(moved, kSteps * kRate, 5 * deviation);
  EXPECT_LT(5 * deviation, 0.02 * kSteps * kRate);
  EXPECT_GT(distinct, kElements / 2);  // elements are rounded with numbers of their own
}

TEST(AdamW, StochasticRoundingIsKeyedByStepAndTensorAndNotByMicroBatch) {
  const auto run = [](std::uint32_t micro_batch, std::uint64_t seed) {
    OptimizerConfig config = plain_config();
    config.master = MasterKind::kNone;
    Training training({matrix("a", 4, 100), matrix("b", 4, 100)}, config, ElementType::kBf16, kE4m3,
                      [](std::size_t, std::int64_t) { return 1.0; });
    training.context.random.seed = seed;
    training.context.random.micro_batch = micro_batch;
    training.step(1, 1e-3, [](std::size_t, std::int64_t) { return 1.0; });
    std::vector<std::vector<double>> weights(2);
    for (std::size_t p = 0; p < 2; ++p) {
      for (std::int64_t i = 0; i < 400; ++i) weights[p].push_back(training.weight(p, i));
    }
    return weights;
  };
  const auto reference = run(0, 1);
  EXPECT_EQ(reference, run(3, 1));
  EXPECT_NE(reference, run(0, 2));
  EXPECT_NE(reference[0], reference[1]);
}

// --- 8-bit moments ---

TEST(AdamW, MomentsAreEightBitFromSmallTensorOnAndFollowTheGrid) {
  const std::vector<Parameter> parameters{matrix("large", 16, 512, 4), matrix("least", 8, 512),
                                          matrix("small", 7, 585), norm_weight("norm", 512)};
  Arena moments("moments", host_allocator(), std::size_t{1} << 20);
  Arena masters("masters", host_allocator(), std::size_t{1} << 20);
  const AdamW optimizer(moments, masters, parameters, {}, ElementType::kBf16);
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const bool quantised = p < 2;  // 8,192 and 4,096 elements; then 4,095 and 512
    EXPECT_EQ(optimizer.first_moment(p).format.to_string(), quantised ? "dynamic8/256/fp32" : "fp32");
    EXPECT_EQ(optimizer.second_moment(p).format.code, quantised ? Code::kDynamic8Unsigned : Code::kFp32);
    EXPECT_EQ(optimizer.first_moment(p).grid, parameters[p].grid());
  }
  const AdamW large(moments, masters, {matrix("w", 64, 512)}, {}, ElementType::kBf16);
  EXPECT_LE(static_cast<double>(large.moment_bytes()), 0.265 * 8 * 64 * 512);
  EXPECT_EQ(large.master_bytes(), 2u * 64 * 512);
  OptimizerConfig exact;
  exact.moments_8bit = false;
  const AdamW fp32(moments, masters, {matrix("w", 8, 512)}, exact, ElementType::kFp32);
  EXPECT_EQ(fp32.moment_bytes(), 8u * 8 * 512);
  EXPECT_EQ(fp32.master_kind(), MasterKind::kNone);
}

// The worst the dynamic map can do, carried along. Its widest steps, in the top decade, are .9 / 64 of
// the block's absmax for m and .9 / 128 for v, so encoding adds at most half of that, and
//   B_m <- beta1 (B_m + .9/128 absmax_m)      B_v <- beta2 (B_v + .9/256 absmax_v)
// bound the error of the moments that the update uses; a weight then differs by at most
//   rate (B_m / d- + |m| (1 / d- - 1 / d+)),   d-+ = sqrt(v -+ B_v) / sqrt(1 - beta2^t) + epsilon
// per step. Gradients between .5 and 1 in magnitude keep v - B_v away from zero.
TEST(AdamW, EightBitMomentsTrackFp32WithinTheDerivedBound) {
  constexpr std::int64_t kRows = 8;
  constexpr std::int64_t kColumns = 640;  // blocks of 256, 256 and 128
  constexpr auto kElements = static_cast<std::size_t>(kRows * kColumns);
  constexpr double kRate = 1e-3;
  OptimizerConfig config = plain_config();
  const auto initial = [](std::size_t, std::int64_t i) { return 0.02 * normal(30, 0, i); };
  Training packed({matrix("w", kRows, kColumns)}, config, ElementType::kFp32,
                  exact_format(ElementType::kFp32), initial);
  config.moments_8bit = false;
  Training exact({matrix("w", kRows, kColumns)}, config, ElementType::kFp32,
                 exact_format(ElementType::kFp32), initial);
  ASSERT_EQ(packed.optimizer.first_moment(0).format.code, Code::kDynamic8);

  std::vector<double> m(kElements), v(kElements), bound_m(kElements), bound_v(kElements),
      bound(kElements);
  double difference = 0;
  double distance = 0;
  for (std::uint32_t step = 1; step <= 60; ++step) {
    const auto gradient = [&](std::size_t, std::int64_t i) {
      const double z = normal(31, step, i) + 0.5;
      return std::copysign(0.5 + 0.5 * std::min(1.0, std::abs(z) / 3.0), z);
    };
    packed.step(step, kRate, gradient);
    exact.step(step, kRate, gradient);
    const double correction1 = 1 - std::pow(config.beta1, step);
    const double correction2 = std::sqrt(1 - std::pow(config.beta2, step));
    for (std::size_t i = 0; i < kElements; ++i) {
      const double g = static_cast<float>(gradient(0, static_cast<std::int64_t>(i)));
      m[i] = config.beta1 * m[i] + (1 - config.beta1) * g;
      v[i] = config.beta2 * v[i] + (1 - config.beta2) * g * g;
      const double nearer = std::sqrt(std::max(0.0, v[i] - bound_v[i])) / correction2 + config.epsilon;
      const double farther = std::sqrt(v[i] + bound_v[i]) / correction2 + config.epsilon;
      bound[i] +=
          kRate / correction1 * (bound_m[i] / nearer + std::abs(m[i]) * (1 / nearer - 1 / farther));
    }
    for (std::size_t begin = 0; begin < kElements;) {
      const std::size_t column = begin % kColumns;
      const std::size_t end = begin + std::min<std::size_t>(256, kColumns - column);
      double absmax_m = 0;
      double absmax_v = 0;
      for (std::size_t i = begin; i < end; ++i) {
        absmax_m = std::max(absmax_m, std::abs(m[i]) + bound_m[i]);
        absmax_v = std::max(absmax_v, v[i] + bound_v[i]);
      }
      for (std::size_t i = begin; i < end; ++i) {
        bound_m[i] = config.beta1 * (bound_m[i] + 0.9 / 128 * absmax_m);
        bound_v[i] = config.beta2 * (bound_v[i] + 0.9 / 256 * absmax_v);
      }
      begin = end;
    }
  }
  for (std::size_t i = 0; i < kElements; ++i) {
    const auto index = static_cast<std::int64_t>(i);
    const double error = packed.weight(0, index) - exact.weight(0, index);
    ASSERT_LE(std::abs(error), bound[i] + 1e-6) << "element " << i;
    difference += error * error;
    const double moved = exact.weight(0, index) - static_cast<float>(initial(0, index));
    distance += moved * moved;
  }
  // Errors of rounding are mostly independent, so far below the worst case; but there must be some.
  EXPECT_LT(std::sqrt(difference / distance), 0.02);
  EXPECT_GT(std::sqrt(difference / distance), 1e-4);
}

// With heavy-tailed gradients v spans more than the map's seven decades; no weight may leap for it.
TEST(AdamW, EightBitMomentsTrackFp32UnderHeavyTails) {
  constexpr std::int64_t kRows = 32;
  constexpr std::int64_t kColumns = 512;
  constexpr int kSteps = 50;
  OptimizerConfig config = plain_config();
  const auto initial = [](std::size_t, std::int64_t) { return 0.0; };
  Training packed({matrix("w", kRows, kColumns)}, config, ElementType::kFp32,
                  exact_format(ElementType::kFp32), initial);
  config.moments_8bit = false;
  Training exact({matrix("w", kRows, kColumns)}, config, ElementType::kFp32,
                 exact_format(ElementType::kFp32), initial);
  for (std::uint32_t step = 1; step <= kSteps; ++step) {
    const auto gradient = [&](std::size_t, std::int64_t i) {
      // A coherent part per element, noise, and every fourth step only for half of the rows.
      if ((i / kColumns) % 2 == 1 && step % 4 != 1) return 0.0;
      const double size = 1e-3 * std::exp(1.5 * normal(41, 0, i));
      return size * (normal(42, 0, i) + normal(43, step, i));
    };
    packed.step(step, 1e-3, gradient);
    exact.step(step, 1e-3, gradient);
  }
  double product = 0, packed_square = 0, exact_square = 0, largest = 0;
  for (std::int64_t i = 0; i < kRows * kColumns; ++i) {
    product += packed.weight(0, i) * exact.weight(0, i);
    packed_square += packed.weight(0, i) * packed.weight(0, i);
    exact_square += exact.weight(0, i) * exact.weight(0, i);
    largest = std::max(largest, std::abs(packed.weight(0, i)));
  }
  EXPECT_GT(product / std::sqrt(packed_square * exact_square), 0.99);
  EXPECT_LT(largest, 1e-3 * kSteps * 2);
}

// One element of the block has 3e-4 of the others' gradient, so its v is 9e-8 of the largest and would
// be stored as zero, while its m is stored. A zero gradient then must not divide m by epsilon.
TEST(AdamW, AWeightDoesNotLeapWhereItsSecondMomentUnderflows) {
  OptimizerConfig config = plain_config();
  Training training({matrix("w", 16, 256)}, config, ElementType::kFp32, exact_format(ElementType::kFp32),
                    [](std::size_t, std::int64_t) { return 0.0; });
  training.step(1, 1e-3, [](std::size_t, std::int64_t i) { return i % 256 == 7 ? 3e-4 : 1.0; });
  const double before = training.weight(0, 7);
  training.step(2, 1e-3, [](std::size_t, std::int64_t) { return 0.0; });
  EXPECT_LE(std::abs(training.weight(0, 7) - before), 1e-3);
  EXPECT_GT(std::abs(training.weight(0, 7) - before), 1e-4);
}

// --- scale, clipping, decay ---

TEST(AdamW, ClipsByTheNormOfTheEightBitGradients) {
  const std::vector<Parameter> parameters{matrix("w", 16, 256), norm_weight("norm", 256)};
  const auto initial = [](std::size_t p, std::int64_t i) {
    return normal(static_cast<std::uint32_t>(p), 0, i);
  };
  const auto gradient = [](std::size_t p, std::int64_t i) {
    return normal(50 + static_cast<std::uint32_t>(p), 1, i);
  };
  OptimizerConfig config = plain_config();
  config.clip_norm = 1.0;
  config.epsilon = 1e-2;  // so that the gradient's scale shows in the update
  Training clipped(parameters, config, ElementType::kFp32, kE4m3, initial);
  config.clip_norm = 0.0;
  Training scaled(parameters, config, ElementType::kFp32, kE4m3, initial);
  Training unscaled(parameters, config, ElementType::kFp32, kE4m3, initial);

  const double norm = clipped.step(1, 1e-2, gradient, 0.5);
  double total = 0;
  for (std::size_t p = 0; p < 2; ++p) {
    const Arena::Scope scope(clipped.weight_memory);
    const Tensor decoded = clipped.host_values(p, gradient);
    clipped.context.backend.dequantize(clipped.context, clipped.gradients.gradient(p), decoded);
    for (std::int64_t i = 0; i < decoded.count(); ++i) {
      total += static_cast<double>(decoded.as<float>()[i]) * decoded.as<float>()[i];
    }
  }
  EXPECT_NEAR(norm, 0.5 * std::sqrt(total), 1e-12 * norm);
  EXPECT_GT(norm, 10.0);

  scaled.step(1, 1e-2, gradient, 0.5 * (1.0 / norm));
  unscaled.step(1, 1e-2, gradient, 0.5);
  bool differs = false;
  for (std::size_t p = 0; p < 2; ++p) {
    for (std::int64_t i = 0; i < parameters[p].count(); ++i) {
      ASSERT_EQ(clipped.weight(p, i), scaled.weight(p, i));
      differs = differs || clipped.weight(p, i) != unscaled.weight(p, i);
    }
  }
  EXPECT_TRUE(differs);

  // A norm under the limit is left alone.
  config.clip_norm = 2.0 * norm;
  Training loose(parameters, config, ElementType::kFp32, kE4m3, initial);
  loose.step(1, 1e-2, gradient, 0.5);
  for (std::int64_t i = 0; i < 256; ++i) ASSERT_EQ(loose.weight(0, i), unscaled.weight(0, i));
}

TEST(AdamW, DecaysMatricesAndNotVectors) {
  OptimizerConfig config = plain_config();
  config.weight_decay = 0.1;
  Training training({matrix("w", 4, 64), norm_weight("norm", 64)}, config, ElementType::kFp32, kE4m3,
                    [](std::size_t, std::int64_t i) { return 1.0 + static_cast<double>(i) / 64; });
  EXPECT_EQ(training.gradients.gradient(1).format, exact_format(ElementType::kFp32));
  training.step(1, 0.5, [](std::size_t, std::int64_t) { return 0.0; });
  for (std::int64_t i = 0; i < 64; ++i) {
    const auto start = static_cast<float>(1.0 + static_cast<double>(i) / 64);
    EXPECT_EQ(training.weight(0, i), 0.95f * start);
    EXPECT_EQ(training.weight(1, i), start);
  }
}

TEST(AdamW, RefusesWhatItCannotUpdate) {
  const auto zeros = [](std::size_t, std::int64_t) { return 0.0; };
  OptimizerConfig config = plain_config();
  Training training({matrix("layers.2.o", 16, 256)}, config, ElementType::kBf16, kE4m3, zeros);
  EXPECT_THROW(training.optimizer.update(training.context, {}, training.alone.reducer, 1e-3, 1.0, 1),
               Error);
  EXPECT_THROW(training.step(0, 1e-3, zeros), Error);
  // Finite, and its square overflows the second moment.
  EXPECT_THROW(training.step(1, 1e-3, [](std::size_t, std::int64_t) { return 1e30; }), Error);
  try {
    training.step(1, 1e-3, [](std::size_t, std::int64_t i) {
      return i == 9 ? std::numeric_limits<double>::quiet_NaN() : 1.0;
    });
    FAIL() << "a NaN gradient was taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("'layers.2.o'"), std::string::npos) << error.what();
  }
  for (std::int64_t i = 0; i < 16 * 256; ++i)
    ASSERT_EQ(training.weight(0, i), 0.0);  // nothing was updated

  Arena arena("state", host_allocator(), 4096);
  config.epsilon = 0;
  EXPECT_THROW(AdamW(arena, arena, {}, config, ElementType::kBf16), Error);
  config = {};
  config.beta2 = 1.0;
  EXPECT_THROW(AdamW(arena, arena, {}, config, ElementType::kBf16), Error);
  EXPECT_THROW(AdamW(arena, arena, {}, {}, ElementType::kFp16), Error);
}

// --- determinism and memory ---

TEST(AdamW, BytesDoNotDependOnTheNumberOfThreads) {
  const std::vector<Parameter> parameters{matrix("w", 37, 300, 3), norm_weight("norm", 300)};
  const int threads_before = omp_get_max_threads();
  for (const MasterKind kind : {MasterKind::kNone, MasterKind::kRemainder}) {
    std::vector<std::vector<std::byte>> states;
    for (const int threads : {1, 2, 5}) {
      omp_set_num_threads(threads);
      OptimizerConfig config;
      config.master = kind;
      Training training(parameters, config, ElementType::kBf16, kE4m3,
                        [](std::size_t, std::int64_t i) { return normal(60, 0, i); });
      for (std::uint32_t step = 1; step <= 3; ++step) {
        training.step(step, 1e-2, [&](std::size_t, std::int64_t i) { return normal(61, step, i); });
      }
      std::vector<std::byte> state;
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        const auto append = [&](const std::byte* data, std::size_t bytes) {
          state.insert(state.end(), data, data + bytes);
        };
        append(training.weights[p].data, training.weights[p].bytes());
        const QuantTensor& first = training.optimizer.first_moment(p);
        const QuantTensor& second = training.optimizer.second_moment(p);
        append(first.codes,
               static_cast<std::size_t>(row_bytes(first.format, first.grid).codes * first.rows()));
        append(second.codes,
               static_cast<std::size_t>(row_bytes(second.format, second.grid).codes * second.rows()));
        if (training.optimizer.master(p))
          append(training.optimizer.master(p).data, training.optimizer.master(p).bytes());
      }
      states.push_back(state);
    }
    omp_set_num_threads(threads_before);
    EXPECT_EQ(states[0], states[1]);
    EXPECT_EQ(states[0], states[2]);
  }
}

TEST(AdamW, TakesRowsOfWorkspaceAndMeasuresThem) {
  const std::vector<Parameter> parameters{matrix("w", 256, 512)};
  Training training(parameters, {}, ElementType::kBf16, kE4m3,
                    [](std::size_t, std::int64_t) { return 1.0; });
  training.step(1, 1e-3, [](std::size_t, std::int64_t) { return 1.0; });

  Arena state = Arena::measuring("state plan");
  Arena workspace = Arena::measuring("workspace plan");
  const Context measuring{cpu_backend(), {}, workspace, {}};
  MainGradients gradients(state, parameters, {kE4m3}, ElementType::kBf16);
  AdamW optimizer(state, state, parameters, {}, ElementType::kBf16);
  const Tensor weight = state.take(ElementType::kBf16, Shape{256, 512});
  const Tensor initial = state.take(ElementType::kFp32, Shape{256, 512});
  optimizer.initialise(measuring, 0, initial, weight);
  gradients.zero(measuring);
  gradients.add(measuring, 0, initial);
  const LoneReducer alone(gradients);
  EXPECT_EQ(optimizer.update(measuring, {weight}, alone.reducer, 1e-3, 1.0, 1), 0.0);
  EXPECT_EQ(workspace.high_water(), training.workspace.high_water());
  // Rows per thread, not a gradient or a moment of the whole tensor.
  EXPECT_LT(training.workspace.high_water(), std::size_t{64} * 512 * 4);
}

}  // namespace
}  // namespace agoq

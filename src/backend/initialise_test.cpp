#include "backend/operation_testing.h"
#include "core/master_weight.h"
#include "core/random.h"

namespace agoq {
namespace {

using namespace testing_operations;

TEST(FillNormal, IsTheCounterBasedNormalTimesTheDeviation) {
  const RandomKey key = RandomKey{.seed = 3}.with(RandomPurpose::kInitialWeight, 5);
  for (const Build& build : builds()) {
    Bench bench(*build.backend);
    const Tensor x = bench.empty(ElementType::kFp32, Shape{3, 5001});
    build.backend->fill_normal(bench.context, key, 0.02, x);
    for (std::int64_t i = 0; i < x.count(); ++i) {
      ASSERT_EQ(x.as<float>()[i],
                static_cast<float>(0.02 * random_normal(key, static_cast<std::uint64_t>(i))))
          << build.name << " " << i;
    }
  }
}

TEST(InitialiseWeight, WeightAndMasterAreTheInitialValues) {
  const Values values = normal(1001, 1, 0.3);
  for (const Build& build : builds()) {
    for (const MasterKind kind : {MasterKind::kNone, MasterKind::kFp32, MasterKind::kRemainder}) {
      Bench bench(*build.backend);
      Values off_grid = values;  // not BF16 numbers
      for (double& value : off_grid) value *= 1.001;
      const Tensor initial = bench.of(ElementType::kFp32, Shape{1, 1001}, off_grid);
      const Tensor weight = bench.empty(ElementType::kBf16, initial.shape);
      Tensor master;
      if (kind == MasterKind::kFp32) master = bench.empty(ElementType::kFp32, initial.shape);
      if (kind == MasterKind::kRemainder) master = bench.empty(ElementType::kInt16, initial.shape);
      build.backend->initialise_weight(bench.context, initial, kind, weight, master);
      for (std::int64_t i = 0; i < initial.count(); ++i) {
        const float value = initial.as<float>()[i];
        ASSERT_EQ(weight.as<Bf16>()[i].bits, to_bf16_half_away(value).bits);
        if (kind == MasterKind::kFp32) {
          ASSERT_EQ(master.as<float>()[i], value);
        }
        if (kind == MasterKind::kRemainder) {
          ASSERT_EQ(join_master(weight.as<Bf16>()[i], master.as<std::int16_t>()[i]), value);
        }
      }
    }
    Bench bench(*build.backend);
    const Tensor initial = bench.of(ElementType::kFp32, Shape{1001}, values);
    const Tensor weight = bench.empty(ElementType::kFp32, initial.shape);
    build.backend->initialise_weight(bench.context, initial, MasterKind::kRemainder, weight, {});
    EXPECT_EQ(Bench::get(weight), values);
    EXPECT_THROW(build.backend->initialise_weight(bench.context, initial, MasterKind::kFp32,
                                                  bench.empty(ElementType::kBf16, initial.shape), {}),
                 Error);
  }
}

}  // namespace
}  // namespace agoq

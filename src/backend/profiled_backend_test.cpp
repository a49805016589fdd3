#include "backend/profiled_backend.h"

#include "backend/operation_testing.h"

namespace agoq {
namespace {

using namespace testing_operations;

TEST(ProfiledBackend, ComputesWhatTheBackendDoesAndCountsIt) {
  ProfiledBackend profiled(cpu_backend());
  Bench plain, watched(profiled);
  const Values a = normal(60 * 40, 1), b = normal(50 * 40, 2);
  std::vector<Values> results;
  for (Bench* bench : {&plain, &watched}) {
    const Tensor left = bench->of(ElementType::kBf16, Shape{60, 40}, a);
    const Tensor right = bench->of(ElementType::kBf16, Shape{50, 40}, b);
    const Tensor product = bench->empty(ElementType::kFp32, Shape{60, 50});
    Backend& backend = bench->context.backend;
    backend.matmul(bench->context, left, Transpose::kNo, right, Transpose::kYes, product, false);
    backend.matmul(bench->context, left, Transpose::kNo, right, Transpose::kYes, product, true);
    backend.add(bench->context, left, left, left);
    results.push_back(Bench::get(product));
    results.push_back(Bench::get(left));
  }
  EXPECT_EQ(results[0], results[2]);
  EXPECT_EQ(results[1], results[3]);

  const std::vector<OperationProfile> profile = profiled.profile();
  ASSERT_EQ(profile.size(), 2u);
  EXPECT_GE(profile[0].seconds, profile[1].seconds);
  for (const OperationProfile& operation : profile) {
    EXPECT_GT(operation.seconds, 0.0);
    if (operation.operation == "matmul") {
      EXPECT_EQ(operation.calls, 2);
      EXPECT_EQ(operation.flops, 2 * 2.0 * 60 * 50 * 40);
      // The second product reads its result as well.
      EXPECT_EQ(operation.bytes, 2 * 2.0 * (60 * 40 + 50 * 40) + 3 * 4.0 * 60 * 50);
    } else {
      EXPECT_EQ(operation.operation, "add");
      EXPECT_EQ(operation.flops, 0);
      EXPECT_EQ(operation.bytes, 3 * 2.0 * 60 * 40);
    }
  }
  profiled.reset();
  EXPECT_TRUE(profiled.profile().empty());
}

TEST(ProfiledBackend, CountsATransposedProductAndAnEmptyOne) {
  ProfiledBackend profiled(cpu_backend());
  Bench bench(profiled);
  const Tensor right = bench.of(ElementType::kFp32, Shape{40, 50}, normal(40 * 50, 1));
  const Tensor left = bench.of(ElementType::kFp32, Shape{40, 60}, normal(40 * 60, 2));
  profiled.matmul(bench.context, left, Transpose::kYes, right, Transpose::kNo,
                  bench.empty(ElementType::kFp32, Shape{60, 50}), false);
  profiled.matmul(bench.context, bench.empty(ElementType::kFp32, Shape{0, 40}), Transpose::kNo, right,
                  Transpose::kNo, bench.empty(ElementType::kFp32, Shape{0, 50}), false);
  const std::vector<OperationProfile> profile = profiled.profile();
  ASSERT_EQ(profile.size(), 1u);
  EXPECT_EQ(profile[0].calls, 2);
  EXPECT_EQ(profile[0].flops, 2.0 * 60 * 50 * 40);
}

TEST(ProfiledBackend, MeasuresNoTimeOfAPlan) {
  ProfiledBackend profiled(cpu_backend());
  Arena memory = Arena::measuring("tensors"), workspace = Arena::measuring("workspace");
  const Context context{profiled, {}, workspace, {}};
  const Tensor a = memory.take(ElementType::kBf16, Shape{60, 40});
  profiled.matmul(context, a, Transpose::kNo, a, Transpose::kYes,
                  memory.take(ElementType::kFp32, Shape{60, 60}), false);
  EXPECT_TRUE(profiled.profile().empty());
  EXPECT_GT(workspace.high_water(), 0u);
}

}  // namespace
}  // namespace agoq

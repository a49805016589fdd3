#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/operation_testing.h"

namespace agoq {
namespace {

using namespace testing_operations;

constexpr auto kFp64 = ElementType::kFp64, kFp32 = ElementType::kFp32, kBf16 = ElementType::kBf16,
               kFp16 = ElementType::kFp16;

TEST(Movement, CopyConvertsBetweenAllFloatingPointTypes) {
  for (const Build& build : builds()) {
    Bench bench(*build.backend);
    const Values values = normal(10001, 1);  // BF16 holds them; FP16 does too but for the least ones
    for (const ElementType from : {kFp64, kFp32, kBf16, kFp16}) {
      const Tensor source = bench.of(from, Shape{10001}, values);
      for (const ElementType to : {kFp64, kFp32, kBf16, kFp16}) {
        const Tensor destination = bench.empty(to, Shape{73, 137});
        build.backend->copy(bench.context, source, destination);
        const double tolerance = from == kFp16 || to == kFp16 ? 1e-6 : 0.0;
        EXPECT_LE(relative_error(Bench::get(destination), Bench::get(source)), tolerance)
            << name_of(from) << " to " << name_of(to);
      }
    }
  }
}

TEST(Movement, CopyRoundsOnceToNearestEven) {
  Bench bench;
  const double tie = 1 + 0x1p-8;  // half way between two BF16 numbers, the lower even
  // Rounded to FP32 first, the second would become the tie and then 1.
  const Values wide{tie,   tie + 0x1p-40, 1 + 0x3p-8,         -tie - 0x1p-40,
                    1e300, 0x1p-134,      0x1p-134 + 0x1p-180};
  const Values narrow{1, 1 + 0x1p-7, 1 + 0x1p-6, -1 - 0x1p-7, std::numeric_limits<double>::infinity(),
                      0, 0x1p-133};
  const Tensor destination = bench.empty(kBf16, Shape{7});
  bench.context.backend.copy(bench.context, bench.of(kFp64, Shape{7}, wide), destination);
  EXPECT_EQ(Bench::get(destination), narrow);
}

TEST(Movement, CopyRefusesOtherCountsAndIntegers) {
  Bench bench;
  Backend& backend = bench.context.backend;
  const Tensor four = bench.empty(kFp32, Shape{4}), integers = bench.integers({1, 2, 3, 4});
  EXPECT_THROW(backend.copy(bench.context, four, bench.empty(kFp32, Shape{5})), Error);
  EXPECT_THROW(backend.copy(bench.context, integers, four), Error);
  const Tensor same = bench.integers({0, 0, 0, 0});
  backend.copy(bench.context, integers, same);
  EXPECT_EQ(same.as<std::int32_t>()[3], 4);
}

TEST(Movement, BytesGoInAndOutAndToZero) {
  Bench bench;
  Backend& backend = bench.context.backend;
  const std::size_t bytes = (std::size_t{3} << 20) + 17;  // more than two pieces
  std::vector<std::byte> there(bytes), back(bytes);
  for (std::size_t i = 0; i < bytes; ++i) there[i] = static_cast<std::byte>(i * 31 + i / 256);
  const Tensor memory = bench.empty(ElementType::kUint8, Shape{static_cast<std::int64_t>(bytes)});
  backend.upload(bench.context, there.data(), memory.data, bytes);
  backend.read(bench.context, memory.data, back.data(), bytes);
  EXPECT_EQ(back, there);
  backend.zero(bench.context, memory.data, bytes - 1);
  backend.read(bench.context, memory.data, back.data(), bytes);
  EXPECT_EQ(std::count(back.begin(), back.end() - 1, std::byte{0}),
            static_cast<std::ptrdiff_t>(bytes - 1));
  EXPECT_EQ(back.back(), there.back());
}

TEST(Movement, ReadsZerosWhenMeasuring) {
  Arena workspace = Arena::measuring("plan");
  const Context context{cpu_backend(), {}, workspace, {}};
  std::uint64_t value = 42;
  cpu_backend().read(context, workspace.take(8), &value, 8);
  EXPECT_EQ(value, 0u);
}

TEST(Movement, AddAlsoInPlace) {
  Bench bench;
  Backend& backend = bench.context.backend;
  const Values a = normal(1003, 1), b = normal(1003, 2);
  for (const ElementType type : {kFp64, kFp32, kBf16}) {
    const Tensor left = bench.of(type, Shape{17, 59}, a), right = bench.of(type, Shape{17, 59}, b);
    Values expected(a.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      const double sum = a[i] + b[i];
      expected[i] = type == kBf16   ? static_cast<double>(to_float(to_bf16(static_cast<float>(sum))))
                    : type == kFp32 ? static_cast<double>(static_cast<float>(sum))
                                    : sum;
    }
    backend.add(bench.context, left, right, left);
    EXPECT_EQ(Bench::get(left), expected) << name_of(type);
    EXPECT_THROW(backend.add(bench.context, left, right, bench.empty(type, Shape{16, 59})), Error);
  }
}

}  // namespace
}  // namespace agoq

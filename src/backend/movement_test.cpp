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

std::vector<QuantFormat> formats_with_every_plane() {
  return {{Code::kE4m3, 128, ScaleType::kFp32},
          {Code::kInt6, 64, ScaleType::kTwoLevel},
          {Code::kNf4, 32, ScaleType::kBf16},
          exact_format(kFp32),
          exact_format(kBf16)};
}

TEST(Movement, RowsAreGatheredAndScatteredAsTheyAre) {
  const std::vector<std::int32_t> numbers{8, 0, 3, 4, 11};  // in any order
  const Values untouched(12 * 200, 7.0);
  for (const Build& build : builds()) {
    for (const QuantFormat& format : formats_with_every_plane()) {
      Bench bench(*build.backend);
      const Context& context = bench.context;
      const BlockGrid grid{12, 200, 2}, some{5, 200, 2};
      const QuantTensor source = take(bench.workspace(), format, grid);
      const QuantTensor target = take(bench.workspace(), format, grid);
      const QuantTensor gathered = take(bench.workspace(), format, some);
      build.backend->quantize(context, bench.of(kFp32, Shape{12, 200}, normal(12 * 200, 1)), source, {},
                              {});
      build.backend->quantize(context, bench.of(kFp32, Shape{12, 200}, untouched), target, {}, {});
      const Tensor rows = bench.integers(numbers);
      build.backend->gather_rows(context, source, rows, gathered);
      build.backend->scatter_rows(context, gathered, rows, target);
      const auto decoded = [&](const QuantTensor& tensor) {
        const Tensor values = bench.empty(kFp32, Shape{tensor.rows(), tensor.width()});
        build.backend->dequantize(context, tensor, values);
        return Bench::get(values);
      };
      const Values all = decoded(source), some_values = decoded(gathered), back = decoded(target);
      const Values other = decoded(target.slice_rows(1, 2));
      for (std::size_t row = 0; row < 12; ++row) {
        const auto at = std::find(numbers.begin(), numbers.end(), static_cast<std::int32_t>(row));
        const auto place = static_cast<std::size_t>(at - numbers.begin());
        for (std::size_t i = 0; i < 200; ++i) {
          const double value = back[row * 200 + i];
          if (at == numbers.end()) {
            ASSERT_EQ(value, other[i]) << format.to_string() << " row " << row;
          } else {
            ASSERT_EQ(value, all[row * 200 + i]) << format.to_string() << " row " << row;
            ASSERT_EQ(value, some_values[place * 200 + i]) << format.to_string() << " row " << row;
          }
        }
      }
    }
  }
}

TEST(Movement, GatherAndScatterRefuseWhatIsNoRow) {
  Bench bench;
  Backend& backend = bench.context.backend;
  const QuantFormat format{Code::kE4m3, 128, ScaleType::kFp32};
  const QuantTensor whole = take(bench.workspace(), format, {4, 128, 1});
  const QuantTensor some = take(bench.workspace(), format, {2, 128, 1});
  const QuantTensor narrow = take(bench.workspace(), format, {2, 64, 1});
  const QuantTensor other = take(bench.workspace(), exact_format(kFp32), {2, 128, 1});
  zero_planes(bench.context, some);
  for (const std::vector<std::int32_t>& rows : {std::vector{0, 4}, std::vector{-1, 2}, std::vector{1}}) {
    EXPECT_THROW(backend.gather_rows(bench.context, whole, bench.integers(rows), some), Error);
    EXPECT_THROW(backend.scatter_rows(bench.context, some, bench.integers(rows), whole), Error);
  }
  for (const QuantTensor& wrong : {narrow, other}) {
    EXPECT_THROW(backend.gather_rows(bench.context, whole, bench.integers({0, 1}), wrong), Error);
    EXPECT_THROW(backend.scatter_rows(bench.context, wrong, bench.integers({0, 1}), whole), Error);
  }
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

// Movement and sums of more than 2^31 elements on the GPU.
#include <array>
#include <optional>

#include "backend/cuda_testing.h"

namespace agoq {
namespace {

using namespace testing_cuda;

// A tensor of zeros, but for eight numbers in four places: the first, where bytes and where elements
// pass 2^31, and the last. Rows of 1,025 are no multiple of a thread's vector, and nor are all together.
TEST(CudaMovement, CountsBeyondTwoToTheThirtyOne) {
  AGOQ_NEEDS_GPU();
  constexpr std::int64_t kWidth = 1025, kRows = (std::int64_t{1} << 31) / kWidth + 2, kFew = 8;
  constexpr std::int64_t kCount = kRows * kWidth;
  static_assert(kCount > (std::int64_t{1} << 31) + 4 && kCount % 8 != 0);
  constexpr std::array<std::int64_t, 4> kPlaces{0, (std::int64_t{1} << 30) - 4,
                                                (std::int64_t{1} << 31) - 4, kCount - kFew};
  std::optional<Arena> memory;
  try {
    memory.emplace("large tensors", cuda_backend().allocator(),
                   2 * static_cast<std::size_t>(kCount) * sizeof(Bf16) + 2 * kArenaAlignment);
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  Pair pair;
  const Tensor x = memory->take(ElementType::kBf16, Shape{kRows, kWidth}),
               converted = memory->take(ElementType::kFp16, Shape{kRows, kWidth});
  const auto part = [](const Tensor& tensor, std::int64_t first) {
    return Tensor{tensor.data + static_cast<std::size_t>(first) * size_of(tensor.type), tensor.type,
                  Shape{kFew}};
  };
  // Of either type, and so is what becomes of them.
  const Values few{1, -2, 3, .5, 8, -.25, 7, 1.5}, zeros(static_cast<std::size_t>(kFew));
  const auto expect_everywhere = [&](const Tensor& tensor, double factor) {
    Values expected = few;
    for (double& value : expected) value *= factor;
    for (const std::int64_t place : kPlaces) {
      EXPECT_EQ(pair.values(part(tensor, place)), expected) << "at " << place;
      // Not only there.
      if (place > 0) {
        EXPECT_EQ(pair.values(part(tensor, place - kFew)), zeros) << "before " << place;
      }
    }
    EXPECT_EQ(pair.values(part(tensor, kCount / 3)), zeros);
  };
  // What zero and copy do not reach stays NaN.
  const Twin numbers = pair.of(ElementType::kBf16, Shape{kFew}, few),
             poison = pair.empty(ElementType::kFp16, Shape{kFew});
  for (const std::int64_t place : kPlaces) {
    cuda_backend().copy(pair.cuda, poison.cuda, part(converted, place));
  }
  cuda_backend().zero(pair.cuda, x.data, x.bytes());
  for (const std::int64_t place : kPlaces) {
    cuda_backend().copy(pair.cuda, numbers.cuda, part(x, place));
  }
  expect_everywhere(x, 1);

  cuda_backend().copy(pair.cuda, x, converted);
  expect_everywhere(converted, 1);

  // The other tensor's memory, as BF16 again.
  const Tensor y{converted.data, ElementType::kBf16, Shape{kRows, kWidth}};
  cuda_backend().copy(pair.cuda, x, y);
  cuda_backend().add(pair.cuda, x, y, y);
  expect_everywhere(y, 2);

  // Small integers over a power of two: exact in any order.
  const Twin total = pair.empty(ElementType::kFp64, Shape{1});
  const double places = static_cast<double>(kPlaces.size());
  cuda_backend().sum(pair.cuda, x, total.cuda);
  EXPECT_EQ(pair.values(total.cuda)[0], places * dot(few, Values(few.size(), 1.0)));
  cuda_backend().sum_of_squares(pair.cuda, as_quant_tensor(x), total.cuda);
  EXPECT_EQ(pair.values(total.cuda)[0], places * dot(few, few));
}

}  // namespace
}  // namespace agoq

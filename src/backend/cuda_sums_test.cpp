// Sums of many tensors in one launch, on the GPU.
#include <gtest/gtest.h>

#include <vector>

#include "backend/cuda_testing.h"

namespace agoq {
namespace {

using testing_cuda::Pair;
using testing_cuda::QuantTwin;
using testing_cuda::Twin;

// Fewer elements and more than a part has, and segments with short last blocks.
constexpr BlockGrid kGrids[] = {{1, 1, 1},      {3, 129, 1},  {40, 4 * 1030, 4},
                                {16, 2048, 16}, {1, 4096, 1}, {300, 14336, 16}};
constexpr const char* kFormats[] = {"e4m3/128/fp32", "fp32", "bf16", "int8/128/bf16",
                                    "nf4/32/two-level"};

/// totals: what one call writes for all xs; sum(x, total) writes one's, and is_empty(x) tells of which
/// that is 0.
template <typename X>
void expect_each_alone(Pair& pair, const std::vector<X>& xs, const Twin& totals, auto sum,
                       auto is_empty) {
  const auto of_all = pair.values(totals.cuda);
  for (std::size_t i = 0; i < xs.size(); ++i) {
    const Twin total = pair.empty(ElementType::kFp64, Shape{1});
    sum(xs[i], total.cuda);
    EXPECT_EQ(pair.values(total.cuda)[0], of_all[i]) << i;
    if (is_empty(xs[i])) {
      EXPECT_EQ(of_all[i], 0.0) << i;
    } else {
      EXPECT_GT(of_all[i], 0.0) << i;
    }
  }
}

// More tensors than one launch's parameters hold, of every path side by side.
TEST(CudaSums, OfManyTensorsAreThoseOfEachAlone) {
  AGOQ_NEEDS_GPU();
  Pair pair(std::size_t{512} << 20);
  std::vector<QuantTensor> xs;
  for (int round = 0; round < 5; ++round) {
    for (const char* format : kFormats) {
      for (const BlockGrid& grid : kGrids) {
        if (round > 0 && grid.count() > 1000000) continue;
        xs.push_back(pair.random_quant(parse_format(format), grid).cuda);
      }
      xs.push_back(xs.back().slice_rows(1, 1));  // of no rows
    }
  }
  const Twin totals = pair.empty(ElementType::kFp64, Shape{std::ssize(xs)});
  pair.cuda.backend.sums_of_squares(pair.cuda, xs, totals.cuda);
  expect_each_alone(
      pair, xs, totals,
      [&](const QuantTensor& x, const Tensor& total) {
        pair.cuda.backend.sum_of_squares(pair.cuda, x, total);
      },
      [](const QuantTensor& x) { return x.rows() == 0; });
}

TEST(CudaSums, OfManyTensorsPiecesAreThoseOfEachAlone) {
  AGOQ_NEEDS_GPU();
  Pair pair(std::size_t{512} << 20);
  std::vector<std::vector<QuantTensor>> tensors;
  for (const char* format : {"e4m3/128/fp32", "fp32", "bf16"}) {
    for (const BlockGrid& grid : kGrids) {
      for (const int count : {1, 2, 3, 8, 9, 65}) {
        if (count > 3 && grid.count() > 10000) continue;  // what the kernel is chosen by is the number
        std::vector<QuantTensor>& pieces = tensors.emplace_back();
        for (int p = 0; p < count; ++p) {
          pieces.push_back(pair.random_quant(parse_format(format), grid).cuda);
        }
      }
    }
    tensors.push_back({tensors.back().front().slice_rows(1, 1)});  // of no rows
  }
  const std::vector<TensorPieces> all(tensors.begin(), tensors.end());
  const Twin totals = pair.empty(ElementType::kFp64, Shape{std::ssize(all)});
  pair.cuda.backend.pieces_sums_of_squares(pair.cuda, all, totals.cuda);
  expect_each_alone(
      pair, all, totals,
      [&](const TensorPieces& pieces, const Tensor& total) {
        pair.cuda.backend.pieces_sum_of_squares(pair.cuda, pieces, total);
      },
      [](const TensorPieces& pieces) { return pieces.front().rows() == 0; });
}

}  // namespace
}  // namespace agoq

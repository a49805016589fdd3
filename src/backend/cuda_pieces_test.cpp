// The CUDA backend's operations on pieces of several ranks against the CPU's, streams beside the main
// one, and rounding that does not depend on how a tensor is sliced.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "backend/cuda_testing.h"

namespace agoq {
namespace {

using namespace testing_cuda;

constexpr QuantFormat kE4m3{Code::kE4m3, 128, ScaleType::kFp32, Rounding::kNearest};

std::vector<QuantFormat> formats() {
  return {kE4m3,
          {Code::kE4m3, 16, ScaleType::kFp32, Rounding::kNearest},
          {Code::kE4m3, 256, ScaleType::kFp32, Rounding::kNearest},
          {Code::kE4m3, 128, ScaleType::kBf16, Rounding::kNearest},
          {Code::kE4m3, 128, ScaleType::kFp32, Rounding::kStochastic},
          {Code::kE5m2, 128, ScaleType::kFp32, Rounding::kNearest},
          {Code::kInt8, 128, ScaleType::kFp32, Rounding::kNearest},
          {Code::kDynamic8, 256, ScaleType::kFp32, Rounding::kNearest},
          {Code::kInt6, 64, ScaleType::kTwoLevel, Rounding::kNearest},
          {Code::kNf4, 32, ScaleType::kTwoLevel, Rounding::kNearest},
          exact_format(ElementType::kFp32),
          exact_format(ElementType::kBf16)};
}

// Rows that are whole blocks, that end inside one, that are not whole vectors; segments; one element.
const std::vector<BlockGrid> kGrids{{64, 4096, 1}, {7, 576, 1}, {3, 1025, 1}, {33, 1376, 2},
                                    {5, 129, 1},   {9, 384, 3}, {1, 1, 1}};

struct Pieces {
  std::vector<QuantTensor> cpu, cuda;
};

Values counted(const Tensor& cpu_counters) {
  const auto* const counts = cpu_counters.as<std::int64_t>();
  return Values(counts, counts + cpu_counters.count());
}

Pieces random_pieces(Pair& pair, const QuantFormat& format, const BlockGrid& grid, int count) {
  Pieces pieces;
  for (int p = 0; p < count; ++p) {
    // Ranks whose gradients differ in size.
    const QuantTwin piece = pair.random_quant(format, grid, p % 2 == 0 ? 1.0 : 0.01);
    pieces.cpu.push_back(piece.cpu);
    pieces.cuda.push_back(piece.cuda);
  }
  return pieces;
}

TEST(CudaPieces, SumsAreTheCpusBytes) {
  AGOQ_NEEDS_GPU();
  for (const QuantFormat& format : formats()) {
    for (const BlockGrid& grid : kGrids) {
      Pair pair(std::size_t{48} << 20);
      for (const int count : {1, 2, 3, 8}) {
        const Pieces pieces = random_pieces(pair, format, grid, count);
        const QuantTwin sum = pair.quant(format, grid);
        const Twin counts = pair.counters();
        pair.cpu.backend.add_pieces(pair.cpu, pieces.cpu, sum.cpu, pair.key(), counts.cpu);
        pair.cuda.backend.add_pieces(pair.cuda, pieces.cuda, sum.cuda, pair.key(), counts.cuda);
        EXPECT_EQ(pair.differing_bytes(sum), 0)
            << format.to_string() << " [" << grid.rows << ", " << grid.row_length << "], " << count;
        EXPECT_EQ(pair.values(counts.cuda), counted(counts.cpu));
      }
    }
  }
}

TEST(CudaPieces, TheSumMayTakeThePlaceOfAnyPiece) {
  AGOQ_NEEDS_GPU();
  for (const QuantFormat& format : formats()) {
    for (std::size_t place = 0; place < 3; ++place) {
      Pair pair(std::size_t{8} << 20);
      const Pieces pieces = random_pieces(pair, format, {33, 1376, 2}, 3);
      const QuantTwin sum{pieces.cpu[place], pieces.cuda[place]};
      pair.cpu.backend.add_pieces(pair.cpu, pieces.cpu, sum.cpu, pair.key(), {});
      pair.cuda.backend.add_pieces(pair.cuda, pieces.cuda, sum.cuda, pair.key(), {});
      EXPECT_EQ(pair.differing_bytes(sum), 0) << format.to_string() << ", in place of piece " << place;
    }
  }
}

TEST(CudaPieces, NaiveSumsAreTheCpusBytes) {
  AGOQ_NEEDS_GPU();
  for (const int block : {16, 128}) {
    const QuantFormat format{Code::kE4m3, block, ScaleType::kFp32, Rounding::kNearest};
    for (const BlockGrid& grid : kGrids) {
      Pair pair(std::size_t{16} << 20);
      const Pieces pieces = random_pieces(pair, format, grid, 3);
      const QuantTwin sum{pieces.cpu[1], pieces.cuda[1]};  // in place
      constexpr float kScale = 2.0f / 448;                 // some saturate
      pair.cpu.backend.add_pieces_naively(pair.cpu, pieces.cpu, sum.cpu, kScale);
      pair.cuda.backend.add_pieces_naively(pair.cuda, pieces.cuda, sum.cuda, kScale);
      EXPECT_EQ(pair.differing_bytes(sum), 0)
          << format.to_string() << " [" << grid.rows << ", " << grid.row_length << "]";
    }
  }
}

TEST(CudaPieces, MorePiecesThanMostKernelsTake) {
  AGOQ_NEEDS_GPU();
  Pair pair(std::size_t{96} << 20);
  const BlockGrid grid{9, 1792, 1};
  for (const int count : {64, 65}) {
    const Pieces pieces = random_pieces(pair, kE4m3, grid, count);
    const QuantTwin sum = pair.quant(kE4m3, grid);
    pair.cpu.backend.add_pieces(pair.cpu, pieces.cpu, sum.cpu, pair.key(), {});
    pair.cuda.backend.add_pieces(pair.cuda, pieces.cuda, sum.cuda, pair.key(), {});
    EXPECT_EQ(pair.differing_bytes(sum), 0) << count;
    const Twin squares = pair.empty(ElementType::kFp64, Shape{1});
    pair.cpu.backend.pieces_sum_of_squares(pair.cpu, pieces.cpu, squares.cpu);
    pair.cuda.backend.pieces_sum_of_squares(pair.cuda, pieces.cuda, squares.cuda);
    EXPECT_LE(pair.error(squares), 1e-13) << count;
  }
}

TEST(CudaPieces, WhatIsNotFiniteIsCountedAndKeptOut) {
  AGOQ_NEEDS_GPU();
  const BlockGrid grid{6, 1152, 1};
  for (const QuantFormat& format : {kE4m3, QuantFormat{Code::kInt8, 128, ScaleType::kFp32}}) {
    Pair pair(std::size_t{8} << 20);
    Pieces pieces;
    for (int p = 0; p < 3; ++p) {
      Values values = normal(grid.count(), static_cast<std::uint32_t>(p), 1.0);
      if (p == 1) {
        values[7] = std::numeric_limits<double>::quiet_NaN();
        values[1400] = std::numeric_limits<double>::infinity();
      }
      if (p == 2) values[1400] = -std::numeric_limits<double>::infinity();
      for (std::size_t i = 256; i < 384; ++i) values[i] = 0;
      const Twin twin = pair.of(ElementType::kFp32, Shape{grid.rows, grid.row_length}, values);
      pieces.cpu.push_back(as_quant_tensor(twin.cpu));
      pieces.cuda.push_back(as_quant_tensor(twin.cuda));
    }
    const QuantTwin sum = pair.quant(format, grid);
    const Twin counts = pair.counters();
    pair.cpu.backend.add_pieces(pair.cpu, pieces.cpu, sum.cpu, pair.key(), counts.cpu);
    pair.cuda.backend.add_pieces(pair.cuda, pieces.cuda, sum.cuda, pair.key(), counts.cuda);
    EXPECT_EQ(pair.differing_bytes(sum), 0) << format.to_string();
    EXPECT_EQ(pair.values(counts.cuda)[0], 2.0);
    EXPECT_EQ(pair.values(counts.cuda), counted(counts.cpu));
  }
}

// Pieces that hold some rows of a tensor round as the whole tensor does. More than 64 of them go by the
// default body.
TEST(CudaPieces, NumberedRowsRoundAsTheWholeTensorDoes) {
  AGOQ_NEEDS_GPU();
  const std::vector<std::int32_t> numbers{0, 3, 4, 9};
  for (const Code code : {Code::kE4m3, Code::kInt8, Code::kDynamic8}) {
    const QuantFormat format{code, 128, ScaleType::kFp32, Rounding::kStochastic};
    for (const int count : {2, 3, 65}) {
      Pair pair(std::size_t{64} << 20);
      const BlockGrid grid{10, 1792, 2}, some{4, 1792, 2};
      const Pieces pieces = random_pieces(pair, format, grid, count);
      const Twin rows = pair.integers(numbers);
      Pieces of_some;
      for (int p = 0; p < count; ++p) {
        const QuantTwin piece = pair.quant(format, some);
        const auto at = static_cast<std::size_t>(p);
        pair.cpu.backend.gather_rows(pair.cpu, pieces.cpu[at], rows.cpu, piece.cpu);
        pair.cuda.backend.gather_rows(pair.cuda, pieces.cuda[at], rows.cuda, piece.cuda);
        EXPECT_EQ(pair.differing_bytes(piece), 0);
        of_some.cpu.push_back(piece.cpu);
        of_some.cuda.push_back(piece.cuda);
      }
      const QuantTwin whole = pair.quant(format, grid), sum = pair.quant(format, some);
      pair.cpu.backend.add_pieces(pair.cpu, pieces.cpu, whole.cpu, pair.key(), {});
      pair.cpu.backend.add_pieces(pair.cpu, of_some.cpu, sum.cpu, pair.key(), {}, rows.cpu);
      pair.cuda.backend.add_pieces(pair.cuda, of_some.cuda, sum.cuda, pair.key(), {}, rows.cuda);
      EXPECT_EQ(pair.differing_bytes(sum), 0) << format.to_string() << ", " << count;
      const QuantTwin of_whole = pair.quant(format, some);
      pair.cpu.backend.gather_rows(pair.cpu, whole.cpu, rows.cpu, of_whole.cpu);
      EXPECT_TRUE(pair.bytes(of_whole, false) == pair.bytes(sum, false)) << format.to_string();
    }
  }
}

TEST(CudaPieces, RowsAreGatheredAndScatteredAsTheyAre) {
  AGOQ_NEEDS_GPU();
  for (const QuantFormat& format : formats()) {
    for (const BlockGrid& grid : kGrids) {
      Pair pair(std::size_t{16} << 20);
      std::vector<std::int32_t> numbers;  // every third row, from the last
      for (std::int64_t row = grid.rows - 1; row >= 0; row -= 3) {
        numbers.push_back(static_cast<std::int32_t>(row));
      }
      const Twin rows = pair.integers(numbers);
      BlockGrid some_grid = grid;
      some_grid.rows = static_cast<std::int64_t>(numbers.size());
      const QuantTwin source = pair.random_quant(format, grid), target = pair.random_quant(format, grid),
                      some = pair.quant(format, some_grid);
      pair.cpu.backend.gather_rows(pair.cpu, source.cpu, rows.cpu, some.cpu);
      pair.cuda.backend.gather_rows(pair.cuda, source.cuda, rows.cuda, some.cuda);
      EXPECT_EQ(pair.differing_bytes(some), 0)
          << format.to_string() << " [" << grid.rows << ", " << grid.row_length << "]";
      pair.cpu.backend.scatter_rows(pair.cpu, some.cpu, rows.cpu, target.cpu);
      pair.cuda.backend.scatter_rows(pair.cuda, some.cuda, rows.cuda, target.cuda);
      EXPECT_EQ(pair.differing_bytes(target), 0)
          << format.to_string() << " [" << grid.rows << ", " << grid.row_length << "]";
    }
  }
}

TEST(CudaPieces, TheLargestCodesOfEightRanksAddUp) {
  AGOQ_NEEDS_GPU();
  Pair pair(std::size_t{8} << 20);
  const BlockGrid grid{2, 256, 1};
  Pieces pieces;
  for (int p = 0; p < 8; ++p) {
    Values values(static_cast<std::size_t>(grid.count()), 0.0);
    values[5] = 448;
    values[6] = p % 2 == 0 ? 448 : -448;
    const Twin source = pair.of(ElementType::kFp32, Shape{grid.rows, grid.row_length}, values);
    const QuantTwin piece = pair.quant(kE4m3, grid);
    pair.cpu.backend.quantize(pair.cpu, source.cpu, piece.cpu, pair.key(), {});
    pair.cuda.backend.quantize(pair.cuda, source.cuda, piece.cuda, pair.key(), {});
    pieces.cpu.push_back(piece.cpu);
    pieces.cuda.push_back(piece.cuda);
  }
  const Twin sum = pair.empty(ElementType::kFp32, Shape{grid.rows, grid.row_length});
  pair.cuda.backend.add_pieces(pair.cuda, pieces.cuda, as_quant_tensor(sum.cuda), pair.key(), {});
  const Values values = pair.values(sum.cuda);
  EXPECT_EQ(values[5], 8 * 448.0);
  EXPECT_EQ(values[6], 0.0);
}

// Tests of many grids are one for each, so that each ends in time under compute-sanitizer too.
class PiecesOn : public testing::TestWithParam<BlockGrid> {};
std::string name_of_grid(const testing::TestParamInfo<BlockGrid>& grid) {
  return fmt::format("{}x{}in{}", grid.param.rows, grid.param.row_length, grid.param.segments);
}

using SquaresOfPieces = PiecesOn;
TEST_P(SquaresOfPieces, HaveTheBitsOfThoseOfTheirSum) {
  AGOQ_NEEDS_GPU();
  const BlockGrid& grid = GetParam();
  for (const QuantFormat& format : formats()) {
    Pair pair(std::size_t{48} << 20);
    for (const int count : {1, 2, 5}) {
      const Pieces pieces = random_pieces(pair, format, grid, count);
      const Twin sum = pair.empty(ElementType::kFp32, Shape{grid.rows, grid.row_length});
      QuantTensor cpu_sum = as_quant_tensor(sum.cpu);
      cpu_sum.grid.segments = grid.segments;  // on the GPU it is one: segments make no difference
      pair.cpu.backend.add_pieces(pair.cpu, pieces.cpu, cpu_sum, pair.key(), {});
      pair.upload(sum);
      const Twin of_pieces = pair.empty(ElementType::kFp64, Shape{1});
      const Twin of_sum = pair.empty(ElementType::kFp64, Shape{1});
      const QuantTensor cuda_sum = as_quant_tensor(sum.cuda);
      pair.cuda.backend.pieces_sum_of_squares(pair.cuda, pieces.cuda, of_pieces.cuda);
      pair.cuda.backend.pieces_sum_of_squares(pair.cuda, {&cuda_sum, 1}, of_sum.cuda);
      EXPECT_EQ(pair.values(of_pieces.cuda), pair.values(of_sum.cuda))
          << format.to_string() << " [" << grid.rows << ", " << grid.row_length << "], " << count;
      pair.cpu.backend.pieces_sum_of_squares(pair.cpu, pieces.cpu, of_pieces.cpu);
      EXPECT_LE(pair.error(of_pieces), 1e-13);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Cuda, SquaresOfPieces, testing::ValuesIn(kGrids), name_of_grid);

TEST(CudaPieces, UpdateFromPiecesIsTheUpdateFromTheirSum) {
  AGOQ_NEEDS_GPU();
  Pair pair(std::size_t{64} << 20);
  const BlockGrid grid{1100, 4096, 1};  // more than one slab of the default body
  const Pieces pieces = random_pieces(pair, kE4m3, grid, 2);
  const QuantTensor sum = take(pair.cuda.workspace, exact_format(ElementType::kFp32), grid);
  pair.cuda.backend.add_pieces(pair.cuda, pieces.cuda, sum, pair.key(), {});
  const AdamwStep step{.master = MasterKind::kNone, .learning_rate = 1e-3, .weight_decay = 0.1};
  std::vector<std::vector<std::byte>> results;
  for (const bool by_pieces : {true, false}) {
    const Arena::Scope scope(pair.cuda.workspace);
    Pair state(std::size_t{48} << 20);
    const Twin weight = state.random(ElementType::kBf16, Shape{grid.rows, grid.row_length});
    const QuantTwin first = state.quant({Code::kDynamic8, 256, ScaleType::kFp32}, grid);
    const QuantTwin second = state.quant({Code::kDynamic8Unsigned, 256, ScaleType::kFp32}, grid);
    AdamwTensors tensors{weight.cuda, {}, {}, first.cuda, second.cuda};
    if (by_pieces) {
      pair.cuda.backend.adamw_update_pieces(pair.cuda, pieces.cuda, tensors, step, state.key());
    } else {
      tensors.gradient = sum;
      pair.cuda.backend.adamw_update(pair.cuda, tensors, step, state.key());
    }
    std::vector<std::byte> bytes = state.bytes(first, true);
    for (const std::byte byte : state.bytes(second, true)) bytes.push_back(byte);
    const std::size_t moments = bytes.size();
    bytes.resize(moments + weight.cuda.bytes());
    pair.cuda.backend.read(pair.cuda, weight.cuda.data, bytes.data() + moments, weight.cuda.bytes());
    results.push_back(std::move(bytes));
  }
  EXPECT_TRUE(results[0] == results[1]);
}

std::string name_of_update(const testing::TestParamInfo<std::tuple<BlockGrid, int>>& test) {
  const auto& [grid, count] = test.param;
  return fmt::format("{}x{}in{}_of_{}", grid.rows, grid.row_length, grid.segments, count);
}
class UpdateFromPieces : public testing::TestWithParam<std::tuple<BlockGrid, int>> {};
TEST_P(UpdateFromPieces, GivesTheCpusBytes) {
  AGOQ_NEEDS_GPU();
  const QuantFormat first_format{Code::kDynamic8, 256, ScaleType::kFp32},
      second_format{Code::kDynamic8Unsigned, 256, ScaleType::kFp32};
  const std::vector<std::pair<ElementType, MasterKind>> helds{
      {ElementType::kFp32, MasterKind::kNone},
      {ElementType::kBf16, MasterKind::kNone},
      {ElementType::kBf16, MasterKind::kFp32},
      {ElementType::kBf16, MasterKind::kRemainder}};
  const auto& [grid, count] = GetParam();
  for (const auto& [type, master_kind] : helds) {
    Pair pair(std::size_t{32} << 20);
    const Shape shape{grid.rows, grid.row_length};
    const QuantTwin first = pair.quant(first_format, grid), second = pair.quant(second_format, grid);
    const Twin weight = pair.random(type, shape);
    Twin master;
    if (master_kind == MasterKind::kFp32) master = pair.random(ElementType::kFp32, shape);
    if (master_kind == MasterKind::kRemainder) {
      master = pair.empty(ElementType::kInt16, shape);
      std::memset(master.cpu.data, 0, master.cpu.bytes());
      pair.upload(master);
    }
    AdamwStep step{.master = master_kind, .learning_rate = 1e-2, .weight_decay = 0.1};
    step.gradient_scale = 0.25;
    for (step.step = 1; step.step <= 2; ++step.step) {
      const Pieces pieces = random_pieces(pair, kE4m3, grid, count);
      pair.cpu.backend.adamw_update_pieces(
          pair.cpu, pieces.cpu, {weight.cpu, master.cpu, {}, first.cpu, second.cpu}, step, pair.key());
      pair.cuda.backend.adamw_update_pieces(pair.cuda, pieces.cuda,
                                            {weight.cuda, master.cuda, {}, first.cuda, second.cuda},
                                            step, pair.key());
    }
    const std::string what =
        fmt::format("[{}, {}] in {} segments, {} pieces, {}, master {}", grid.rows, grid.row_length,
                    grid.segments, count, name_of(type), static_cast<int>(master_kind));
    EXPECT_EQ(pair.differing_bytes(first), 0) << what;
    EXPECT_EQ(pair.differing_bytes(second), 0) << what;
    EXPECT_EQ(pair.values(weight.cuda), testing_operations::Bench::get(weight.cpu)) << what;
    if (master.cpu) {
      std::vector<std::byte> bytes(master.cuda.bytes());
      pair.cuda.backend.read(pair.cuda, master.cuda.data, bytes.data(), bytes.size());
      EXPECT_EQ(std::memcmp(bytes.data(), master.cpu.data, bytes.size()), 0) << what;
    }
    if (testing::Test::HasFailure()) return;
  }
}
// Segments of whole blocks of moments; with half blocks, shorter ones and less than a block; not of
// whole vectors.
INSTANTIATE_TEST_SUITE_P(Cuda, UpdateFromPieces,
                         testing::Combine(testing::Values(BlockGrid{64, 4096, 1},
                                                          BlockGrid{7, 4 * 896, 4},
                                                          BlockGrid{33, 1376, 2}, BlockGrid{9, 384, 3},
                                                          BlockGrid{5, 3 * 40, 3},
                                                          BlockGrid{3, 5 * 8, 5}, BlockGrid{3, 1025, 1}),
                                          testing::Values(1, 2, 3, 8)),
                         name_of_update);
INSTANTIATE_TEST_SUITE_P(CudaOfManyPieces, UpdateFromPieces,
                         testing::Combine(testing::Values(BlockGrid{7, 4 * 896, 4}, BlockGrid{9, 384, 3},
                                                          BlockGrid{5, 3 * 40, 3},
                                                          BlockGrid{3, 5 * 8, 5}, BlockGrid{3, 1025, 1}),
                                          testing::Values(64, 65)),
                         name_of_update);

TEST(CudaSlices, StochasticRoundingIsThatOfTheWholeTensor) {
  AGOQ_NEEDS_GPU();
  const BlockGrid grid{10, 1792, 2};
  for (const Code code : {Code::kE4m3, Code::kInt8, Code::kNf4}) {
    Pair pair(std::size_t{8} << 20);
    const QuantFormat format{code, 128, ScaleType::kFp32, Rounding::kStochastic};
    const Twin source = pair.random(ElementType::kFp32, Shape{grid.rows, grid.row_length});
    const QuantTwin quantised = pair.quant(format, grid);
    pair.cpu.backend.quantize(pair.cpu, source.cpu, quantised.cpu, pair.key(), {});
    for (const auto& [first, last] : {std::pair{0, 3}, std::pair{3, 4}, std::pair{4, 10}}) {
      pair.cuda.backend.quantize(pair.cuda, source.cuda.slice_rows(first, last),
                                 quantised.cuda.slice_rows(first, last), pair.key(), {});
    }
    EXPECT_EQ(pair.differing_bytes(quantised), 0) << format.to_string();
  }
}

TEST(CudaSlices, StochasticWeightsAreThoseOfTheWholeTensor) {
  AGOQ_NEEDS_GPU();
  const BlockGrid grid{10, 1792, 1};
  const AdamwStep step{.master = MasterKind::kNone, .learning_rate = 1e-3, .weight_decay = 0.1};
  // By the moments, each of the three kernels.
  for (const QuantFormat& moment :
       {QuantFormat{Code::kDynamic8, 256, ScaleType::kFp32}, exact_format(ElementType::kFp32),
        QuantFormat{Code::kDynamic8, 128, ScaleType::kFp32}}) {
    Pair pair(std::size_t{8} << 20);
    const QuantFormat second_moment =
        moment.is_exact() ? moment
                          : QuantFormat{Code::kDynamic8Unsigned, moment.block, ScaleType::kFp32};
    const Twin weight = pair.random(ElementType::kBf16, Shape{grid.rows, grid.row_length});
    const Twin whole =
        pair.of(ElementType::kBf16, weight.cpu.shape, testing_operations::Bench::get(weight.cpu));
    const QuantTwin gradient = pair.random_quant(kE4m3, grid);
    const auto update = [&](const Tensor& of, std::int64_t first, std::int64_t last,
                            const QuantTensor& m, const QuantTensor& v) {
      pair.cuda.backend.adamw_update(pair.cuda,
                                     {of.slice_rows(first, last),
                                      {},
                                      gradient.cuda.slice_rows(first, last),
                                      m.slice_rows(first, last),
                                      v.slice_rows(first, last)},
                                     step, pair.key());
    };
    const QuantTwin m = pair.quant(moment, grid), v = pair.quant(second_moment, grid);
    update(whole.cuda, 0, grid.rows, m.cuda, v.cuda);
    const QuantTwin m_parts = pair.quant(moment, grid), v_parts = pair.quant(second_moment, grid);
    for (const auto& [first, last] : {std::pair{0, 3}, std::pair{3, 4}, std::pair{4, 10}}) {
      update(weight.cuda, first, last, m_parts.cuda, v_parts.cuda);
    }
    EXPECT_EQ(pair.values(weight.cuda), pair.values(whole.cuda)) << moment.to_string();
    EXPECT_EQ(pair.bytes(m, true), pair.bytes(m_parts, true));
    EXPECT_EQ(pair.bytes(v, true), pair.bytes(v_parts, true));
  }
}

TEST(CudaStreams, SideStreamsWaitForWhatTheyAreOrderedAfter) {
  AGOQ_NEEDS_GPU();
  Pair pair(std::size_t{256} << 20);
  Backend& backend = pair.cuda.backend;
  const Stream side = backend.side_stream(0);
  EXPECT_EQ(side.handle, backend.side_stream(0).handle);
  EXPECT_NE(side.handle, backend.side_stream(1).handle);
  const Shape shape{1024, 8192};
  const Tensor x = pair.cuda.workspace.take(ElementType::kFp32, shape);
  const Tensor y = pair.cuda.workspace.take(ElementType::kFp32, shape);
  const Context beside{backend, side, pair.cuda.workspace, {}};
  for (int round = 0; round < 20; ++round) {
    backend.zero(pair.cuda, x.data, x.bytes());
    backend.zero(pair.cuda, y.data, y.bytes());
    backend.fill_normal(pair.cuda, pair.key(), 1.0, x);  // long enough to be overtaken
    backend.order(pair.cuda.stream, side);
    backend.copy(beside, x, y);
    backend.order(side, pair.cuda.stream);
    EXPECT_EQ(pair.values(x), pair.values(y)) << round;
  }
}

TEST(CudaDevice, TheOnlyGpuOrOneOfThem) {
  AGOQ_NEEDS_GPU();
  cuda_backend().use_device(0);
  try {
    cuda_backend().use_device(1000);  // one GPU: it is taken
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    EXPECT_NE(std::string(error.what()).find("start one process per GPU"), std::string::npos);
  }
}

}  // namespace
}  // namespace agoq

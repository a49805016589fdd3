#include "comm/quantized_reduction.h"

#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <numeric>

#include "comm/thread_ranks.h"

namespace agoq {
namespace {

using testing_comm::on_ranks;

struct Tensors {
  std::vector<QuantFormat> formats;
  std::vector<BlockGrid> grids;
};

// Rows that ranks divide and that they do not, fewer rows than ranks, rows that are not whole blocks,
// segments; formats with and without every plane.
Tensors tensors() {
  const QuantFormat e4m3{Code::kE4m3, 128, ScaleType::kFp32, Rounding::kNearest};
  const QuantFormat stochastic{Code::kE4m3, 128, ScaleType::kFp32, Rounding::kStochastic};
  const QuantFormat dynamic8{Code::kDynamic8, 256, ScaleType::kFp32, Rounding::kNearest};
  const QuantFormat int6{Code::kInt6, 64, ScaleType::kTwoLevel, Rounding::kNearest};
  return {{e4m3, e4m3, exact_format(ElementType::kFp32), stochastic, dynamic8, int6, e4m3},
          {{24, 256, 1}, {7, 129, 1}, {1, 100, 1}, {13, 384, 3}, {40, 300, 1}, {5, 200, 2}, {3, 64, 1}}};
}

std::vector<std::byte> bytes_of(const QuantTensor& tensor) {
  const RowBytes row = row_bytes(tensor.format, tensor.grid);
  std::vector<std::byte> bytes;
  const auto add = [&](const std::byte* plane, std::int64_t row_of_plane) {
    bytes.insert(bytes.end(), plane, plane + row_of_plane * tensor.rows());
  };
  add(tensor.codes, row.codes);
  add(tensor.bits, row.bits);
  add(tensor.scales, row.scales);
  add(tensor.super, row.super);
  return bytes;
}

/// One rank's tensors and context.
struct Rank {
  explicit Rank(const Tensors& of, int ranks) {
    for (std::size_t t = 0; t < of.grids.size(); ++t) {
      BlockGrid with_room = of.grids[t];
      with_room.rows = ranks * slot_rows(with_room.rows, ranks);
      QuantTensor tensor = take(memory, of.formats[t], with_room);
      zero_planes(context, tensor);
      tensor.grid.rows = of.grids[t].rows;
      tensors.push_back(tensor);
    }
    counters = memory.take(ElementType::kInt64,
                           Shape{static_cast<std::int64_t>(of.grids.size()), kQuantCounters});
    context.backend.zero(context, counters.data, counters.bytes());
  }

  /// Gradients of rank `rank`.
  void fill(int rank) {
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      const Arena::Scope scope(memory);
      const Tensor values =
          memory.take(ElementType::kFp32, Shape{tensors[t].rows(), tensors[t].width()});
      const RandomKey key = RandomKey{.seed = 3, .micro_batch = static_cast<std::uint32_t>(rank)}.with(
          RandomPurpose::kTest, static_cast<std::uint32_t>(t));
      context.backend.fill_normal(context, key, 0.5, values);
      context.backend.quantize(context, values, tensors[t], key, {});
    }
  }

  Arena memory{"rank", host_allocator(), std::size_t{2} << 20};
  Arena workspace{"workspace", host_allocator(), std::size_t{1} << 20};
  Context context{cpu_backend(), {}, workspace, {.seed = 5, .step = 4}};
  std::vector<QuantTensor> tensors;
  Tensor counters;
};

std::vector<std::size_t> backwards(std::size_t count) {
  std::vector<std::size_t> order(count);
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  return order;
}

std::vector<Bucket> buckets_of(const Tensors& of, int ranks, std::int64_t elements) {
  return cut_into_buckets(of.grids, backwards(of.grids.size()), ranks, elements);
}

TEST(Buckets, HoldEverySlotRowOnceInOrder) {
  const Tensors of = tensors();
  for (const int ranks : {1, 2, 3, 5, 8}) {
    for (const std::int64_t elements : {1, 700, 5000, 1000000}) {
      std::map<std::size_t, std::int64_t> next;
      std::size_t tensor = of.grids.size() - 1;
      for (const Bucket& bucket : buckets_of(of, ranks, elements)) {
        ASSERT_FALSE(bucket.empty());
        std::int64_t held = 0, rows_held = 0;
        for (const SlotRows& rows : bucket) {
          ASSERT_LE(rows.tensor, tensor);
          tensor = rows.tensor;
          ASSERT_EQ(rows.first, next[tensor]);
          ASSERT_LT(rows.first, rows.last);
          next[tensor] = rows.last;
          rows_held += rows.last - rows.first;
          held += (rows.last - rows.first) * ranks * of.grids[tensor].row_length;
        }
        EXPECT_TRUE(held <= elements || rows_held == 1)
            << held << " elements in a bucket of " << elements;
      }
      for (std::size_t t = 0; t < of.grids.size(); ++t) {
        EXPECT_EQ(next[t], slot_rows(of.grids[t].rows, ranks));
      }
    }
  }
}

TEST(Buckets, SlotsShareOutTheRows) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    for (const std::int64_t rows : {0, 1, 5, 8, 40}) {
      std::int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const OwnRows own = own_rows(rows, ranks, rank);
        EXPECT_EQ(own.first, next);
        next = own.last;
      }
      EXPECT_EQ(next, rows);
    }
  }
}

/// What add_pieces makes of all ranks' whole tensors, and what it counts.
struct Expected {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<QuantCounts> counts;
};
Expected sums_of_all(int ranks) {
  const Tensors of = tensors();
  std::vector<std::unique_ptr<Rank>> all;
  for (int rank = 0; rank < ranks; ++rank) {
    all.push_back(std::make_unique<Rank>(of, 1));
    all.back()->fill(rank);
  }
  Rank result(of, 1);
  Expected expected;
  for (std::size_t t = 0; t < of.grids.size(); ++t) {
    std::vector<QuantTensor> pieces;
    for (const auto& rank : all) pieces.push_back(rank->tensors[t]);
    const auto row = static_cast<std::int64_t>(t);
    result.context.backend.add_pieces(
        result.context, pieces, result.tensors[t],
        result.context.random.with(RandomPurpose::kSumRounding, static_cast<std::uint32_t>(t)),
        result.counters.slice_rows(row, row + 1));
    expected.bytes.push_back(bytes_of(result.tensors[t]));
  }
  expected.counts = read_counts(result.context, result.counters);
  return expected;
}

TEST(QuantizedReduction, AllReduceIsTheSumOfThePiecesForAnyRanksAndBuckets) {
  const Tensors of = tensors();
  for (const int size : {2, 3, 5, 8}) {
    const Expected expected = sums_of_all(size);
    for (const std::int64_t elements : {1, 3000, 1000000}) {
      on_ranks(size, [&](Communicator& ranks) {
        Rank own(of, size);
        own.fill(ranks.rank());
        QuantizedReduction reduction(ranks, cpu_backend(), own.tensors, buckets_of(of, size, elements),
                                     own.memory);
        for (std::size_t b = 0; b < reduction.buckets(); ++b) {
          reduction.all_reduce(own.context, b, own.counters);
        }
        reduction.finish(own.context);
        for (std::size_t t = 0; t < own.tensors.size(); ++t) {
          EXPECT_EQ(bytes_of(own.tensors[t]), expected.bytes[t])
              << "tensor " << t << ", rank " << ranks.rank() << " of " << size;
        }
      });
    }
  }
}

// Every rank has gradients in some of the rows and zeros elsewhere. Rows that are not met keep the bytes
// that they have where nothing was ever added, which in all formats decode to zero; in these, whose zero
// has the code 0, reducing the whole leaves the same bytes.
TEST(QuantizedReduction, RowsInItsPlaceGiveTheBitsOfTheWhole) {
  const Tensors of = tensors();
  const auto has_zero_code = [&](std::size_t t) { return of.formats[t].code != Code::kDynamic8; };
  const std::vector<std::vector<std::int32_t>> chosen{{1, 2, 5, 9, 17, 21}, {3, 6}, {},    {0, 11, 12},
                                                      {4, 5, 6, 7, 30, 39}, {2},    {0, 2}};
  for (const int size : {2, 3, 4, 5, 8}) {
    for (const std::int64_t elements : {1, 3000, 1000000}) {
      on_ranks(size, [&](Communicator& ranks) {
        Rank whole(of, size), sparse(of, size);
        std::vector<QuantTensor> rows;
        std::vector<Tensor> numbers;
        for (Rank* const own : {&whole, &sparse}) {
          own->fill(ranks.rank());
          for (std::size_t t = 0; t < own->tensors.size(); ++t) {
            const QuantTensor& tensor = own->tensors[t];
            for (std::int32_t row = 0; row < tensor.rows(); ++row) {
              const auto place = std::find(chosen[t].begin(), chosen[t].end(), row) - chosen[t].begin();
              // One of the ranks does not have the row.
              const bool met =
                  static_cast<std::size_t>(place) < chosen[t].size() && place % size != ranks.rank();
              if (!met) zero_planes(own->context, tensor.slice_rows(row, row + 1));
            }
          }
        }
        QuantizedReduction reference(ranks, cpu_backend(), whole.tensors, buckets_of(of, size, elements),
                                     whole.memory);
        QuantizedReduction reduction(ranks, cpu_backend(), sparse.tensors,
                                     buckets_of(of, size, elements), sparse.memory);
        for (std::size_t t = 0; t < of.grids.size(); ++t) {
          const auto count = static_cast<std::int64_t>(chosen[t].size());
          BlockGrid grid = of.grids[t];
          grid.rows = count;
          rows.push_back(take(sparse.memory, of.formats[t], grid));
          numbers.push_back(sparse.memory.take(ElementType::kInt32, Shape{count, 1}));
          std::copy(chosen[t].begin(), chosen[t].end(), numbers[t].as<std::int32_t>());
          cpu_backend().gather_rows(sparse.context, sparse.tensors[t], numbers[t], rows[t]);
          reduction.set_rows(t, rows[t], numbers[t]);
        }
        const auto reduce_both = [&] {
          for (std::size_t b = 0; b < reference.buckets(); ++b) {
            reference.all_reduce(whole.context, b, whole.counters);
            reduction.all_reduce(sparse.context, b, sparse.counters);
          }
          reference.finish(whole.context);
          reduction.finish(sparse.context);
        };
        reduce_both();
        for (std::size_t t = 0; t < of.grids.size(); ++t) {
          cpu_backend().scatter_rows(sparse.context, rows[t], numbers[t], sparse.tensors[t]);
          if (has_zero_code(t)) {
            EXPECT_EQ(bytes_of(sparse.tensors[t]), bytes_of(whole.tensors[t]))
                << "tensor " << t << ", rank " << ranks.rank() << " of " << size;
          }
          const Shape shape{whole.tensors[t].rows(), whole.tensors[t].width()};
          const Arena::Scope scope(whole.workspace);
          const Tensor expected = whole.workspace.take(ElementType::kFp32, shape);
          const Tensor found = whole.workspace.take(ElementType::kFp32, shape);
          cpu_backend().dequantize(whole.context, whole.tensors[t], expected);
          cpu_backend().dequantize(whole.context, sparse.tensors[t], found);
          EXPECT_EQ(std::memcmp(expected.data, found.data, found.bytes()), 0)
              << "tensor " << t << ", rank " << ranks.rank() << " of " << size;
        }
        EXPECT_EQ(reduction.sent_bytes() < reference.sent_bytes(), true);
        // And the whole again.
        for (std::size_t t = 0; t < of.grids.size(); ++t) reduction.set_rows(t, sparse.tensors[t]);
        reduce_both();
        for (std::size_t t = 0; t < of.grids.size(); ++t) {
          EXPECT_EQ(bytes_of(sparse.tensors[t]), bytes_of(whole.tensors[t]));
        }
      });
    }
  }
}

TEST(QuantizedReduction, RefusesRowsOfAnotherFormat) {
  const Tensors of = tensors();
  on_ranks(2, [&](Communicator& ranks) {
    Rank own(of, 2);
    QuantizedReduction reduction(ranks, cpu_backend(), own.tensors, buckets_of(of, 2, 3000), own.memory);
    EXPECT_THROW(reduction.set_rows(0, own.tensors[3]), Error);
    EXPECT_THROW(reduction.set_rows(0, own.tensors[1]), Error);
  });
}

TEST(QuantizedReduction, OneRankKeepsItsBytesAndTakesNoMemory) {
  const Tensors of = tensors();
  on_ranks(1, [&](Communicator& ranks) {
    Rank own(of, 1), untouched(of, 1);
    own.fill(0);
    untouched.fill(0);
    const std::size_t before = own.memory.used();
    QuantizedReduction reduction(ranks, cpu_backend(), own.tensors, buckets_of(of, 1, 1000), own.memory);
    EXPECT_EQ(own.memory.used(), before);
    for (std::size_t b = 0; b < reduction.buckets(); ++b) {
      reduction.all_reduce(own.context, b, own.counters);
      reduction.scatter(own.context, b);
    }
    reduction.finish(own.context);
    EXPECT_EQ(reduction.sent_bytes(), 0u);
    for (std::size_t t = 0; t < own.tensors.size(); ++t) {
      EXPECT_EQ(bytes_of(own.tensors[t]), bytes_of(untouched.tensors[t]));
      EXPECT_EQ(reduction.pieces(t).size(), 1u);
    }
  });
}

TEST(QuantizedReduction, ScatterPutsEveryRanksPieceInItsSlot) {
  const Tensors of = tensors();
  for (const int size : {2, 3, 5, 8}) {
    on_ranks(size, [&](Communicator& ranks) {
      Rank own(of, size);
      own.fill(ranks.rank());
      QuantizedReduction reduction(ranks, cpu_backend(), own.tensors, buckets_of(of, size, 3000),
                                   own.memory);
      for (std::size_t b = 0; b < reduction.buckets(); ++b) reduction.scatter(own.context, b);
      reduction.finish(own.context);
      for (int other = 0; other < size; ++other) {
        Rank sender(of, 1);
        sender.fill(other);
        for (std::size_t t = 0; t < own.tensors.size(); ++t) {
          const OwnRows rows = own_rows(of.grids[t].rows, size, ranks.rank());
          const QuantTensor piece = reduction.pieces(t)[static_cast<std::size_t>(other)];
          EXPECT_EQ(piece.first_row, rows.first);
          EXPECT_EQ(bytes_of(piece), bytes_of(sender.tensors[t].slice_rows(rows.first, rows.last)))
              << "tensor " << t << ", piece of rank " << other << " at rank " << ranks.rank();
        }
      }
    });
  }
}

TEST(QuantizedReduction, GatheringGivesAllRanksTheOwnersRows) {
  const Tensors of = tensors();
  const int size = 3;
  on_ranks(size, [&](Communicator& ranks) {
    Rank own(of, size);
    own.fill(ranks.rank());
    std::vector<Message> sends, receives;
    for (const QuantTensor& tensor : own.tensors) {
      add_gathering(ranks, tensor, {0, slot_rows(tensor.rows(), size)}, sends, receives);
    }
    ranks.exchange(own.context, sends, receives);
    for (int other = 0; other < size; ++other) {
      Rank owner(of, 1);
      owner.fill(other);
      for (std::size_t t = 0; t < own.tensors.size(); ++t) {
        const OwnRows rows = own_rows(of.grids[t].rows, size, other);
        EXPECT_EQ(bytes_of(own.tensors[t].slice_rows(rows.first, rows.last)),
                  bytes_of(owner.tensors[t].slice_rows(rows.first, rows.last)));
      }
    }
  });
}

TEST(QuantizedReduction, CountsEachLossOnceOverTheRanks) {
  const Tensors of = tensors();
  const int size = 3;
  // Rank 1's gradient of the FP32 tensor, which is the only format here that holds them, is not finite.
  std::mutex mutex;
  std::int64_t non_finite = 0;
  on_ranks(size, [&](Communicator& ranks) {
    Rank own(of, size);
    own.fill(ranks.rank());
    if (ranks.rank() == 1)
      own.tensors[2].exact().as<float>()[17] = std::numeric_limits<float>::infinity();
    QuantizedReduction reduction(ranks, cpu_backend(), own.tensors, buckets_of(of, size, 3000),
                                 own.memory);
    for (std::size_t b = 0; b < reduction.buckets(); ++b) {
      reduction.all_reduce(own.context, b, own.counters);
    }
    reduction.finish(own.context);
    const std::lock_guard<std::mutex> lock(mutex);
    non_finite += read_counts(own.context, own.counters)[2].non_finite;
    EXPECT_TRUE(std::isinf(own.tensors[2].exact().as<float>()[17]));
  });
  EXPECT_EQ(non_finite, 1);
}

TEST(QuantizedReduction, MeasuringTakesWhatTheRunTakes) {
  const Tensors of = tensors();
  const int size = 3;
  on_ranks(size, [&](Communicator& ranks) {
    const auto reduce = [&](const Context& context, Arena& memory, const Rank& rank) {
      QuantizedReduction reduction(ranks, cpu_backend(), rank.tensors, buckets_of(of, size, 3000),
                                   memory);
      const std::size_t before = reduction.sent_bytes();
      for (std::size_t b = 0; b < reduction.buckets(); ++b) {
        reduction.all_reduce(context, b, rank.counters);
      }
      reduction.finish(context);
      return reduction.sent_bytes() - before;
    };
    Rank own(of, size);
    own.fill(ranks.rank());
    Arena planned = Arena::measuring("communication");
    const std::size_t planned_bytes =
        reduce({cpu_backend(), {}, planned, own.context.random}, planned, own);
    Arena used("communication", host_allocator(), planned.high_water());
    EXPECT_EQ(reduce(own.context, used, own), planned_bytes);
    EXPECT_EQ(used.high_water(), planned.high_water());
  });
}

}  // namespace
}  // namespace agoq

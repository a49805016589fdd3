// The embedding's gradient reduced by the rows of the step's tokens has the bits that it has reduced as
// a whole, on as many ranks as this program was started with.
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "ranks/rank_run.h"

namespace agoq {
namespace {

using Tokens = std::vector<std::int32_t>;

constexpr std::int64_t kRows = 101;  // of the table: no multiple of any number of ranks
constexpr std::int64_t kColumns = 300;
constexpr std::int64_t kTokens = 12;  // of a micro-batch
constexpr std::size_t kMatrix = 0, kTable = 1;

/// A matrix and a table of embeddings, of which the matrix is complete first.
class TableRun {
 public:
  TableRun(const QuantFormat& format, const ReductionConfig& reduction, std::int64_t tokens)
      : gradients_(memory_,
                   {{"layers.0.down", ParameterKind::kDown, 16, 256, 1},
                    {"embedding", ParameterKind::kEmbedding, kRows, kColumns, 3}},
                   {format}, ElementType::kBf16),
        reducer_(rank_backend(), gradients_, {kMatrix, kTable}, ranks(), reduction, memory_,
                 TokenTable{kTable, tokens}) {}

  /// Adds gradients of these micro-batches of this rank, each with the number that it has in the step.
  void step(std::uint32_t step, const std::vector<Tokens>& own) {
    gradients_.zero(context(step, 0));
    reducer_.begin_step(context(step, 1000).random);
    for (std::size_t i = 0; i < own.size(); ++i) {
      const auto number = static_cast<std::uint32_t>(ranks().rank()) +
                          static_cast<std::uint32_t>(i) * static_cast<std::uint32_t>(ranks().size());
      const Context of = context(step, number);
      reducer_.add_tokens(own[i]);
      if (i + 1 == own.size()) reducer_.begin_last(of);
      const Arena::Scope scope(of.workspace);
      const Tensor tokens = of.workspace.take(ElementType::kInt32, Shape{kTokens});
      upload(own[i], tokens);
      gradients_.add(of, kMatrix, random(of, Shape{16, 256}));
      gradients_.complete(of, kMatrix);
      gradients_.add_embedding(of, kTable, tokens, random(of, Shape{kTokens, kColumns}));
      gradients_.complete(of, kTable);
    }
    reducer_.finish(context(step, 1000));
  }

  std::string bytes(std::size_t parameter) const {
    const QuantTensor& tensor = gradients_.gradient(parameter);
    const RowBytes row = row_bytes(tensor.format, tensor.grid);
    return bytes_of(tensor.codes, static_cast<std::size_t>(row.codes * tensor.rows())) +
           bytes_of(tensor.scales, static_cast<std::size_t>(row.scales * tensor.rows()));
  }
  std::string values() const {
    const QuantTensor& tensor = gradients_.gradient(kTable);
    const Arena::Scope scope(rank_context().workspace);
    const Tensor out = rank_context().workspace.take(ElementType::kFp32, Shape{kRows, kColumns});
    rank_backend().dequantize(rank_context(), tensor, out);
    return bytes_of(out);
  }
  /// Whether all bytes of a row of the table are zero.
  bool is_zero(std::int64_t row) const {
    const QuantTensor of = gradients_.gradient(kTable).slice_rows(row, row + 1);
    const RowBytes bytes = row_bytes(of.format, of.grid);
    return (bytes_of(of.codes, static_cast<std::size_t>(bytes.codes)) +
            bytes_of(of.scales, static_cast<std::size_t>(bytes.scales)))
               .find_first_not_of('\0') == std::string::npos;
  }
  std::size_t sent_bytes() const { return reducer_.sent_bytes(); }
  double norm() const { return reducer_.norm(rank_context(), 1.0); }

 private:
  static Context context(std::uint32_t step, std::uint32_t micro_batch) {
    RandomKey key{.seed = 7};
    key.step = step;
    key.micro_batch = micro_batch;
    const Context& of = rank_context();
    return {of.backend, of.stream, of.workspace, key};
  }
  static Tensor random(const Context& context, Shape shape) {
    const Tensor values = context.workspace.take(ElementType::kFp32, shape);
    context.backend.fill_normal(context, context.random.with(RandomPurpose::kTest, 1), 1.0, values);
    return values;
  }

  Arena memory_{"gradients", rank_backend().allocator(), std::size_t{4} << 20};
  MainGradients gradients_;
  GradientReducer reducer_;
};

/// Micro-batch `number` of `count`, whose tokens are among the first `rows` rows of every seventh.
Tokens tokens_of(std::int64_t number, std::int64_t rows) {
  Tokens tokens;
  for (std::int64_t i = 0; i < kTokens; ++i) {
    tokens.push_back(static_cast<std::int32_t>((number * kTokens + i) % rows * 7 % kRows));
  }
  return tokens;
}

/// This rank's of `count` micro-batches, and the rows that all ranks meet.
struct Share {
  std::vector<Tokens> own;
  std::set<std::int32_t> met;
};
Share share_of(std::int64_t count, std::int64_t rows) {
  Share share;
  for (std::int64_t number = 0; number < count; ++number) {
    const Tokens tokens = tokens_of(number, rows);
    share.met.insert(tokens.begin(), tokens.end());
    if (number % ranks().size() == ranks().rank()) share.own.push_back(tokens);
  }
  return share;
}

QuantFormat format_of(Code code, Rounding rounding = Rounding::kNearest) {
  return {code, 128, ScaleType::kFp32, rounding};
}

// Few rows and many, one more than half and one less, less rows than ranks; more micro-batches than
// ranks, less, and other numbers on some ranks; step after step on the same memory.
TEST(SparseEmbedding, HasTheBitsOfTheWholeReduction) {
  for (const QuantFormat& format :
       {format_of(Code::kE4m3), format_of(Code::kE4m3, Rounding::kStochastic), format_of(Code::kInt8),
        format_of(Code::kDynamic8), exact_format(ElementType::kFp32)}) {
    for (const std::int64_t bucket : {std::int64_t{1}, std::int64_t{5000}, std::int64_t{1} << 27}) {
      // A bucket per row and an exchange through NCCL for each would take minutes.
      if (bucket == 1 && rank_device() == BackendKind::kCuda) continue;
      for (const bool overlap : {true, false}) {
        SCOPED_TRACE(fmt::format("{}, buckets of {}, overlap {}", format.to_string(), bucket, overlap));
        ReductionConfig config;
        config.bucket_elements = bucket;
        config.overlap = overlap;
        TableRun sparse(format, config, 24 * kTokens);
        config.sparse_embedding = false;
        TableRun whole(format, config, 24 * kTokens);
        std::uint32_t step = 0;
        for (const auto& [micro_batches, rows] :
             {std::pair{24, 20}, {2, 1}, {24, 90}, {5, 50}, {5, 51}, {1, 12}, {3, 3}}) {
          ++step;
          const Share share = share_of(micro_batches, rows);
          const std::size_t sparse_before = sparse.sent_bytes(), whole_before = whole.sent_bytes();
          sparse.step(step, share.own);
          whole.step(step, share.own);
          EXPECT_TRUE(sparse.bytes(kMatrix) == whole.bytes(kMatrix)) << "step " << step;
          EXPECT_TRUE(sparse.values() == whole.values()) << "step " << step;
          EXPECT_EQ(sparse.norm(), whole.norm());
          expect_same_on_all_ranks(sparse.bytes(kTable));
          // A zero that dynamic8 stores has a code; what was never written has zero bytes.
          if (format.code != Code::kDynamic8) {
            EXPECT_TRUE(sparse.bytes(kTable) == whole.bytes(kTable)) << "step " << step;
            for (std::int32_t row = 0; row < kRows; ++row) {
              EXPECT_TRUE(share.met.contains(row) || sparse.is_zero(row)) << "row " << row;
            }
          }
          if (ranks().size() == 1) continue;
          const bool is_sparse = static_cast<std::int64_t>(share.met.size()) <= kRows / 2;
          const std::size_t sent = sparse.sent_bytes() - sparse_before;
          EXPECT_EQ(is_sparse, sent < whole.sent_bytes() - whole_before)
              << share.met.size() << " rows, step " << step;
        }
      }
    }
  }
}

// What leaves is the rows of the union and the rest of the model, both ways.
TEST(SparseEmbedding, SendsTheRowsOfTheStepAlone) {
  if (ranks().size() == 1) GTEST_SKIP() << "one rank sends nothing";
  const QuantFormat format = format_of(Code::kE4m3);
  ReductionConfig config;
  TableRun run(format, config, 24 * kTokens);
  const Share share = share_of(24, 20);
  run.step(1, share.own);
  std::size_t all = 0;
  for (const std::size_t sent : ranks().gather_values(run.sent_bytes())) all += sent;
  // Every rank sends what it does not own, and what it owns to every other: each byte goes 2 (W - 1)
  // times.
  const auto bytes = [&](std::int64_t rows, std::int64_t columns, std::int64_t segments) {
    return static_cast<std::size_t>(payload_bytes(format, {rows, columns, segments}));
  };
  const auto met = static_cast<std::int64_t>(share.met.size());
  EXPECT_EQ(all, (bytes(16, 256, 1) + bytes(met, kColumns, 3)) * 2 *
                     static_cast<std::size_t>(ranks().size() - 1));
}

TEST(SparseEmbedding, ATrainedModelHasTheSameBits) {
  for (const Rounding rounding : {Rounding::kNearest, Rounding::kStochastic}) {
    for (const std::int64_t micro_batches : {24, 3}) {
      for (const bool tied : {false, true}) {
        RunConfig config = agoq_config();
        config.gradients.format.rounding = rounding;
        config.run.micro_batches = micro_batches;
        config.model.tied_embeddings = tied;
        const std::string expected = after_steps(config);
        config.parallel.reduction.sparse_embedding = false;
        EXPECT_TRUE(after_steps(config) == expected)
            << config.gradients.format.to_string() << ", " << micro_batches
            << " micro-batches, tied: " << tied;
      }
    }
  }
}

}  // namespace
}  // namespace agoq

#include "comm/communication_benchmark.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "comm/quantized_reduction.h"
#include "core/error.h"
#include "core/median.h"
#include "core/quantity.h"

namespace agoq {
namespace {

constexpr QuantFormat kFormat{Code::kE4m3, 128, ScaleType::kFp32, Rounding::kNearest};
constexpr double kDeviation = 0.02;
// Rows that are drawn and compared at a time.
constexpr std::int64_t kPartRows = 1024;
// Calls that are timed together take about so long, but are at most so many: sums of sums grow.
constexpr double kTimedSeconds = 0.02;
constexpr int kMostCalls = 20;

// Bounds on the relative error of a sum over W ranks. E4M3's rounding of normal numbers is 2.6 %, of the
// pieces and again of their sum; BF16's is 0.2 %, at most once per addition.
constexpr double kFp32Bound = 1e-6, kPiecesBound = 0.04, kRequantisedBound = 0.055;
double bf16_bound(int ranks) { return 0.003 * std::sqrt(static_cast<double>(ranks)); }
/// Rounding to E4M3 twice before the sum and once at each addition; and what saturates, in the mean over
/// a normal sum: what is above 4 / sqrt(W) of its deviations, since 4 deviations of a gradient are
/// within its scale.
double naive_bound(int ranks) {
  const double cut = 4 / std::sqrt(static_cast<double>(ranks));
  const double above = std::erfc(cut / std::sqrt(2.0)) / 2;
  const double density = std::exp(-cut * cut / 2) / std::sqrt(2 * std::acos(-1.0));
  const double lost = 2 * ((1 + cut * cut) * above - cut * density);
  return 0.03 * std::sqrt(ranks + 2.0) + std::sqrt(std::max(lost, 0.0));
}
// Of the sum of squares: a rounding error raises it by its own square.
constexpr double kSquaresBound = 0.01;

struct Rows {
  std::int64_t first = 0, last = 0;
};

class Benchmark {
 public:
  Benchmark(Communicator& ranks, Backend& backend, std::int64_t elements,
            const CommunicationBenchmarkOptions& options, Arena& memory, Arena& workspace)
      : ranks_(ranks),
        options_(options),
        context_{backend, {}, workspace, {.seed = 1}},
        rows_(elements / kBenchmarkWidth),
        memory_(memory) {
    gradient_ = take_rows(ElementType::kFp32);
    negated_sum_ = take_rows(ElementType::kFp32);
    part_ = memory_.take(ElementType::kFp32, Shape{std::min(kPartRows, rows_), kBenchmarkWidth});
    totals_ = memory_.take(ElementType::kFp64, Shape{2, 1});
    ready_ = memory_.take(ElementType::kFp32, Shape{1});
  }

  std::vector<CommunicationTime> measure() {
    draw();
    std::vector<CommunicationTime> times;
    const auto run = [&](auto variant) {
      const Arena::Scope scope(memory_);
      times.push_back((this->*variant)());
      times.back().elements = rows_ * kBenchmarkWidth;
      if (options_.notice && !is_measuring()) options_.notice(times.back());
    };
    run(&Benchmark::exchange);
    run(&Benchmark::quangrad);
    run(&Benchmark::sharded);
    run(&Benchmark::fp32);
    run(&Benchmark::bf16);
    run(&Benchmark::naive);
    run(&Benchmark::fp32_reduce_scatter);
    return times;
  }

 private:
  bool is_measuring() const { return memory_.is_measuring(); }
  Backend& backend() { return context_.backend; }
  std::int64_t count() const { return rows_ * kBenchmarkWidth; }
  Tensor take_rows(ElementType type) { return memory_.take(type, Shape{rows_, kBenchmarkWidth}); }
  OwnRows own() const { return own_rows(rows_, ranks_.size(), ranks_.rank()); }

  /// gradient = this rank's; negated_sum = -(sum over ranks).
  void draw() {
    backend().zero(context_, negated_sum_.data, negated_sum_.bytes());
    backend().zero(context_, ready_.data, ready_.bytes());
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      for (std::int64_t first = 0; first < rows_; first += kPartRows) {
        const std::int64_t last = std::min(first + kPartRows, rows_);
        const RandomKey key = RandomKey{.seed = 1,
                                        .step = static_cast<std::uint32_t>(rank),
                                        .micro_batch = static_cast<std::uint32_t>(first / kPartRows)};
        const Tensor drawn = part_.slice_rows(0, last - first);
        const Tensor sum = negated_sum_.slice_rows(first, last);
        backend().fill_normal(context_, key, -kDeviation, drawn);
        backend().add(context_, sum, drawn, sum);
        if (rank == ranks_.rank()) {
          backend().fill_normal(context_, key, kDeviation, gradient_.slice_rows(first, last));
        }
      }
    }
  }

  /// The largest relative error of any part of `rows`; `result` gives rows [first, last) as FP32. All
  /// ranks' largest.
  double error(Rows rows, const std::function<void(Rows, const Tensor&)>& result) {
    double worst = 0;
    for (std::int64_t first = rows.first; first < rows.last; first += kPartRows) {
      const Rows part{first, std::min(first + kPartRows, rows.last)};
      const Tensor values = part_.slice_rows(0, part.last - part.first);
      const Tensor negated = negated_sum_.slice_rows(part.first, part.last);
      result(part, values);
      backend().add(context_, values, negated, values);
      backend().sum_of_squares(context_, as_quant_tensor(values), total(0));
      backend().sum_of_squares(context_, as_quant_tensor(negated), total(1));
      double squares[2];
      backend().read(context_, totals_.data, squares, sizeof(squares));
      const double relative = std::sqrt(squares[0] / squares[1]);
      worst = relative <= worst ? worst : relative;  // NaN is the worst
    }
    for (const double other : ranks_.gather_values(worst)) worst = other <= worst ? worst : other;
    return worst;
  }
  Tensor total(std::int64_t which) const {
    return totals_.slice_rows(which, which + 1).reshaped(Shape{1});
  }

  void expect_within(CommunicationVariant variant, double error, double bound) {
    check(is_measuring() || error <= bound,
          "bench comm: the result of {} differs by {:.3g} from the sum of all ranks' gradients; at most "
          "{:.3g} was expected",
          name_of(variant), error, bound);
  }

  /// Times `call` on what `prepare` makes; leaves behind what one call makes of that.
  double time(const std::function<void()>& prepare, const std::function<void()>& call) {
    prepare();
    call();  // connects ranks and loads kernels
    if (is_measuring()) return 0;
    ranks_.wait(context_);
    const int calls =
        std::clamp(static_cast<int>(kTimedSeconds / timed(prepare, call, 1)), 1, kMostCalls);
    std::vector<double> seconds;
    for (int r = 0; r < options_.repetitions; ++r) seconds.push_back(timed(prepare, call, calls));
    prepare();
    call();
    ranks_.wait(context_);
    return median(seconds);
  }

  /// Of one of `calls`, the longest of all ranks.
  double timed(const std::function<void()>& prepare, const std::function<void()>& call, int calls) {
    prepare();
    ranks_.wait(context_);
    ranks_.barrier();
    ranks_.all_reduce(context_, ready_);  // streams go on together
    const double seconds = backend().time(
        context_,
        [&] {
          for (int i = 0; i < calls; ++i) call();
        },
        [&] { ranks_.wait(context_); });
    const std::vector<double> all = ranks_.gather_values(seconds);
    return *std::max_element(all.begin(), all.end()) / calls;
  }

  std::int64_t ring_bytes(std::int64_t bytes) const {
    return bytes / ranks_.size() * (ranks_.size() - 1);
  }

  CommunicationTime exchange() {
    const Tensor sent = memory_.take(ElementType::kUint8, Shape{count()});
    const Tensor received = memory_.take(ElementType::kUint8, Shape{count()});
    const auto bytes = static_cast<std::size_t>(count());
    const std::vector<Message> sends{{(ranks_.rank() + 1) % ranks_.size(), sent.data, bytes}};
    const std::vector<Message> receives{
        {(ranks_.rank() + ranks_.size() - 1) % ranks_.size(), received.data, bytes}};
    CommunicationTime result{.variant = CommunicationVariant::kExchange, .wire_bytes = count()};
    // Gradients' bytes: not zeros, which some links compress.
    const Tensor source{gradient_.data, ElementType::kUint8, Shape{count()}};
    result.seconds = time([&] { backend().copy(context_, source, sent); },
                          [&] { ranks_.exchange(context_, sends, receives); });
    if (is_measuring()) return result;
    std::vector<std::byte> first(64), expected(64);
    backend().read(context_, sent.data, first.data(), first.size());
    std::vector<std::byte> all(64 * static_cast<std::size_t>(ranks_.size()));
    ranks_.gather(first.data(), all.data(), first.size());
    backend().read(context_, received.data, first.data(), first.size());
    std::copy_n(all.begin() + 64 * receives.front().peer, 64, expected.begin());
    check(first == expected, "bench comm: rank {} did not receive what rank {} sent", ranks_.rank(),
          receives.front().peer);
    return result;
  }

  struct Quantised {
    QuantTensor tensor;
    std::optional<QuantizedReduction> reduction;
  };
  /// The gradient's codes, with room for every rank's piece.
  void make(Quantised& quantised) {
    BlockGrid grid{rows_, kBenchmarkWidth, 1};
    const std::vector<std::size_t> order{0};
    std::vector<Bucket> buckets =
        cut_into_buckets({&grid, 1}, order, ranks_.size(), options_.bucket_elements);
    BlockGrid with_room = grid;
    with_room.rows = ranks_.size() * slot_rows(rows_, ranks_.size());
    quantised.tensor = take(memory_, kFormat, with_room);
    quantised.tensor.grid.rows = rows_;
    quantised.reduction.emplace(ranks_, backend(), std::vector<QuantTensor>{quantised.tensor},
                                std::move(buckets), memory_);
  }

  /// Times `call`, which reduces the quantised gradient, and counts what one call sends.
  CommunicationTime time_quantised(CommunicationVariant variant, Quantised& quantised,
                                   const std::function<void()>& call) {
    CommunicationTime result{.variant = variant};
    std::size_t before = 0;
    result.seconds = time([&] { backend().quantize(context_, gradient_, quantised.tensor, {}, {}); },
                          [&] {
                            before = quantised.reduction->sent_bytes();
                            call();
                          });
    result.wire_bytes = static_cast<std::int64_t>(quantised.reduction->sent_bytes() - before);
    for (const std::int64_t other : ranks_.gather_values(result.wire_bytes)) {
      result.wire_bytes = std::max(result.wire_bytes, other);
    }
    return result;
  }

  CommunicationTime quangrad() {
    Quantised quantised;
    make(quantised);
    QuantizedReduction& reduction = *quantised.reduction;
    CommunicationTime result = time_quantised(CommunicationVariant::kQuanGrad, quantised, [&] {
      for (std::size_t b = 0; b < reduction.buckets(); ++b) reduction.all_reduce(context_, b, {});
      reduction.finish(context_);
    });
    result.relative_error = error({0, rows_}, [&](Rows rows, const Tensor& values) {
      backend().dequantize(context_, quantised.tensor.slice_rows(rows.first, rows.last), values);
    });
    expect_within(result.variant, result.relative_error, kRequantisedBound);
    return result;
  }

  CommunicationTime sharded() {
    Quantised quantised;
    make(quantised);
    QuantizedReduction& reduction = *quantised.reduction;
    const std::vector<QuantTensor> pieces = reduction.pieces(0);
    const Tensor squares = memory_.take(ElementType::kFp64, Shape{1});
    CommunicationTime result = time_quantised(CommunicationVariant::kSharded, quantised, [&] {
      for (std::size_t b = 0; b < reduction.buckets(); ++b) reduction.scatter(context_, b);
      reduction.finish(context_);
      backend().pieces_sum_of_squares(context_, pieces, squares);
    });
    const OwnRows rows = own();
    result.relative_error = error({rows.first, rows.last}, [&](Rows part, const Tensor& values) {
      std::vector<QuantTensor> of_part;
      for (const QuantTensor& piece : pieces) {
        of_part.push_back(piece.slice_rows(part.first - rows.first, part.last - rows.first));
      }
      backend().add_pieces(context_, of_part, as_quant_tensor(values), {}, {});
    });
    expect_within(result.variant, result.relative_error, kPiecesBound);

    // The norm pass: against the exact sum's squares.
    backend().sum_of_squares(context_, as_quant_tensor(negated_sum_), total(1));
    if (is_measuring()) return result;
    double own_squares = 0, of_sum = 0;
    backend().read(context_, squares.data, &own_squares, sizeof(double));
    backend().read(context_, total(1).data, &of_sum, sizeof(double));
    double of_ranks = 0;
    for (const double of_rank : ranks_.gather_values(own_squares)) of_ranks += of_rank;
    expect_within(result.variant, std::abs(of_ranks / of_sum - 1), kSquaresBound);
    return result;
  }

  CommunicationTime all_reduce(CommunicationVariant variant, ElementType type, double bound) {
    const Tensor x = take_rows(type);
    CommunicationTime result{.variant = variant,
                             .wire_bytes = 2 * ring_bytes(static_cast<std::int64_t>(x.bytes()))};
    result.seconds =
        time([&] { backend().copy(context_, gradient_, x); }, [&] { ranks_.all_reduce(context_, x); });
    result.relative_error = error({0, rows_}, [&](Rows rows, const Tensor& values) {
      backend().copy(context_, x.slice_rows(rows.first, rows.last), values);
    });
    expect_within(variant, result.relative_error, bound);
    return result;
  }
  CommunicationTime fp32() {
    return all_reduce(CommunicationVariant::kFp32, ElementType::kFp32, kFp32Bound);
  }
  CommunicationTime bf16() {
    return all_reduce(CommunicationVariant::kBf16, ElementType::kBf16, bf16_bound(ranks_.size()));
  }

  CommunicationTime naive() {
    Quantised quantised;
    make(quantised);
    QuantizedReduction& reduction = *quantised.reduction;
    // The scale that ranks would have to agree on first is known here.
    backend().quantize(context_, gradient_, quantised.tensor, {}, {});
    std::vector<float> blocks(static_cast<std::size_t>(count() / kFormat.block));
    backend().read(context_, quantised.tensor.scales, blocks.data(), blocks.size() * sizeof(float));
    float scale = *std::max_element(blocks.begin(), blocks.end());
    for (const float other : ranks_.gather_values(scale)) scale = std::max(scale, other);
    CommunicationTime result = time_quantised(CommunicationVariant::kNaiveFp8, quantised, [&] {
      for (std::size_t b = 0; b < reduction.buckets(); ++b) {
        reduction.all_reduce_naively(context_, b, {&scale, 1});
      }
      reduction.finish(context_);
    });
    result.relative_error = error({0, rows_}, [&](Rows rows, const Tensor& values) {
      backend().dequantize(context_, quantised.tensor.slice_rows(rows.first, rows.last), values);
    });
    expect_within(result.variant, result.relative_error, naive_bound(ranks_.size()));
    return result;
  }

  CommunicationTime fp32_reduce_scatter() {
    const Tensor x = take_rows(ElementType::kFp32);
    std::vector<std::int64_t> counts;
    for (int r = 0; r < ranks_.size(); ++r) {
      const OwnRows rows = own_rows(rows_, ranks_.size(), r);
      counts.push_back((rows.last - rows.first) * kBenchmarkWidth);
    }
    CommunicationTime result{.variant = CommunicationVariant::kFp32ReduceScatter,
                             .wire_bytes = ring_bytes(static_cast<std::int64_t>(x.bytes()))};
    result.seconds = time([&] { backend().copy(context_, gradient_, x); },
                          [&] { ranks_.reduce_scatter(context_, x, counts); });
    const OwnRows rows = own();
    result.relative_error = error({rows.first, rows.last}, [&](Rows part, const Tensor& values) {
      backend().copy(context_, x.slice_rows(part.first, part.last), values);
    });
    expect_within(result.variant, result.relative_error, kFp32Bound);
    return result;
  }

  Communicator& ranks_;
  const CommunicationBenchmarkOptions& options_;
  Context context_;
  std::int64_t rows_;
  Arena& memory_;
  Tensor gradient_, negated_sum_, part_, totals_, ready_;
};

}  // namespace

std::string_view name_of(CommunicationVariant variant) {
  switch (variant) {
    case CommunicationVariant::kExchange: return "plain exchange, 1 byte an element";
    case CommunicationVariant::kQuanGrad: return "QuanGrad all-reduce";
    case CommunicationVariant::kSharded: return "ZeRO-1 reduce with norm";
    case CommunicationVariant::kFp32: return "fp32 all-reduce";
    case CommunicationVariant::kBf16: return "bf16 all-reduce";
    case CommunicationVariant::kNaiveFp8: return "naive fp8 all-reduce";
    case CommunicationVariant::kFp32ReduceScatter: return "fp32 reduce-scatter";
  }
  return "";
}

CommunicationVariant control_of(CommunicationVariant variant) {
  return variant == CommunicationVariant::kSharded || variant == CommunicationVariant::kFp32ReduceScatter
             ? CommunicationVariant::kFp32ReduceScatter
             : CommunicationVariant::kFp32;
}

void expect_measurable(std::int64_t elements, int ranks) {
  check_input(
      ranks > 1,
      "bench comm measures what ranks exchange, and there is one: start several (mpirun -np 2 agoq "
      "bench comm)");
  check_input(
      elements % kBenchmarkWidth == 0 && elements / kBenchmarkWidth >= ranks,
      "--elements is a multiple of {} with a row of so many for each of the {} ranks; {} was given",
      kBenchmarkWidth, ranks, elements);
}

std::vector<CommunicationTime> measure_communication(Communicator& ranks, Backend& backend,
                                                     std::int64_t elements,
                                                     const CommunicationBenchmarkOptions& options) {
  expect_measurable(elements, ranks.size());
  Arena planned_memory = Arena::measuring("gradients");
  Arena planned_workspace = Arena::measuring("workspace");
  Benchmark(ranks, backend, elements, options, planned_memory, planned_workspace).measure();
  std::optional<Arena> memory, workspace;
  try {
    memory.emplace("gradients", backend.allocator(), planned_memory.high_water());
    workspace.emplace("workspace", backend.allocator(), planned_workspace.high_water());
  } catch (const Error& error) {
    const auto bytes =
        static_cast<std::int64_t>(planned_memory.high_water() + planned_workspace.high_water());
    throw Error(error.kind(), fmt::format("{} of memory are needed on each rank to reduce {} gradients, "
                                          "and are not there: choose fewer (--elements)",
                                          format_bytes(bytes), format_count(elements)));
  }
  return Benchmark(ranks, backend, elements, options, *memory, *workspace).measure();
}

}  // namespace agoq

#include "backend/kernel_benchmark.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "core/median.h"

namespace agoq {
namespace {

constexpr auto kFp32 = ElementType::kFp32, kBf16 = ElementType::kBf16, kInt32 = ElementType::kInt32;
constexpr std::int64_t kRotationBytes = std::int64_t{256} << 20;  // over four times the largest L2 cache
constexpr std::int64_t kMaxSets = 8;
constexpr double kTimedSeconds = 0.02;  // per timing, so that gaps between launches do not count
constexpr std::int64_t kMaxRounds = 64;
constexpr std::int64_t kDrawnElements = std::int64_t{1} << 22;
constexpr double kEpsilon = 1e-5;
constexpr int kCountedCapability = 90;  // the GPUs whose instructions instruction_counts.h counts
constexpr std::size_t kRanks = 8;       // whose pieces of a gradient are added

/// One set of operands of an operation, and the operation on it.
struct Case {
  std::int64_t bytes = 0;
  std::function<void()> run;
};

std::int64_t bytes_of(const Tensor& tensor) { return static_cast<std::int64_t>(tensor.bytes()); }
std::int64_t bytes_of(const QuantTensor& tensor) { return payload_bytes(tensor.format, tensor.grid); }
std::int64_t bytes_of(const std::vector<QuantTensor>& tensors) {
  std::int64_t bytes = 0;
  for (const QuantTensor& tensor : tensors) bytes += bytes_of(tensor);
  return bytes;
}

class KernelBenchmark {
 public:
  KernelBenchmark(const Context& context, Arena& memory, const KernelSizes& sizes, int repeats,
                  InstructionMeter* meter, const std::string& only)
      : context_(context),
        backend_(context.backend),
        memory_(memory),
        sizes_(sizes),
        repeats_(repeats),
        meter_(meter),
        only_(only) {
    drawn_ = memory.take(kFp32, Shape{std::max({kDrawnElements, sizes.vocabulary, sizes.hidden,
                                                2 * sizes.feed_forward, sizes.attention.qkv_width()})});
    backend_.fill_normal(context_, RandomKey{.seed = 5}.with(RandomPurpose::kTest, 0), 1.0, drawn_);
  }

  std::vector<KernelTime> run() {
    copy_ = {copy_case()};
    measure("copy", matrix(sizes_.tokens, 2 * sizes_.feed_forward) + " bf16", copy_);
    residual_norm_forward();
    norm_forward_saved();
    norm_backward_saved();
    swiglu_forward_save();
    swiglu_backward_saved();
    quantize();
    dequantize();
    accumulate();
    adamw_update();
    adamw_update_pieces();
    sums_of_squares();
    add_pieces();
    pieces_sums_of_squares();
    rope();
    embedding_forward();
    embedding_backward();
    embedding_backward_log_uniform();
    cross_entropy();
    return std::move(times_);
  }

 private:
  // --- operands ---

  Tensor empty(ElementType type, Shape shape) { return memory_.take(type, shape); }

  /// Calls visit(begin, end, source) for slices of `rows` rows, with as many drawn numbers as rows.
  template <typename Visit>
  void in_slices(std::int64_t rows, std::int64_t width, Visit visit) {
    const std::int64_t most = drawn_.count() / width;
    for (std::int64_t begin = 0; begin < rows; begin += most) {
      const std::int64_t end = std::min(rows, begin + most);
      Tensor source = drawn_;
      source.shape = Shape{end - begin, width};
      visit(begin, end, source);
    }
  }
  Tensor random(ElementType type, std::int64_t rows, std::int64_t width) {
    const Tensor tensor = empty(type, Shape{rows, width});
    in_slices(rows, width, [&](std::int64_t begin, std::int64_t end, const Tensor& source) {
      backend_.copy(context_, source, tensor.slice_rows(begin, end));
    });
    return tensor;
  }
  QuantTensor random(const QuantFormat& format, std::int64_t rows, std::int64_t width,
                     std::int64_t segments = 1) {
    const QuantTensor tensor = take(memory_, format, BlockGrid{rows, width, segments});
    in_slices(rows, width, [&](std::int64_t begin, std::int64_t end, const Tensor& source) {
      backend_.quantize(context_, source, tensor.slice_rows(begin, end), {}, {});
    });
    return tensor;
  }
  Tensor integers(const std::vector<std::int32_t>& values) {
    const Tensor tensor = empty(kInt32, Shape{static_cast<std::int64_t>(values.size())});
    backend_.upload(context_, values.data(), tensor.data, tensor.bytes());
    return tensor;
  }
  /// Token ids, uniform over the vocabulary.
  std::vector<std::int32_t> draw_tokens(std::int64_t count) {
    const RandomKey key = RandomKey{.seed = 5}.with(RandomPurpose::kTest, ++draws_);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = static_cast<std::int32_t>(random_bits(key, i) % sizes_.vocabulary);
    }
    return tokens;
  }
  /// Token ids, log-uniform: about as often as a text holds its most frequent word, the next, and so on.
  std::vector<std::int32_t> draw_log_uniform_tokens(std::int64_t count) {
    const RandomKey key = RandomKey{.seed = 5}.with(RandomPurpose::kTest, ++draws_);
    const auto vocabulary = static_cast<double>(sizes_.vocabulary);
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const auto drawn =
          static_cast<std::int64_t>(std::pow(vocabulary, double{random_uniform(key, i)})) - 1;
      tokens[i] = static_cast<std::int32_t>(std::min(drawn, sizes_.vocabulary - 1));
    }
    return tokens;
  }

  // --- measuring ---

  void measure(const std::string& name, const std::string& operands, const std::function<Case()>& make) {
    if (!only_.empty() && name != only_) return;
    const Arena::Scope scope(memory_);
    std::vector<Case> sets{make()};
    const std::int64_t bytes = sets[0].bytes;
    const std::int64_t wanted =
        std::clamp<std::int64_t>((kRotationBytes + bytes - 1) / bytes, 1, kMaxSets);
    while (static_cast<std::int64_t>(sets.size()) < wanted) sets.push_back(make());
    measure(name, operands, sets);
  }

  /// Of one call, over `rounds` of each of the sets.
  double seconds_of(const std::vector<Case>& sets, std::int64_t rounds) {
    const double seconds = backend_.time(context_, [&] {
      for (std::int64_t round = 0; round < rounds; ++round) {
        for (const Case& set : sets) set.run();
      }
    });
    return seconds / static_cast<double>(rounds * static_cast<std::int64_t>(sets.size()));
  }
  /// How many take kTimedSeconds.
  std::int64_t rounds_of(const std::vector<Case>& sets) {
    const double once = std::max(seconds_of(sets, 1), 1e-7) * static_cast<double>(sets.size());
    return std::clamp<std::int64_t>(std::llround(kTimedSeconds / once), 1, kMaxRounds);
  }

  void measure(const std::string& name, const std::string& operands, const std::vector<Case>& sets) {
    const std::int64_t bytes = sets[0].bytes;
    KernelTime time{name, operands, bytes, static_cast<std::int64_t>(sets.size()), 0, 0, {}, 0};
    if (context_.workspace.is_measuring()) {
      seconds_of(sets, 1);  // takes the workspace
    } else {
      const bool profiled = meter_ != nullptr && name == only_;
      if (profiled) {
        seconds_of(sets, 1);  // what is done once a process is not profiled
        meter_->begin_profile();
      }
      seconds_of(sets, 1);
      if (profiled) meter_->end_profile();
      const std::int64_t rounds = rounds_of(sets), copy_rounds = rounds_of(copy_);
      const bool is_copy = &sets == &copy_;  // its own ceiling
      std::vector<double> timings, clocks, copy_timings;
      for (int i = 0; i < repeats_; ++i) {
        if (!is_copy) copy_timings.push_back(seconds_of(copy_, copy_rounds));
        if (meter_ != nullptr) meter_->start(context_.stream);
        timings.push_back(seconds_of(sets, rounds));
        if (meter_ != nullptr) clocks.push_back(meter_->stop(context_.stream));
      }
      time.seconds = median(timings);
      time.copy_bytes_per_second =
          static_cast<double>(copy_[0].bytes) / (is_copy ? time.seconds : median(copy_timings));
      if (meter_ != nullptr) time.clock = median(clocks);
    }
    if (time.clock > 0 && meter_->capability() == kCountedCapability) {
      time.instructions = instruction_bound(name, bytes, meter_->multiprocessors(), time.clock);
    }
    times_.push_back(std::move(time));
  }

  std::string matrix(std::int64_t rows, std::int64_t width) const {
    return fmt::format("[{}, {}]", rows, width);
  }

  Case copy_case() {
    const Tensor source = random(kBf16, sizes_.tokens, 2 * sizes_.feed_forward),
                 destination = empty(kBf16, source.shape);
    return {2 * bytes_of(source), [=, this] { backend_.copy(context_, source, destination); }};
  }

  void residual_norm_forward() {
    const std::int64_t rows = sizes_.tokens, width = sizes_.hidden;
    measure("residual_norm_forward", matrix(rows, width) + " bf16, saved " + activation_.to_string(),
            [&] {
              const Tensor x = random(kBf16, rows, width), delta = random(kBf16, rows, width),
                           weight = random(kBf16, 1, width), y = empty(kBf16, x.shape),
                           rstd = empty(kFp32, Shape{rows});
              const QuantTensor saved = take(memory_, activation_, BlockGrid{rows, width, 1});
              return Case{2 * bytes_of(x) + bytes_of(delta) + bytes_of(weight) + bytes_of(y) +
                              bytes_of(rstd) + bytes_of(saved),
                          [=, this] {
                            backend_.residual_norm_forward(context_, NormKind::kRmsNorm, x, delta,
                                                           weight, kEpsilon, y, rstd, saved, {}, {});
                          }};
            });
  }

  void norm_forward_saved() {
    const std::int64_t rows = sizes_.tokens, width = sizes_.hidden;
    measure("norm_forward_saved", matrix(rows, width) + " bf16 from " + activation_.to_string(), [&] {
      const QuantTensor saved = random(activation_, rows, width);
      const Tensor weight = random(kBf16, 1, width), y = empty(kBf16, Shape{rows, width});
      return Case{bytes_of(saved) + bytes_of(weight) + bytes_of(y), [=, this] {
                    backend_.norm_forward_saved(context_, NormKind::kRmsNorm, saved, weight, kEpsilon,
                                                y);
                  }};
    });
  }

  void norm_backward_saved() {
    const std::int64_t rows = sizes_.tokens, width = sizes_.hidden;
    measure("norm_backward_saved", matrix(rows, width) + " bf16 from " + activation_.to_string(), [&] {
      const QuantTensor saved = random(activation_, rows, width);
      const Tensor dy = random(kBf16, rows, width), dx = random(kBf16, rows, width),
                   weight = random(kBf16, 1, width), dweight = random(kFp32, 1, width);
      return Case{
          bytes_of(dy) + bytes_of(saved) + bytes_of(weight) + 2 * bytes_of(dx) + 2 * bytes_of(dweight),
          [=, this] {
            backend_.norm_backward_saved(context_, NormKind::kRmsNorm, dy, saved, weight, kEpsilon, {},
                                         dx, dweight);
          }};
    });
  }

  void swiglu_forward_save() {
    const std::int64_t rows = sizes_.tokens, width = sizes_.feed_forward;
    measure("swiglu_forward_save", matrix(rows, 2 * width) + " bf16, saved " + activation_.to_string(),
            [&] {
              const Tensor gate_up = random(kBf16, rows, 2 * width),
                           hidden = empty(kBf16, Shape{rows, width});
              const QuantTensor saved =
                  take(memory_, activation_, BlockGrid{rows, 2 * width, 2 * sizes_.segments});
              return Case{bytes_of(gate_up) + bytes_of(hidden) + bytes_of(saved), [=, this] {
                            backend_.swiglu_forward_save(context_, gate_up, hidden, saved, {}, {});
                          }};
            });
  }

  void swiglu_backward_saved() {
    const std::int64_t rows = sizes_.tokens, width = sizes_.feed_forward;
    measure(
        "swiglu_backward_saved", matrix(rows, 2 * width) + " bf16 from " + activation_.to_string(), [&] {
          const QuantTensor saved = random(activation_, rows, 2 * width, 2 * sizes_.segments);
          const Tensor dhidden = random(kBf16, rows, width), hidden = empty(kBf16, dhidden.shape),
                       dgate_up = empty(kBf16, Shape{rows, 2 * width});
          return Case{
              bytes_of(dhidden) + bytes_of(saved) + bytes_of(dgate_up) + bytes_of(hidden),
              [=, this] { backend_.swiglu_backward_saved(context_, dhidden, saved, dgate_up, hidden); }};
        });
  }

  void quantize() {
    const std::int64_t rows = sizes_.tokens, width = sizes_.hidden;
    measure("quantize", matrix(rows, width) + " bf16 to " + activation_.to_string(), [&] {
      const Tensor source = random(kBf16, rows, width);
      const QuantTensor destination = take(memory_, activation_, BlockGrid{rows, width, 1});
      return Case{bytes_of(source) + bytes_of(destination),
                  [=, this] { backend_.quantize(context_, source, destination, {}, {}); }};
    });
  }

  void dequantize() {
    const std::int64_t rows = sizes_.tokens, width = sizes_.hidden;
    measure("dequantize", matrix(rows, width) + " bf16 from " + activation_.to_string(), [&] {
      const QuantTensor source = random(activation_, rows, width);
      const Tensor destination = empty(kBf16, Shape{rows, width});
      return Case{bytes_of(source) + bytes_of(destination),
                  [=, this] { backend_.dequantize(context_, source, destination); }};
    });
  }

  void accumulate() {
    const BlockGrid grid = sizes_.parameter();
    const std::int64_t rows = grid.rows, width = grid.row_length, segments = grid.segments;
    measure("accumulate", matrix(rows, width) + " fp32 into " + gradient_.to_string(), [&] {
      const Tensor addend = random(kFp32, rows, width);
      const QuantTensor main = random(gradient_, rows, width, segments);
      return Case{bytes_of(addend) + 2 * bytes_of(main),
                  [=, this] { backend_.accumulate(context_, addend, main, {}, {}); }};
    });
  }

  static constexpr QuantFormat kFirstMoment{Code::kDynamic8, 256, ScaleType::kFp32, Rounding::kNearest},
      kSecondMoment{Code::kDynamic8Unsigned, 256, ScaleType::kFp32, Rounding::kNearest};
  static constexpr AdamwStep kStep{
      .master = MasterKind::kRemainder, .learning_rate = 1e-5, .weight_decay = .1, .step = 100};

  /// Of the parameter; the gradient is the caller's.
  AdamwTensors adamw_tensors() {
    const BlockGrid grid = sizes_.parameter();
    const std::int64_t rows = grid.rows, width = grid.row_length, segments = grid.segments;
    AdamwTensors tensors;
    tensors.weight = random(kBf16, rows, width);
    tensors.master = empty(ElementType::kInt16, tensors.weight.shape);
    backend_.zero(context_, tensors.master.data, tensors.master.bytes());
    tensors.first_moment = random(kFirstMoment, rows, width, segments);
    tensors.second_moment = random(kSecondMoment, rows, width, segments);
    return tensors;
  }
  static std::int64_t bytes_of_update(const AdamwTensors& tensors) {
    return 2 * (bytes_of(tensors.weight) + bytes_of(tensors.master) + bytes_of(tensors.first_moment) +
                bytes_of(tensors.second_moment));
  }

  void adamw_update() {
    const BlockGrid grid = sizes_.parameter();
    measure("adamw_update",
            matrix(grid.rows, grid.row_length) + " bf16 + remainder, gradient " + gradient_.to_string() +
                ", moments " + kFirstMoment.to_string(),
            [&] {
              AdamwTensors tensors = adamw_tensors();
              tensors.gradient = random(gradient_, grid.rows, grid.row_length, grid.segments);
              return Case{bytes_of_update(tensors) + bytes_of(tensors.gradient),
                          [=, this] { backend_.adamw_update(context_, tensors, kStep, {}); }};
            });
  }

  void adamw_update_pieces() {
    const BlockGrid grid = sizes_.parameter();
    measure("adamw_update_pieces",
            matrix(grid.rows, grid.row_length) +
                fmt::format(" bf16 + remainder, gradient of {} ranks ", kRanks) + gradient_.to_string() +
                ", moments " + kFirstMoment.to_string(),
            [&] {
              const AdamwTensors tensors = adamw_tensors();
              const std::vector<QuantTensor> pieces = pieces_of(grid);
              return Case{bytes_of_update(tensors) + bytes_of(pieces), [=, this] {
                            backend_.adamw_update_pieces(context_, pieces, tensors, kStep, {});
                          }};
            });
  }

  /// What `kRanks` ranks hold of a gradient.
  std::vector<QuantTensor> pieces_of(const BlockGrid& grid) {
    std::vector<QuantTensor> pieces;
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      pieces.push_back(random(gradient_, grid.rows, grid.row_length, grid.segments));
    }
    return pieces;
  }

  std::string pieces_text(const BlockGrid& grid) const {
    return matrix(grid.rows, grid.row_length) +
           fmt::format(" gradient of {} ranks, {}", kRanks, gradient_.to_string());
  }

  void add_pieces() {
    const BlockGrid grid = sizes_.parameter();
    measure("add_pieces", pieces_text(grid), [&] {
      const std::vector<QuantTensor> pieces = pieces_of(grid);
      const QuantTensor sum = take(memory_, gradient_, grid);
      return Case{bytes_of(pieces) + bytes_of(sum),
                  [=, this] { backend_.add_pieces(context_, pieces, sum, {}, {}); }};
    });
  }

  void pieces_sums_of_squares() {
    const BlockGrid grid = sizes_.parameter();
    measure("pieces_sums_of_squares", pieces_text(grid), [&] {
      const std::vector<QuantTensor> pieces = pieces_of(grid);
      const Tensor total = empty(ElementType::kFp64, Shape{1});
      return Case{bytes_of(pieces) + bytes_of(total),
                  [=, this] { backend_.pieces_sum_of_squares(context_, pieces, total); }};
    });
  }

  void sums_of_squares() {
    const std::vector<BlockGrid> grids = sizes_.parameters_of_layer();
    measure("sums_of_squares",
            fmt::format("{} gradients of a layer, {}", grids.size(), gradient_.to_string()), [&] {
              std::vector<QuantTensor> gradients;
              for (const BlockGrid& grid : grids) {
                gradients.push_back(random(gradient_, grid.rows, grid.row_length, grid.segments));
              }
              const Tensor totals = empty(ElementType::kFp64, Shape{std::ssize(gradients)});
              return Case{bytes_of(gradients) + bytes_of(totals),
                          [=, this] { backend_.sums_of_squares(context_, gradients, totals); }};
            });
  }

  void rope() {
    const AttentionShape& shape = sizes_.attention;
    const std::int64_t rows = sizes_.tokens, width = shape.qkv_width();
    std::vector<std::int32_t> ascending(static_cast<std::size_t>(rows));
    for (std::size_t i = 0; i < ascending.size(); ++i) ascending[i] = static_cast<std::int32_t>(i);
    measure("rope", matrix(rows, width) + " bf16", [&] {
      const Tensor qkv = random(kBf16, rows, width), positions = integers(ascending),
                   table = rotations(rows, shape.head_size / 2);
      const std::int64_t rotated = rows * (shape.heads + shape.kv_heads) * shape.head_size *
                                   static_cast<std::int64_t>(size_of(kBf16));
      return Case{2 * rotated + bytes_of(positions) + bytes_of(table), [=, this] {
                    backend_.rope(context_, sizes_.attention, qkv, positions, table, false);
                  }};
    });
  }
  /// Cosines and sines, so that qkv does not grow from launch to launch.
  Tensor rotations(std::int64_t positions, std::int64_t pairs) {
    const Tensor table = empty(kFp32, Shape{positions, pairs, 2});
    std::vector<float> values(static_cast<std::size_t>(table.count()));
    for (std::size_t i = 0; i < values.size(); i += 2) {
      const double angle = .37 * static_cast<double>(i);
      values[i] = static_cast<float>(std::cos(angle));
      values[i + 1] = static_cast<float>(std::sin(angle));
    }
    backend_.upload(context_, values.data(), table.data, table.bytes());
    return table;
  }

  std::int64_t distinct(const std::vector<std::int32_t>& tokens) const {
    return static_cast<std::int64_t>(std::set<std::int32_t>(tokens.begin(), tokens.end()).size());
  }

  void embedding_forward() {
    const std::int64_t rows = sizes_.vocabulary, width = sizes_.hidden;
    measure("embedding_forward", matrix(rows, width) + " bf16", [&] {
      const std::vector<std::int32_t> drawn = draw_tokens(sizes_.tokens);
      const Tensor tokens = integers(drawn), table = random(kBf16, rows, width),
                   out = empty(kBf16, Shape{sizes_.tokens, width});
      return Case{bytes_of(tokens) + bytes_of(table) / rows * distinct(drawn) + bytes_of(out),
                  [=, this] { backend_.embedding_forward(context_, tokens, table, out); }};
    });
  }

  void embedding_backward() { embedding_backward("embedding_backward", &KernelBenchmark::draw_tokens); }
  void embedding_backward_log_uniform() {
    embedding_backward("embedding_backward_log_uniform", &KernelBenchmark::draw_log_uniform_tokens);
  }
  void embedding_backward(const std::string& name,
                          std::vector<std::int32_t> (KernelBenchmark::*draw)(std::int64_t)) {
    const std::int64_t rows = sizes_.vocabulary, width = sizes_.hidden;
    measure(name, matrix(rows, width) + " " + gradient_.to_string(), [&] {
      const std::vector<std::int32_t> drawn = (this->*draw)(sizes_.tokens);
      const Tensor tokens = integers(drawn), dout = random(kBf16, sizes_.tokens, width);
      const QuantTensor dtable = random(gradient_, rows, width);
      return Case{bytes_of(tokens) + bytes_of(dout) + 2 * (bytes_of(dtable) / rows) * distinct(drawn),
                  [=, this] { backend_.embedding_backward(context_, tokens, dout, dtable, {}, {}); }};
    });
  }

  void cross_entropy() {
    const std::int64_t rows = sizes_.loss_rows(), width = sizes_.vocabulary;
    measure("cross_entropy", matrix(rows, width) + " fp32, gradient bf16", [&] {
      const Tensor logits = random(kFp32, rows, width), targets = integers(draw_tokens(rows)),
                   weights = empty(kFp32, Shape{rows}), loss = empty(kFp32, Shape{rows}),
                   dlogits = empty(kBf16, logits.shape);
      const std::vector<float> ones(static_cast<std::size_t>(rows), 1.0f);
      backend_.upload(context_, ones.data(), weights.data, weights.bytes());
      return Case{
          bytes_of(logits) + bytes_of(targets) + bytes_of(weights) + bytes_of(loss) + bytes_of(dlogits),
          [=, this] { backend_.cross_entropy(context_, logits, targets, weights, loss, dlogits); }};
    });
  }

  const Context& context_;
  Backend& backend_;
  Arena& memory_;
  const KernelSizes sizes_;
  const int repeats_;
  InstructionMeter* const meter_;
  const std::string only_;
  const QuantFormat activation_ = parse_format("agoq"), gradient_ = parse_format("e4m3/128/fp32");
  Tensor drawn_;  // fp32, flat: the random numbers that operands are made of
  std::vector<Case> copy_;
  std::uint32_t draws_ = 0;
  std::vector<KernelTime> times_;
};

}  // namespace

double bound_seconds(const KernelTime& kernel) {
  const double copying = static_cast<double>(kernel.bytes) / kernel.copy_bytes_per_second;
  return kernel.instructions ? std::max(copying, kernel.instructions->seconds) : copying;
}

std::vector<KernelTime> measure_kernels(Backend& backend, const KernelSizes& sizes, int repeats,
                                        InstructionMeter* meter, const std::string& only) {
  check_input(sizes.tokens > 0, "{} tokens leave nothing to time: give at least one", sizes.tokens);
  // The same code on arenas that only measure says how much memory it takes.
  const auto count = [&](Arena& memory, Arena& workspace, const std::string& operation) {
    return KernelBenchmark({backend, {}, workspace, {}}, memory, sizes, repeats, nullptr, operation)
        .run();
  };
  {
    // The copy's operands are the least of it. Where there is no room for them this says so before the
    // host draws tokens and angles for sizes beyond the machine.
    Arena memory = Arena::measuring("benchmark tensors"), workspace = Arena::measuring("workspace");
    count(memory, workspace, "copy");
    const Arena least("benchmark tensors", backend.allocator(), memory.high_water());
  }
  Arena memory = Arena::measuring("benchmark tensors"), workspace = Arena::measuring("workspace");
  const auto counted = count(memory, workspace, only);
  check_input(only.empty() || counted.size() == 2 || only == "copy",
              "there is no operation '{}' to measure: 'agoq bench kernels' prints their names", only);
  Arena real_memory("benchmark tensors", backend.allocator(), memory.high_water());
  Arena real_workspace("workspace", backend.allocator(), workspace.high_water());
  const Context context{backend, {}, real_workspace, {}};
  return KernelBenchmark(context, real_memory, sizes, repeats, meter, only).run();
}

}  // namespace agoq

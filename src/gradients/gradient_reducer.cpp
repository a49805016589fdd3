#include "gradients/gradient_reducer.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace agoq {
namespace {

std::int64_t as_row(std::size_t parameter) { return static_cast<std::int64_t>(parameter); }

/// The library sums what it knows.
void expect_summable(const QuantTensor& gradient) {
  check_input(
      gradient.format.code == Code::kFp32 || gradient.format.code == Code::kBf16,
      "parallel.reduction=library sums fp32 and bf16 gradients, and gradients.format is {}: set it "
      "to fp32 or bf16, or parallel.reduction=quangrad",
      gradient.format.to_string());
}

void expect_naive(const MainGradients& gradients, const ReductionConfig& config) {
  check_input(!config.sharded,
              "parallel.reduction=naive-fp8 is a control with the optimizer replicated: set "
              "parallel.shard_optimizer=false");
  for (std::size_t p = 0; p < gradients.parameters().size(); ++p) {
    const QuantFormat& format = gradients.gradient(p).format;
    check_input(gradients.parameters()[p].is_vector() ||
                    (format.code == Code::kE4m3 && format.scale == ScaleType::kFp32),
                "parallel.reduction=naive-fp8 sums e4m3 gradients under fp32 scales, and "
                "gradients.format is {}: set it to e4m3/128/fp32",
                format.to_string());
  }
}

}  // namespace

GradientReducer::GradientReducer(Backend& backend, MainGradients& gradients,
                                 const std::vector<std::size_t>& order, Communicator& ranks,
                                 const ReductionConfig& config, Arena& memory,
                                 const std::optional<TokenTable>& table)
    : backend_(backend), gradients_(gradients), ranks_(ranks), config_(config), order_(order) {
  const std::size_t count = parameters().size();
  check(order.size() == count, "the reducer was given {} parameters in order; there are {}",
        order.size(), count);
  sums_ = memory.take(ElementType::kFp64, Shape{as_row(count), 1});
  under_way_.resize(count);
  std::vector<QuantTensor> tensors;
  std::vector<BlockGrid> grids;
  for (std::size_t p = 0; p < count; ++p) {
    tensors.push_back(gradients.gradient(p));
    grids.push_back(tensors.back().grid);
  }
  for (std::size_t p = 0; p < count; ++p) pieces_.push_back({tensors[p]});
  squared_ = tensors;
  if (is_alone()) return;

  if (config.kind == GradientReduction::kNaiveFp8) expect_naive(gradients, config);
  if (config.kind == GradientReduction::kLibrary) {
    for (std::size_t place = 0; place < count; ++place) {
      expect_summable(tensors[order[place]]);
      filled_by_.push_back(place + 1);
    }
  } else {
    std::vector<Bucket> buckets = cut_into_buckets(grids, order, ranks.size(), config.bucket_elements);
    std::vector<std::size_t> place(count);
    for (std::size_t i = 0; i < count; ++i) place[order[i]] = i;
    for (const Bucket& bucket : buckets) filled_by_.push_back(place[bucket.back().tensor] + 1);
    reduction_.emplace(ranks, backend, tensors, std::move(buckets), memory);
  }
  if (table && config.sparse_embedding && config.kind == GradientReduction::kQuanGrad &&
      !config.sharded) {
    prepare_table(*table, memory);
  }
  for (std::size_t p = 0; p < count; ++p) {
    const OwnRows own = own_rows(tensors[p].rows(), ranks.size(), ranks.rank());
    squared_[p] = tensors[p].slice_rows(own.first, own.last);
    if (config.sharded) {
      const bool summed = !reduction_ || config.requantise_shards;
      pieces_[p] = summed ? std::vector<QuantTensor>{squared_[p]} : reduction_->pieces(p);
    }
    squared_pieces_.push_back(config.sharded ? TensorPieces(pieces_[p]) : TensorPieces(&squared_[p], 1));
  }
}

void GradientReducer::prepare_table(const TokenTable& table, Arena& memory) {
  const QuantTensor& gradient = gradients_.gradient(table.parameter);
  // From half of the rows on there is little to gain, and a copy of more would take more memory.
  BlockGrid grid = gradient.grid;
  grid.rows = std::min(gradient.rows() / 2, table.tokens);
  table_.emplace(SparseTable{table.parameter, RowUnion(gradient.rows(), ranks_.size()),
                             take(memory, gradient.format, grid),
                             memory.take(ElementType::kInt32, Shape{grid.rows, 1})});
}

void GradientReducer::begin_step(const RandomKey& sums) {
  sum_key_ = sums;
  ++steps_;
  completed_ = 0;
  next_bucket_ = 0;
  exposed_seconds_ = 0;
  if (!table_) return;
  table_->met.clear();
  table_->is_agreed = table_->is_gathered = false;
}

void GradientReducer::add_tokens(std::span<const std::int32_t> tokens) {
  if (!table_) return;
  check(!table_->is_agreed, "tokens were added after the ranks had agreed on the step's");
  table_->met.mark(tokens);
}

// Once a step, before the first bucket: on every rank at the same place of what the ranks exchange.
void GradientReducer::agree_on_rows(const Context& context) {
  if (!table_ || table_->is_agreed) return;
  table_->is_agreed = true;
  table_->rows = {};
  // A plan takes the memory and the workspaces of the whole table, which are the larger ones.
  if (context.workspace.is_measuring()) return;
  const std::vector<std::int32_t>& met = table_->met.join(ranks_);
  const auto count = static_cast<std::int64_t>(met.size());
  if (count > table_->memory.rows()) {
    reduction_->set_rows(table_->parameter, gradients_.gradient(table_->parameter));
    return;
  }
  table_->rows = table_->memory.slice_rows(0, count);
  table_->numbers = table_->numbers_memory.slice_rows(0, count);
  // Not behind what the context's stream holds: the host would wait for that. The stream beside it has
  // read the numbers of the step before.
  const Context side{context.backend, backend_.side_stream(0), context.workspace, context.random};
  context.backend.upload(side, met.data(), table_->numbers.data, table_->numbers.bytes());
  reduction_->set_rows(table_->parameter, table_->rows, table_->numbers);
}

void GradientReducer::gather_table(const Context& context) {
  if (!table_ || !table_->rows || table_->is_gathered) return;
  table_->is_gathered = true;
  context.backend.gather_rows(beside(context), gradients_.gradient(table_->parameter), table_->numbers,
                              table_->rows);
}

void GradientReducer::scatter_table(const Context& context) {
  if (!table_ || !table_->rows) return;
  context.backend.scatter_rows(beside(context), table_->rows, table_->numbers,
                               gradients_.gradient(table_->parameter));
  rejoin(context);
}

void GradientReducer::begin_last(const Context& context) {
  agree_on_rows(context);
  // The naive sum's scales are known when all gradients are.
  if (is_alone() || !config_.overlap || config_.kind == GradientReduction::kNaiveFp8) return;
  if (steps_ == 1) return;
  gradients_.observe([this](const Context& of, std::size_t parameter) { complete(of, parameter); });
}

void GradientReducer::complete(const Context& context, std::size_t parameter) {
  check(completed_ < order_.size() && order_[completed_] == parameter,
        "the gradient of '{}' was completed out of order: the model's completion_order() names another",
        parameters()[parameter].name);
  ++completed_;
  if (table_ && parameter == table_->parameter) gather_table(context);
  send_full_buckets(context);
}

void GradientReducer::send_full_buckets(const Context& context) {
  while (next_bucket_ < filled_by_.size() && filled_by_[next_bucket_] <= completed_) {
    send(context, next_bucket_++);
  }
}

void GradientReducer::send(const Context& context, std::size_t bucket) {
  if (!reduction_) return sum_by_library(context, order_[bucket]);
  if (config_.kind == GradientReduction::kNaiveFp8) {
    return reduction_->all_reduce_naively(summing(context), bucket, scales_);
  }
  if (config_.sharded) return reduction_->scatter(context, bucket);
  reduction_->all_reduce(summing(context), bucket, gradients_.all_counters());
}

void GradientReducer::agree_on_scales(const Context& context) {
  std::vector<float> own(pieces_.size(), 0.0f), blocks;
  if (!context.workspace.is_measuring()) {
    for (std::size_t p = 0; p < own.size(); ++p) {
      const QuantTensor& gradient = gradients_.gradient(p);
      const std::int64_t bytes = gradient.rows() * row_bytes(gradient.format, gradient.grid).scales;
      if (bytes == 0) continue;
      blocks.resize(static_cast<std::size_t>(bytes) / sizeof(float));
      context.backend.read(context, gradient.scales, blocks.data(), static_cast<std::size_t>(bytes));
      own[p] = *std::max_element(blocks.begin(), blocks.end());
    }
  }
  std::vector<float> all(own.size() * static_cast<std::size_t>(ranks_.size()));
  ranks_.gather(own.data(), all.data(), own.size() * sizeof(float));
  scales_.assign(own.size(), 0.0f);
  for (std::size_t i = 0; i < all.size(); ++i) {
    float& scale = scales_[i % own.size()];
    scale = std::max(scale, all[i]);
  }
}

Context GradientReducer::beside(const Context& context) {
  if (context.workspace.is_measuring()) return context;
  const Stream side = backend_.side_stream(0);
  backend_.order(context.stream, side);
  return {context.backend, side, context.workspace, context.random};
}

void GradientReducer::rejoin(const Context& context) {
  if (!context.workspace.is_measuring()) backend_.order(backend_.side_stream(0), context.stream);
}

void GradientReducer::sum_by_library(const Context& context, std::size_t parameter) {
  const Context on_side = beside(context);
  const Tensor gradient = gradients_.gradient(parameter).exact();
  if (!config_.sharded) return ranks_.all_reduce(on_side, gradient);
  std::vector<std::int64_t> counts;
  for (int r = 0; r < ranks_.size(); ++r) {
    const OwnRows rows = own_rows(gradient.rows(), ranks_.size(), r);
    counts.push_back((rows.last - rows.first) * gradient.width());
  }
  ranks_.reduce_scatter(on_side, gradient, counts);
}

void GradientReducer::finish(const Context& context) {
  gradients_.observe({});
  if (is_alone()) return;
  agree_on_rows(context);  // a rank without a micro-batch
  gather_table(context);
  completed_ = order_.size();
  if (config_.kind == GradientReduction::kNaiveFp8) agree_on_scales(context);
  send_full_buckets(context);
  exposed_seconds_ = backend_.time(
      context,
      [&] {
        if (reduction_) {
          reduction_->finish(context);
          scatter_table(context);
        } else {
          rejoin(context);
        }
      },
      [&] { ranks_.wait(context); });
  if (!(reduction_ && config_.sharded && config_.requantise_shards)) return;
  for (std::size_t p = 0; p < pieces_.size(); ++p) {
    const QuantTensor& own = pieces_[p].front();
    if (own.rows() == 0) continue;
    context.backend.add_pieces(context, reduction_->pieces(p), own,
                               sum_key_.with(RandomPurpose::kSumRounding, static_cast<std::uint32_t>(p)),
                               gradients_.counters(p));
  }
}

void GradientReducer::sum_squares(const Context& context) const {
  if (is_alone()) return context.backend.sums_of_squares(context, squared_, sums_);
  context.backend.pieces_sums_of_squares(context, squared_pieces_, sums_);
}

double GradientReducer::norm(const Context& context, double scale) const {
  const std::size_t count = pieces_.size();
  const auto ranks = static_cast<std::size_t>(ranks_.size());
  sum_squares(context);
  if (context.workspace.is_measuring()) return 0.0;

  struct OfParameter {
    double sum = 0;
    std::int64_t non_finite = 0;
  };
  std::vector<double> sums(count);
  context.backend.read(context, sums_.data, sums.data(), sums_.bytes());
  const std::vector<QuantCounts> counts = gradients_.read_counts(context);
  std::vector<OfParameter> mine(count);
  for (std::size_t p = 0; p < count; ++p) mine[p] = {sums[p], counts[p].non_finite};
  std::vector<OfParameter> all(count * ranks);
  ranks_.gather(mine.data(), all.data(), count * sizeof(OfParameter));

  // A quantised format stores NaN as zero and Inf as its largest value: there only the counter tells,
  // and it is that of the rank which added them. An exact format keeps them, also in the sum over the
  // ranks, where the rank that answers for their rows finds and counts them: it need not be the one that
  // they come from, so none is named. From the last parameter, whose gradient backward computes first:
  // those before it may have it from there.
  for (std::size_t p = count; p-- > 0;) {
    const bool is_sum = !is_alone() && gradients_.gradient(p).format.is_exact();
    for (std::size_t r = 0; r < ranks; ++r) {
      const OfParameter& of = all[r * count + p];
      const std::string where = is_alone() ? "" : fmt::format(" on rank {}", r);
      check_finite(
          is_sum || of.non_finite == 0,
          "the gradient of '{}' must be finite, but {} NaN or Inf elements were added to it{}: look "
          "for the overflow in that layer's activations, or lower the learning rate",
          parameters()[p].name, of.non_finite, where);
      check_finite(std::isfinite(of.sum),
                   "the gradient of '{}' must be finite, but its sum of squares is {}{}: look for the "
                   "overflow in that layer's activations, or lower the learning rate",
                   parameters()[p].name, of.sum, is_sum ? " in the sum over all ranks" : where);
    }
  }
  double total = 0.0;
  for (std::size_t p = 0; p < count; ++p) {
    double of_parameter = 0.0;
    for (std::size_t r = 0; r < ranks; ++r) of_parameter += all[r * count + p].sum;
    total += of_parameter;
  }
  return std::sqrt(total) * scale;
}

void GradientReducer::gather_weight(const Context& context, std::size_t parameter,
                                    const Tensor& weight) {
  if (is_alone() || !config_.sharded) return;
  sends_.clear();
  receives_.clear();
  add_gathering(ranks_, as_quant_tensor(weight), {0, slot_rows(weight.rows(), ranks_.size())}, sends_,
                receives_);
  const Context side = beside(context);
  ranks_.exchange(side, sends_, receives_);
  if (context.workspace.is_measuring()) return;
  backend_.mark(side.stream, static_cast<int>(parameter));
  under_way_[parameter] = true;
}

void GradientReducer::await_weight(const Context& context, std::size_t parameter) {
  if (!under_way_[parameter]) return;
  under_way_[parameter] = false;
  backend_.await_mark(static_cast<int>(parameter), context.stream);
}

void GradientReducer::finish_gathering(const Context& context) {
  for (std::size_t parameter = 0; parameter < under_way_.size(); ++parameter) {
    await_weight(context, parameter);
  }
}

}  // namespace agoq

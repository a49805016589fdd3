#include "train/trainer.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "train/finite_trace.h"
#include "train/rank_counts.h"

namespace agoq {
namespace {

/// A context for the layout of a run, before the Trainer has a step.
Context layout_context(Backend& backend, RunArenas& arenas, const RunConfig& config) {
  RandomKey key;
  key.seed = config.run.seed;
  return {backend, {}, arenas[MemoryClass::kWorkspace], key};
}

OptimizerShare share_of(const RunConfig& config, const Communicator& ranks) {
  if (!config.parallel.reduction.sharded) return {};
  return {ranks.rank(), ranks.size()};
}

std::int64_t tokens_of(const RunConfig& config) { return config.run.sequence * config.run.micro_batch; }

std::optional<TokenTable> token_table(const Transformer& model, const RunConfig& config) {
  const std::optional<std::size_t> table = model.token_table();
  if (!table) return std::nullopt;
  return TokenTable{*table, config.run.tokens_per_step()};
}

}  // namespace

Trainer::Trainer(const RunConfig& config, Backend& backend, RunArenas& arenas)
    : Trainer(config, backend, arenas, single_rank(), nullptr) {}

Trainer::Trainer(const RunConfig& config, Backend& backend, RunArenas& arenas, Communicator& ranks)
    : Trainer(config, backend, arenas, nullptr, &ranks) {}

Trainer::Trainer(const RunConfig& config, Backend& backend, RunArenas& arenas,
                 std::unique_ptr<Communicator> alone, Communicator* ranks)
    : config_(config),
      backend_(backend),
      alone_(std::move(alone)),
      ranks_(ranks == nullptr ? *alone_ : *ranks),
      workspace_(arenas[MemoryClass::kWorkspace]),
      tokens_(tokens_of(config)),
      model_(layout_context(backend, arenas, config), config.model, arenas[MemoryClass::kWeights],
             arenas[MemoryClass::kTables], config.run.sequence),
      gradients_(arenas[MemoryClass::kGradients], model_.parameters(), config.gradients,
                 config.model.dtype, share_of(config, ranks_).ranks),
      reducer_(backend, gradients_, model_.completion_order(), ranks_, config.parallel.reduction,
               arenas[MemoryClass::kCommunication], token_table(model_, config)),
      optimizer_(arenas[MemoryClass::kMoments], arenas[MemoryClass::kMasters], model_.parameters(),
                 config.optimizer, config.model.dtype, share_of(config, ranks_)),
      // Forward and backward of a micro-batch follow each other, so one frame is in flight.
      store_(arenas[MemoryClass::kActivations], transformer_saves(config.model),
             make_bit_plan(transformer_saves(config.model), config.activations), tokens_, 1),
      forward_only_(arenas[MemoryClass::kBatch], transformer_saves(config.model),
                    make_forward_only_plan(transformer_saves(config.model)), tokens_, 1),
      buffers_(arenas[MemoryClass::kBatch], tokens_, config.run.sequence) {
  model_.before_use([this](const Context& context, std::size_t parameter) {
    reducer_.await_weight(context, parameter);
  });
  // Plans and runs both come by here, so both take the workspaces of this mode.
  backend.set_deterministic(config.run.deterministic);
  Arena& batch = arenas[MemoryClass::kBatch];
  token_loss_ = batch.take(statistics_type(config.model.dtype), Shape{tokens_});
  loss_sums_ = batch.take(ElementType::kFp64, Shape{config.run.micro_batches});
}

const Transformer& Trainer::model() {
  reducer_.finish_gathering(context());
  return model_;
}

Context Trainer::context() {
  RandomKey key;
  key.seed = config_.run.seed;
  key.step = static_cast<std::uint32_t>(step_ + 1);
  key.micro_batch = static_cast<std::uint32_t>(micro_batch_number(micro_batch_));
  return {backend_, {}, workspace_, key};
}

void Trainer::initialise() {
  const Context context = this->context();
  for (std::size_t p = 0; p < model_.parameters().size(); ++p) {
    const Parameter& parameter = model_.parameters()[p];
    const Arena::Scope scope(workspace_);
    const Tensor initial = workspace_.take(ElementType::kFp32, Shape{parameter.rows, parameter.columns});
    initial_values(context, config_.model, parameter, p, initial);
    optimizer_.initialise(context, p, initial, model_.weights()[p]);
  }
}

std::int64_t Trainer::own_micro_batches() const {
  const std::int64_t ranks = ranks_.size();
  return (config_.run.micro_batches + ranks - 1 - ranks_.rank()) / ranks;
}

std::int64_t Trainer::micro_batch_number(std::int64_t index) const {
  return ranks_.rank() + index * ranks_.size();
}

void Trainer::begin_step() {
  micro_batch_ = 0;
  valid_tokens_ = 0;
  const Context context = this->context();
  gradients_.zero(context);
  // One past the micro-batches: the sum over the ranks rounds with the same numbers for every W.
  RandomKey sums = context.random;
  sums.micro_batch = static_cast<std::uint32_t>(config_.run.micro_batches);
  reducer_.begin_step(sums);
  store_.reset_counters(context);
}

void Trainer::micro_batch(const HostBatch& host) {
  reducer_.add_tokens(host.tokens);
  if (micro_batch_ + 1 == own_micro_batches()) reducer_.begin_last(context());
  forward_and_backward(host, {});
}

void Trainer::gradients_of(const HostBatch& host, const Between& between) {
  begin_step();
  forward_and_backward(host, between);
}

void Trainer::forward_and_backward(const HostBatch& host, const Between& between) {
  check(micro_batch_ < own_micro_batches(), "a step has {} micro-batches; one more came",
        own_micro_batches());
  const Context context = this->context();
  const Batch batch = buffers_.upload(context, host);
  const Arena::Scope scope(workspace_);
  const Tensor doutput = workspace_.take(config_.model.dtype, Shape{tokens_, config_.model.hidden});
  const std::size_t frame = store_.open();
  model_.forward(context, batch, store_, frame, gradients_, token_loss_, doutput);
  backend_.sum(
      context, token_loss_,
      loss_sums_.reshaped(Shape{loss_sums_.count(), 1}).slice_rows(micro_batch_, micro_batch_ + 1));
  if (between) between(store_, frame);
  model_.backward(context, batch, store_, frame, gradients_, doutput);
  const std::vector<std::string> unused = store_.close(frame);
  check(unused.empty(), "{} was saved and never loaded: remove it from the layer's saves()",
        unused.empty() ? "" : unused.front());
  valid_tokens_ += host.valid_tokens;
  ++micro_batch_;
}

StepReport Trainer::finish_step() {
  const Context context = this->context();
  reducer_.finish(context);
  StepReport report;
  report.step = step_ + 1;
  struct OfRank {
    double loss = 0;
    std::int64_t valid_tokens = 0;
    double exposed_seconds = 0;
  };
  std::vector<double> sums(static_cast<std::size_t>(micro_batch_));
  backend_.read(context, loss_sums_.data, sums.data(), sums.size() * sizeof(double));
  OfRank own{0, valid_tokens_, reducer_.exposed_seconds()};
  for (const double sum : sums) own.loss += sum;
  double total = 0;
  double longest_seconds = 0;
  report.exposed_communication_seconds = own.exposed_seconds;
  for (const OfRank& of : ranks_.gather_values(own)) {
    total += of.loss;
    report.valid_tokens += of.valid_tokens;
    longest_seconds = std::max(longest_seconds, of.exposed_seconds);
    report.exposed_communication_seconds =
        std::min(report.exposed_communication_seconds, of.exposed_seconds);
  }
  report.rank_wait_seconds = longest_seconds - report.exposed_communication_seconds;
  check_input(report.valid_tokens > 0,
              "step {} has no token with a loss weight: the data hold no targets", report.step);
  report.loss = total / static_cast<double>(report.valid_tokens);

  std::vector<NamedCounts> numerics = store_.read_counters(context);
  // The gradients' are judged with their norm, which sees what formats that can hold NaN do not count.
  const std::size_t activations = numerics.size();
  for (const auto& [name, counts] : gradients_.read_counters(context)) {
    numerics.push_back({"gradient of " + name, counts});
  }
  const std::vector<RankCounts> of_ranks = gather_counts(ranks_, numerics, activations);
  for (const RankCounts& of : of_ranks) {
    check_finite(of.is_gradient || of.counts.non_finite == 0,
                 "step {}: {} values of {} are NaN or infinite{}; the weights stay those of step {}",
                 report.step, of.counts.non_finite, of.name, of_rank(ranks_, of.rank), step_);
  }
  report.numerics = sum_over_ranks(of_ranks);
  check_finite(std::isfinite(report.loss), "step {}: the loss is {}; the weights stay those of step {}",
               report.step, report.loss, step_);

  // A rank without a micro-batch has not waited for the weights of the last update yet.
  reducer_.finish_gathering(context);
  report.learning_rate = learning_rate_at(config_.optimizer, report.step, config_.run.steps);
  try {
    // A weight goes to the other ranks while the next are updated, and comes from them before the next
    // forward pass uses it.
    report.gradient_norm = optimizer_.update(
        context, model_.weights(), reducer_, report.learning_rate,
        1.0 / static_cast<double>(report.valid_tokens), report.step, [&](std::size_t parameter) {
          reducer_.gather_weight(context, parameter, model_.weights()[parameter]);
        });
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kNotFinite) throw;
    throw Error(error.kind(), fmt::format("step {}: {}; the weights stay those of step {}", report.step,
                                          error.what(), step_));
  }
  ++step_;
  return report;
}

std::optional<std::string> Trainer::first_not_finite(const HostBatch& host) {
  FiniteTrace trace(backend_, loss_sums_.reshaped(Shape{loss_sums_.count(), 1}).slice_rows(0, 1));
  const Context own = context();
  reducer_.finish_gathering(own);
  const Context traced{trace, own.stream, own.workspace, own.random};
  for (std::size_t p = 0; p < model_.parameters().size(); ++p) {
    trace.look_at(traced, model_.weights()[p], "the weight " + model_.parameters()[p].name);
  }
  if (trace.first()) return trace.first();
  const Batch batch = buffers_.upload(traced, host);
  struct Observed {
    Observed(ActivationStore& of, FiniteTrace& by) : store(of) {
      store.observe([&by](const std::string& name, const Tensor& tensor) { by.call(tensor, name); });
    }
    ~Observed() { store.observe({}); }
    Observed(const Observed&) = delete;
    Observed& operator=(const Observed&) = delete;
    ActivationStore& store;
  };
  const Observed observed(forward_only_, trace);
  model_.evaluate(traced, batch, forward_only_, token_loss_);
  return trace.first();
}

double Trainer::evaluate(const HostBatch& host) {
  const Context context = this->context();
  const Batch batch = buffers_.upload(context, host);
  model_.evaluate(context, batch, forward_only_, token_loss_);
  const Tensor total = loss_sums_.reshaped(Shape{loss_sums_.count(), 1}).slice_rows(0, 1);
  backend_.sum(context, token_loss_, total);
  double sum = 0;
  backend_.read(context, total.data, &sum, sizeof(sum));
  return sum;
}

std::size_t Trainer::loss_workspace() { return model_.loss_workspace(context(), tokens_, gradients_); }

}  // namespace agoq

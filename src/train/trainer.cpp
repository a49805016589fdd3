#include "train/trainer.h"

#include <cmath>

#include "train/finite_trace.h"

namespace agoq {
namespace {

/// A context for the layout of a run, before the Trainer has a step.
Context layout_context(Backend& backend, RunArenas& arenas, const RunConfig& config) {
  RandomKey key;
  key.seed = config.run.seed;
  return {backend, {}, arenas[MemoryClass::kWorkspace], key};
}

std::int64_t tokens_of(const RunConfig& config) { return config.run.sequence * config.run.micro_batch; }

}  // namespace

Trainer::Trainer(const RunConfig& config, Backend& backend, RunArenas& arenas)
    : config_(config),
      backend_(backend),
      workspace_(arenas[MemoryClass::kWorkspace]),
      tokens_(tokens_of(config)),
      model_(layout_context(backend, arenas, config), config.model, arenas[MemoryClass::kWeights],
             arenas[MemoryClass::kTables], config.run.sequence),
      gradients_(arenas[MemoryClass::kGradients], model_.parameters(), config.gradients,
                 config.model.dtype),
      optimizer_(arenas[MemoryClass::kMoments], arenas[MemoryClass::kMasters], model_.parameters(),
                 config.optimizer, config.model.dtype),
      // Forward and backward of a micro-batch follow each other, so one frame is in flight.
      store_(arenas[MemoryClass::kActivations], transformer_saves(config.model),
             make_bit_plan(transformer_saves(config.model), config.activations), tokens_, 1),
      forward_only_(arenas[MemoryClass::kBatch], transformer_saves(config.model),
                    make_forward_only_plan(transformer_saves(config.model)), tokens_, 1),
      buffers_(arenas[MemoryClass::kBatch], tokens_, config.run.sequence) {
  // Plans and runs both come by here, so both take the workspaces of this mode.
  backend.set_deterministic(config.run.deterministic);
  Arena& batch = arenas[MemoryClass::kBatch];
  token_loss_ = batch.take(statistics_type(config.model.dtype), Shape{tokens_});
  loss_sums_ = batch.take(ElementType::kFp64, Shape{config.run.micro_batches});
}

Context Trainer::context() {
  RandomKey key;
  key.seed = config_.run.seed;
  key.step = static_cast<std::uint32_t>(step_ + 1);
  key.micro_batch = static_cast<std::uint32_t>(micro_batch_);
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

void Trainer::begin_step() {
  micro_batch_ = 0;
  valid_tokens_ = 0;
  const Context context = this->context();
  gradients_.zero(context);
  store_.reset_counters(context);
}

void Trainer::micro_batch(const HostBatch& host) { forward_and_backward(host, {}); }

void Trainer::gradients_of(const HostBatch& host, const Between& between) {
  begin_step();
  forward_and_backward(host, between);
}

void Trainer::forward_and_backward(const HostBatch& host, const Between& between) {
  check(micro_batch_ < config_.run.micro_batches, "a step has {} micro-batches; one more came",
        config_.run.micro_batches);
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
  StepReport report;
  report.step = step_ + 1;
  report.valid_tokens = valid_tokens_;
  check_input(valid_tokens_ > 0, "step {} has no token with a loss weight: the data hold no targets",
              report.step);
  std::vector<double> sums(static_cast<std::size_t>(micro_batch_));
  backend_.read(context, loss_sums_.data, sums.data(), sums.size() * sizeof(double));
  double total = 0;
  for (const double sum : sums) total += sum;
  report.loss = total / static_cast<double>(valid_tokens_);

  report.numerics = store_.read_counters(context);
  for (const NamedCounts& numeric : report.numerics) {
    check_finite(numeric.counts.non_finite == 0,
                 "step {}: {} values of {} are NaN or infinite; the weights stay those of step {}",
                 report.step, numeric.counts.non_finite, numeric.name, step_);
  }
  // The gradients' are judged with their norm, which sees what formats that can hold NaN do not count.
  for (const auto& [name, counts] : gradients_.read_counters(context)) {
    report.numerics.push_back({"gradient of " + name, counts});
  }
  check_finite(std::isfinite(report.loss), "step {}: the loss is {}; the weights stay those of step {}",
               report.step, report.loss, step_);

  report.learning_rate = learning_rate_at(config_.optimizer, report.step, config_.run.steps);
  try {
    report.gradient_norm = optimizer_.update(context, model_.weights(), gradients_, report.learning_rate,
                                             1.0 / static_cast<double>(valid_tokens_), report.step);
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

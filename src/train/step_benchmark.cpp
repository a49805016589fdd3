#include "train/step_benchmark.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "checkpoint/json_text.h"
#include "comm/together.h"
#include "core/median.h"
#include "train/batch_buffers.h"
#include "train/peak_memory.h"
#include "train/rank_agreement.h"
#include "train/trainer.h"

namespace agoq {
namespace {

using Clock = std::chrono::steady_clock;

/// Peak dense BF16 rate by device name (vendors' data sheets).
std::optional<double> peak_flops_of(const std::string& device) {
  struct Peak {
    const char* name;
    double flops;
  };
  constexpr Peak kPeaks[] = {{"H200", 989e12}, {"H100", 989e12}, {"A100", 312e12}, {"B200", 2250e12}};
  for (const Peak& peak : kPeaks) {
    if (device.find(peak.name) != std::string::npos) return peak.flops;
  }
  return std::nullopt;
}

HostBatch random_batch(const RunConfig& config, std::uint32_t index) {
  HostBatch batch = shape_only_batch(config.run.micro_batch, config.run.sequence);
  const RandomKey key = RandomKey{.seed = config.run.seed}.with(RandomPurpose::kDataOrder, index);
  const auto vocabulary = static_cast<std::uint32_t>(config.model.vocabulary);
  for (std::size_t i = 0; i < batch.tokens.size(); ++i) {
    batch.tokens[i] = static_cast<std::int32_t>(random_bits(key, 2 * i) % vocabulary);
    batch.targets[i] = static_cast<std::int32_t>(random_bits(key, 2 * i + 1) % vocabulary);
  }
  return batch;
}

double attention_flops(const RunConfig& config, bool causal) {
  const ModelConfig& model = config.model;
  const double square = 12.0 * static_cast<double>(model.layers) *
                        static_cast<double>(model.attention().output_width()) *
                        static_cast<double>(config.run.sequence);
  return causal ? square / 2 : square;
}

/// Weights that take part in matrix products: all matrices, but the embedding only as the head.
double matrix_weights(const ModelConfig& model) {
  double weights = 0;
  for (const Parameter& parameter : parameters_of(model)) {
    if (!parameter.is_vector()) weights += static_cast<double>(parameter.count());
  }
  const double embedding = static_cast<double>(model.vocabulary) * static_cast<double>(model.hidden);
  return model.tied_embeddings ? weights : weights - embedding;
}

/// What the machine allows for one step, measured on operands of the step's sizes in the arenas' memory.
class Floor {
  static constexpr double kTimedSeconds = 0.005;

 public:
  /// With a measuring context and memory nothing is timed.
  Floor(const RunConfig& config, const Context& context, Arena& memory)
      : config_(config), context_(context), backend_(context.backend), memory_(memory) {}

  double copy_speed() {
    const Arena::Scope scope(memory_);
    // On a device what bench kernels copies, by which its kernels are judged: of 2^28 BF16 elements to a
    // place 2^29 bytes on an H200 copies 12 % slower. A host is no faster with more than these.
    const std::int64_t count = backend_.device_memory() ? std::int64_t{7} << 26 : std::int64_t{1} << 26;
    const Tensor from = random(Shape{count}), to = memory_.take(config_.model.dtype, Shape{count});
    const double seconds = seconds_of([&] { backend_.copy(context_, from, to); });
    return 2.0 * static_cast<double>(from.bytes()) / seconds;
  }

  /// All matrix products of a micro-batch, each at its own best speed.
  double matmul_seconds() {
    const ModelConfig& model = config_.model;
    const std::int64_t tokens = config_.run.sequence * config_.run.micro_batch;
    const std::int64_t width = model.attention().output_width();
    const auto layers = static_cast<double>(model.layers);
    double seconds = 0;
    seconds += layers * product(tokens, model.attention().qkv_width(), model.hidden);
    seconds += layers * product(tokens, model.hidden, width);
    seconds += layers * product(tokens, 2 * model.feed_forward, model.hidden);
    seconds += layers * product(tokens, model.hidden, model.feed_forward);
    // The head in chunks of tokens, as it runs.
    const std::int64_t chunk = std::min(model.loss_chunk, tokens);
    seconds += static_cast<double>(tokens) / static_cast<double>(chunk) *
               product(chunk, model.vocabulary, model.hidden);
    return seconds;
  }

  double attention_seconds() {
    const ModelConfig& model = config_.model;
    const AttentionShape shape = model.attention();
    const Arena::Scope scope(memory_);
    const HostBatch host = shape_only_batch(config_.run.micro_batch, config_.run.sequence);
    const auto tokens = static_cast<std::int64_t>(host.tokens.size());
    Documents documents;
    documents.starts = memory_.take(ElementType::kInt32, Shape{host.document_count + 1});
    documents.count = host.document_count;
    documents.longest = host.longest_document;
    backend_.upload(context_, host.document_starts.data(), documents.starts.data,
                    documents.starts.bytes());
    const Tensor qkv = random(Shape{tokens, shape.qkv_width()});
    const Tensor out = memory_.take(model.dtype, Shape{tokens, shape.output_width()});
    const Tensor lse = memory_.take(statistics_type(model.dtype), Shape{tokens, shape.heads});
    const Tensor dout = random(out.shape);
    const Tensor dqkv = memory_.take(model.dtype, qkv.shape);
    const double forward =
        seconds_of([&] { backend_.attention_forward(context_, shape, qkv, documents, out, lse); });
    const double backward = seconds_of(
        [&] { backend_.attention_backward(context_, shape, dout, qkv, out, lse, documents, dqkv); });
    return static_cast<double>(model.layers) * (forward + backward);
  }

 private:
  /// Of `work`: the median of five timings. Each is of as many calls in a row as make a single one's
  /// launch too short to count, and too few for a GPU to come to its power limit.
  double seconds_of(const std::function<void()>& work) {
    if (memory_.is_measuring()) {
      work();
      return 1;
    }
    backend_.time(context_, work);  // what is chosen or loaded once is not the machine's speed
    const double once = std::max(backend_.time(context_, work), 1e-7);
    const auto calls = static_cast<int>(std::clamp(kTimedSeconds / once, 1.0, 1000.0));
    std::vector<double> seconds;
    seconds.reserve(5);
    for (int i = 0; i < 5; ++i) {
      seconds.push_back(backend_.time(context_, [&] {
        for (int call = 0; call < calls; ++call) work();
      }) / calls);
    }
    return median(std::move(seconds));
  }
  Tensor random(Shape shape) {
    const Tensor tensor = memory_.take(config_.model.dtype, shape);
    fill(tensor);
    return tensor;
  }
  void fill(const Tensor& tensor) {
    // Through a small FP32 piece: data must be random, for zeros draw less power and run faster.
    const Arena::Scope scope(memory_);
    constexpr std::int64_t kPiece = std::int64_t{1} << 22;
    const std::int64_t count = tensor.count();
    const Tensor piece = memory_.take(ElementType::kFp32, Shape{std::min(kPiece, count)});
    backend_.fill_normal(context_, RandomKey{.seed = ++drawn_}, 1.0, piece);
    for (std::int64_t begin = 0; begin < count; begin += kPiece) {
      const std::int64_t length = std::min(kPiece, count - begin);
      const Tensor part{tensor.data + static_cast<std::size_t>(begin) * size_of(tensor.type),
                        tensor.type, Shape{length}};
      backend_.copy(context_, Tensor{piece.data, piece.type, Shape{length}}, part);
    }
  }
  /// Forward, input gradient and weight gradient of y [tokens, out] = x [tokens, in] w^T.
  double product(std::int64_t tokens, std::int64_t out, std::int64_t in) {
    const Arena::Scope scope(memory_);
    const Tensor x = random(Shape{tokens, in}), w = random(Shape{out, in}),
                 y = random(Shape{tokens, out});
    const auto time = [&](const Tensor& a, Transpose flip_a, const Tensor& b, Transpose flip_b,
                          const Tensor& c) {
      return seconds_of([&] { backend_.matmul(context_, a, flip_a, b, flip_b, c); });
    };
    const Tensor made = memory_.take(config_.model.dtype, y.shape);
    const double forward = time(x, Transpose::kNo, w, Transpose::kYes, made);
    const Tensor dx = memory_.take(config_.model.dtype, x.shape);
    const double input = time(y, Transpose::kNo, w, Transpose::kNo, dx);
    const Tensor dw = memory_.take(config_.model.dtype, w.shape);
    return forward + input + time(y, Transpose::kYes, x, Transpose::kNo, dw);
  }

  const RunConfig& config_;
  Context context_;
  Backend& backend_;
  Arena& memory_;
  std::uint64_t drawn_ = 0;
};

bool is_timed_for_floor(const std::string& operation) {
  return operation == "matmul" || operation == "attention_forward" || operation == "attention_backward";
}

void measure_floor(const RunConfig& config, Backend& backend, StepBenchmark& result) {
  const auto run = [&](Arena& workspace, Arena& memory) {
    Floor floor(config, {backend, {}, workspace, {}}, memory);
    result.copy_bytes_per_second = floor.copy_speed();
    result.floor_seconds = static_cast<double>(config.run.micro_batches) *
                           (floor.matmul_seconds() + floor.attention_seconds());
  };
  Arena workspace_plan = Arena::measuring("workspace of the floor");
  Arena memory_plan = Arena::measuring("operands of the floor");
  run(workspace_plan, memory_plan);
  Arena workspace("workspace of the floor", backend.allocator(), workspace_plan.high_water());
  Arena memory("operands of the floor", backend.allocator(), memory_plan.high_water());
  run(workspace, memory);
  for (const OperationProfile& operation : result.operations) {
    if (is_timed_for_floor(operation.operation)) continue;
    result.floor_seconds += operation.bytes / result.copy_bytes_per_second;
  }
}

}  // namespace

StepBenchmark benchmark_step(const RunConfig& given, Backend& backend, Communicator& ranks,
                             const StepBenchmarkOptions& options) {
  check_input(options.steps >= 1 && options.warmup_steps >= 0, "--steps is at least 1; {} was given",
              options.steps);
  expect_agreement(ranks, facts_of_run(ranks, given, RunStart::kNew));
  RunConfig config;
  together(ranks, [&] { config = with_ranks(given, ranks); });
  // The schedule has no learning rate past train.steps, which need not be as many as are timed.
  config.run.steps =
      std::max<std::int64_t>(config.run.steps, std::int64_t{options.warmup_steps} + options.steps + 2);
  const PeakMemory peak_memory(backend);
  StepBenchmark result;
  result.ranks = ranks.size();
  together(ranks, [&] {
    expect_ready(config, backend);
    result.plan = plan_run(config, backend, 0, false);
    result.plan.checkpoint = 0;  // none is written
    check_fits(result.plan, config, backend);
  });
  result.tokens = config.run.tokens_per_step();
  result.model_flops = static_cast<double>(result.tokens) *
                       (6 * matrix_weights(config.model) + attention_flops(config, /*causal=*/true));
  result.model_flops_full =
      static_cast<double>(result.tokens) *
      (6 * matrix_weights(config.model) + attention_flops(config, /*causal=*/false));
  if (const std::optional<DeviceMemory> device = backend.device_memory()) {
    result.peak_flops = peak_flops_of(device->name);
  }
  if (result.peak_flops) *result.peak_flops *= ranks.size();

  std::vector<HostBatch> batches;
  for (std::int64_t m = ranks.rank(); m < config.run.micro_batches; m += ranks.size()) {
    batches.push_back(random_batch(config, static_cast<std::uint32_t>(m)));
  }
  const auto queue_gradients = [&](Trainer& trainer) {
    trainer.begin_step();
    for (const HostBatch& batch : batches) trainer.micro_batch(batch);
  };
  const auto step = [&](Trainer& trainer) {
    queue_gradients(trainer);
    trainer.finish_step();
  };
  {
    RunArenas arenas(backend.allocator(), result.plan.classes);
    {
      Trainer trainer(config, backend, arenas, ranks);
      trainer.initialise();
      for (int i = 0; i < options.warmup_steps; ++i) step(trainer);
      const Context context = trainer.context();
      std::vector<double> host_seconds, exposed_seconds, wait_seconds;
      for (int i = 0; i < options.steps; ++i) {
        // The host's clock: what the host does between operations is part of a step. time() only waits
        // for what is queued.
        backend.time(context, [] {});
        ranks.barrier();
        const Clock::time_point start = Clock::now();
        queue_gradients(trainer);
        host_seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
        const StepReport report = trainer.finish_step();
        result.loss = report.loss;
        exposed_seconds.push_back(report.exposed_communication_seconds);
        wait_seconds.push_back(report.rank_wait_seconds);
        backend.time(context, [] {});
        result.step_seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
      }
      result.host_seconds = median(std::move(host_seconds));
      result.exposed_communication_seconds = median(std::move(exposed_seconds));
      result.rank_wait_seconds = median(std::move(wait_seconds));
      result.peak_bytes_measured = peak_memory.bytes(result.plan.arena_bytes());
    }
  }
  result.median_seconds = median(result.step_seconds);
  result.tokens_per_second = static_cast<double>(result.tokens) / result.median_seconds;
  if (ranks.size() > 1 || options.speed_only) return result;
  {
    RunArenas arenas(backend.allocator(), result.plan.classes);
    ProfiledBackend profiled(backend);
    Trainer trainer(config, profiled, arenas);
    trainer.initialise();
    step(trainer);
    profiled.reset();
    step(trainer);
    result.operations = profiled.profile();
    for (const OperationProfile& operation : result.operations)
      result.operations_seconds += operation.seconds;
  }
  measure_floor(config, backend, result);
  return result;
}

std::string StepBenchmark::to_json(const RunConfig& config) const {
  nlohmann::ordered_json json;
  json["device"] = plan.device ? plan.device->name : "cpu";
  json["ranks"] = ranks;
  json["policy"] = name_of(config.activations.policy);
  json["layers"] = config.model.layers;
  json["sequence"] = config.run.sequence;
  json["micro_batch"] = config.run.micro_batch;
  json["micro_batches"] = config.run.micro_batches;
  json["recompute_layers"] = config.activations.recompute_layers;
  json["tokens_per_step"] = tokens;
  json["tokens_per_second"] = tokens_per_second;
  json["step_seconds_median"] = median_seconds;
  json["host_seconds_median"] = host_seconds;
  json["step_seconds"] = step_seconds;
  if (ranks > 1) {
    json["exposed_communication_seconds_median"] = exposed_communication_seconds;
    json["exposed_communication_share"] = exposed_communication_seconds / median_seconds;
    json["rank_wait_seconds_median"] = rank_wait_seconds;
    json["shard_optimizer"] = config.parallel.reduction.sharded;
  } else if (floor_seconds > 0) {
    json["floor_seconds"] = floor_seconds;
    json["share_of_floor"] = floor_seconds / median_seconds;
    json["copy_bytes_per_second"] = copy_bytes_per_second;
  }
  json["model_flops_per_step"]["causal"] = model_flops;
  json["model_flops_per_step"]["full_attention"] = model_flops_full;
  if (peak_flops) {
    json["mfu"]["causal"] = model_flops / median_seconds / *peak_flops;
    json["mfu"]["full_attention"] = model_flops_full / median_seconds / *peak_flops;
  }
  json["peak_bytes_predicted"] = plan.predicted_peak();
  json["peak_bytes_measured"] = peak_bytes_measured;
  json["arena_bytes"] = plan.arena_bytes();
  json["loss"] = loss;
  for (const OperationProfile& operation : operations) {
    nlohmann::ordered_json row;
    row["operation"] = operation.operation;
    row["calls"] = operation.calls;
    row["seconds"] = operation.seconds;
    row["bytes"] = operation.bytes;
    row["flops"] = operation.flops;
    json["operations"].push_back(std::move(row));
  }
  return to_text(json);
}

}  // namespace agoq

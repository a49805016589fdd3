#include "train/training_run.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "checkpoint/durable_file.h"
#include "checkpoint/json_text.h"
#include "checkpoint/training_state.h"
#include "comm/rank_watch.h"
#include "comm/together.h"
#include "core/stop_signals.h"
#include "train/memory_probe.h"
#include "train/nonfinite_steps.h"
#include "train/peak_memory.h"
#include "train/progress.h"
#include "train/rank_agreement.h"
#include "train/run_directory.h"
#include "train/run_plan.h"
#include "train/trainer.h"
#include "train/validation.h"

namespace agoq {
namespace {

using Clock = std::chrono::steady_clock;

/// Seconds of every step. Their median is over all but the first two, which meet cold caches.
class StepTimes {
 public:
  explicit StepTimes(std::int64_t steps) { seconds_.reserve(static_cast<std::size_t>(steps)); }
  void add(double seconds) { seconds_.push_back(seconds); }
  /// 0 before the first.
  double median() {
    if (seconds_.empty()) return 0;
    const std::size_t skip = seconds_.size() > 4 ? 2 : 0;
    // A copy of the tail only, in memory that was reserved.
    sorted_.assign(seconds_.begin() + static_cast<std::ptrdiff_t>(skip), seconds_.end());
    const auto middle = sorted_.begin() + static_cast<std::ptrdiff_t>(sorted_.size() / 2);
    std::nth_element(sorted_.begin(), middle, sorted_.end());
    return *middle;
  }
  /// Of the last few steps, on average.
  double recent() const {
    const std::size_t count = std::min<std::size_t>(seconds_.size(), 8);
    double sum = 0;
    for (std::size_t i = seconds_.size() - count; i < seconds_.size(); ++i) sum += seconds_[i];
    return count == 0 ? 0 : sum / static_cast<double>(count);
  }

 private:
  std::vector<double> seconds_;
  std::vector<double> sorted_;
};

std::string metrics_line(const StepReport& report, int ranks, double seconds, double tokens_per_second) {
  std::string line = fmt::format(
      R"({{"step":{},"loss":{:.9g},"gradient_norm":{:.9g},"learning_rate":{:.9g},"valid_tokens":{},)"
      R"("seconds":{:.6f},"tokens_per_second":{:.1f})",
      report.step, report.loss, report.gradient_norm, report.learning_rate, report.valid_tokens, seconds,
      tokens_per_second);
  if (ranks > 1) {
    line += fmt::format(R"(,"exposed_communication_seconds":{:.6f},"rank_wait_seconds":{:.6f})",
                        report.exposed_communication_seconds, report.rank_wait_seconds);
  }
  if (!report.numerics.empty()) {
    line += R"(,"numerics":{)";
    bool first = true;
    for (const NamedCounts& numeric : report.numerics) {
      line += fmt::format(R"({}"{}":{{"saturated":{},"flushed_blocks":{}}})", first ? "" : ",",
                          numeric.name, numeric.counts.saturated, numeric.counts.flushed_blocks);
      first = false;
    }
    line += "}";
  }
  return line + "}\n";
}

}  // namespace

std::string to_json(const RunSummary& summary) {
  nlohmann::ordered_json json;
  json["policy"] = summary.policy;
  json["ranks"] = summary.ranks;
  if (summary.ranks > 1) {
    json["reduction"] = summary.reduction;
    json["exposed_communication_seconds"] = summary.exposed_communication_seconds;
    json["exposed_communication_share"] = summary.exposed_communication_share;
  }
  json["steps"] = summary.steps;
  json["stopped"] = summary.stopped;
  json["skipped_steps"] = summary.skipped_steps;
  json["parameters"] = summary.parameters;
  json["training_loss"] = summary.training_loss;
  json["validation_loss"] = summary.validation_loss;
  json["order1_byte_loss"] = summary.order1_byte_loss;
  json["saved_activation_bytes"] = summary.saved_activation_bytes;
  json["main_gradient_bytes"] = summary.main_gradient_bytes;
  json["moment_bytes"] = summary.moment_bytes;
  json["master_bytes"] = summary.master_bytes;
  json["weight_bytes"] = summary.weight_bytes;
  json["peak_bytes_predicted"] = summary.peak_bytes_predicted;
  json["peak_bytes_measured"] = summary.peak_bytes_measured;
  json["resident_bytes_grown"] = summary.resident_bytes_grown;
  json["tokens_per_second"] = summary.tokens_per_second;
  return to_text(json) + "\n";
}

RunSummary read_summary(const std::string& directory) {
  const std::string path = directory + "/summary.json";
  std::error_code failure;
  const bool exists = std::filesystem::exists(path, failure);
  check_input(!failure, "{} cannot be read: {}", path, failure.message());
  check_input(exists, "{} has no summary.json: the run has not finished", directory);
  const nlohmann::ordered_json json = parse_json(read_text(path, std::size_t{1} << 20));
  check_input(json.is_object(), "{} is not a JSON object: remove it and run again", path);
  RunSummary summary;
  try {
    summary.policy = json.at("policy");
    summary.ranks = json.value("ranks", std::int64_t{1});
    summary.reduction = json.value("reduction", "");
    summary.exposed_communication_seconds = json.value("exposed_communication_seconds", 0.0);
    summary.exposed_communication_share = json.value("exposed_communication_share", 0.0);
    summary.steps = json.at("steps");
    summary.skipped_steps = json.value("skipped_steps", std::int64_t{0});
    summary.parameters = json.at("parameters");
    summary.training_loss = json.at("training_loss");
    summary.validation_loss = json.at("validation_loss");
    summary.order1_byte_loss = json.at("order1_byte_loss");
    summary.saved_activation_bytes = json.at("saved_activation_bytes");
    summary.main_gradient_bytes = json.at("main_gradient_bytes");
    summary.moment_bytes = json.at("moment_bytes");
    summary.master_bytes = json.at("master_bytes");
    summary.weight_bytes = json.at("weight_bytes");
    summary.peak_bytes_predicted = json.at("peak_bytes_predicted");
    summary.peak_bytes_measured = json.at("peak_bytes_measured");
    summary.resident_bytes_grown = json.at("resident_bytes_grown");
    summary.tokens_per_second = json.at("tokens_per_second");
  } catch (const nlohmann::json::exception& error) {
    fail_input("{}: {}", path, error.what());
  }
  return summary;
}

namespace {

/// run_training; step_under_way counts from 1 and is 0 before the first.
RunSummary run_steps(const RunConfig& given, Backend& backend, Communicator& ranks,
                     const RunOptions& options, const PeakMemory& peak_memory, RankWatch& watch,
                     std::int64_t& step_under_way) {
  expect_agreement(ranks, facts_of_run(ranks, given, options.start));
  RunConfig config;
  together(ranks, [&] { config = with_ranks(given, ranks); });
  const bool leads = ranks.rank() == 0;
  std::optional<RunDirectory> opened;
  std::vector<std::string> changes;
  std::optional<Dataset> loaded;
  double order1_byte_loss = 0;
  RunPlan plan;
  const std::int64_t resident_at_start = resident_memory().current;
  together(ranks, [&] {
    opened.emplace(config.run.directory, options.start);
    changes = opened->check_settings(given);  // as begin() writes them
    loaded.emplace(Dataset::load(config.data));
    check_input(config.model.vocabulary >= kByteVocabulary,
                "model.vocabulary must be at least {} for byte-level data; it is {}", kByteVocabulary,
                config.model.vocabulary);
    // Before the arenas exist: its table of byte pairs must not add to the peak.
    order1_byte_loss = loaded->order1_loss();
    expect_ready(config, backend);
    plan = plan_run(config, backend, loaded->bytes(), /*data_loaded=*/true);
    check_fits(plan, config, backend);
  });
  RunDirectory& directory = *opened;
  const Dataset& data = *loaded;
  expect_agreement(ranks, facts_of_data(data));
  together(ranks, [&] {
    if (leads) directory.lock();
  });
  expect_shared(ranks, config.run.directory);

  RunArenas arenas(backend.allocator(), plan.classes);
  Trainer trainer(config, backend, arenas, ranks);
  std::int64_t next_sequence = 0;
  HostBatch batch;
  if (options.start == RunStart::kResume) {
    watch.doing("loading the last checkpoint");
    next_sequence = directory.load_latest(config, trainer, options.notice);
  }
  together(ranks, [&] {
    if (options.start == RunStart::kResume) {
      // A run that was stopped in its last validation has that left to do.
      const bool ended = trainer.step() > config.run.steps ||
                         (trainer.step() == config.run.steps && directory.is_finished());
      check_input(!ended, "{} is at step {} of {} already: raise train.steps to go on",
                  config.run.directory, trainer.step(), config.run.steps);
    } else {
      trainer.initialise();
    }
    // What else the first step may refuse: a text that is shorter than a sequence.
    data.fill(Split::kTraining, config.data.seed, next_sequence, config.run.micro_batch,
              config.run.sequence, batch);
  });
  std::ofstream metrics;
  together(ranks, [&] {
    if (!leads) return;
    for (const std::string& change : changes) options.notice("changed: " + change);
    if (const std::string idle = idle_ranks_of(config); !idle.empty()) options.notice(idle);
    directory.begin(given, to_json(plan, config));  // a resumed run may have other ranks
    metrics = directory.open_metrics(trainer.step());
  });

  const std::string label(name_of(config.activations.policy));
  Progress progress(label, config.run.steps, config.run.log_every, options.show_progress && leads);
  StepTimes times(config.run.steps), exposed(config.run.steps);
  RunSummary summary;
  NonFiniteSteps nonfinite(config, trainer, data);
  const auto save = [&] {
    watch.doing("saving step {}", trainer.step());
    directory.save(config, trainer, next_sequence);
  };

  const auto is_stopped = [&] { return StopSignals::any() || !progress.failure().empty(); };
  // All ranks stop after the same step, or micro-batch of a validation: a signal may reach them at
  // different times, or one of them alone.
  const auto any_is_stopped = [&] {
    bool any = false;
    for (const char stopped : ranks.gather_values<char>(is_stopped() ? 1 : 0)) any = any || stopped != 0;
    return any;
  };
  // False when it was stopped.
  const auto validate_step = [&] {
    watch.doing("the validation after step {}", trainer.step());
    const std::optional<ValidationResult> validation =
        validate(trainer, ranks, data, config, config.run.validation_batches, batch, any_is_stopped);
    if (!validation) return false;
    summary.validation_loss = validation->loss;
    if (!leads) return true;
    metrics << fmt::format(R"({{"step":{},"validation_loss":{:.9g},"validation_tokens":{}}})",
                           trainer.step(), validation->loss, validation->tokens)
            << '\n'
            << std::flush;
    progress.note(fmt::format("{} step {}  validation loss {:.4f} over {} tokens", label, trainer.step(),
                              validation->loss, validation->tokens));
    return true;
  };

  const auto is_validated = [&](std::int64_t step) {
    return step == config.run.steps ||
           (config.run.validate_every > 0 && step > 0 && step % config.run.validate_every == 0);
  };

  bool validated = true;  // after each step so far that is to be followed by a validation
  if (options.start == RunStart::kResume) {
    // The run may have been stopped in a validation.
    summary.training_loss = directory.metric(trainer.step(), "loss").value_or(0);
    const std::optional<double> loss = directory.metric(trainer.step(), "validation_loss");
    summary.validation_loss = loss.value_or(0);
    if (is_validated(trainer.step()) && !loss) validated = validate_step();
  }
  while (trainer.step() < config.run.steps && !any_is_stopped()) {
    const Clock::time_point start = Clock::now();
    const std::int64_t first_sequence = next_sequence;
    step_under_way = trainer.step() + 1;
    watch.doing("forward and backward of step {}", step_under_way);
    trainer.begin_step();
    for (std::int64_t i = 0; i < trainer.own_micro_batches(); ++i) {
      data.fill(Split::kTraining, config.data.seed,
                first_sequence + trainer.micro_batch_number(i) * config.run.micro_batch,
                config.run.micro_batch, config.run.sequence, batch);
      trainer.micro_batch(batch);
    }
    next_sequence += config.run.micro_batches * config.run.micro_batch;
    watch.doing("the exchange of gradients and the update of step {}", step_under_way);
    const std::optional<StepReport> report = nonfinite.finish_step(first_sequence, batch);
    if (report) {
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      times.add(seconds);
      exposed.add(report->exposed_communication_seconds);
      const auto tokens = static_cast<double>(config.run.tokens_per_step());
      if (leads) metrics << metrics_line(*report, ranks.size(), seconds, tokens / seconds) << std::flush;
      std::optional<Exposed> of_step;
      if (ranks.size() > 1) of_step = Exposed{report->exposed_communication_seconds, seconds};
      progress.show(report->step, report->loss, tokens / times.recent(),
                    static_cast<double>(config.run.steps - report->step) * times.recent(), of_step);
      summary.training_loss = report->loss;
    } else {
      if (leads) metrics << nonfinite.metrics_line() << std::flush;
      progress.note(fmt::format("{} {}", label, nonfinite.note()));
    }
    check(static_cast<bool>(metrics), "{}/metrics.jsonl cannot be written: is the disk full?",
          config.run.directory);

    const std::int64_t step = trainer.step();
    if (is_validated(step)) validated = validate_step();
    if (!validated) break;
    const bool last = step == config.run.steps;
    if (last || (config.checkpoint.every > 0 && step % config.checkpoint.every == 0)) save();
  }

  summary.stopped = trainer.step() < config.run.steps || !validated;
  if (summary.stopped) {
    save();
    const std::string where =
        fmt::format("after step {}; go on with: agoq train {}/config.toml --resume", trainer.step(),
                    config.run.directory);
    check(progress.failure().empty(), "stdout cannot be written ({}): stopped with a checkpoint {}",
          progress.failure(), where);
    progress.note("stopped by a signal " + where);
  }
  summary.policy = label;
  summary.ranks = ranks.size();
  summary.steps = trainer.step();
  summary.skipped_steps = nonfinite.skipped();
  summary.parameters = plan.parameters;
  summary.order1_byte_loss = order1_byte_loss;
  // Where only the last validation was left to do, no step has saved anything.
  summary.saved_activation_bytes =
      std::max(trainer.activations().high_water(), trainer.activations().frame_bytes());
  summary.main_gradient_bytes = trainer.gradients().bytes();
  summary.moment_bytes = trainer.optimizer().moment_bytes();
  summary.master_bytes = trainer.optimizer().master_bytes();
  summary.weight_bytes = plan.classes[static_cast<std::size_t>(MemoryClass::kWeights)];
  summary.peak_bytes_predicted = plan.predicted_peak();
  summary.peak_bytes_measured = peak_memory.bytes(plan.arena_bytes());
  summary.resident_bytes_grown = resident_memory().peak - resident_at_start;
  if (times.median() > 0) {
    summary.tokens_per_second = static_cast<double>(config.run.tokens_per_step()) / times.median();
  }
  if (ranks.size() > 1) {
    summary.reduction = reduction_of(config);
    summary.exposed_communication_seconds = exposed.median();
    if (times.median() > 0) summary.exposed_communication_share = exposed.median() / times.median();
  }
  if (leads && !summary.stopped) directory.write("summary.json", to_json(summary));
  return summary;
}

/// What a run that fails now can go on from.
std::string saved_state(const RunConfig& config) {
  const std::optional<std::int64_t> step = latest_checkpoint(config.run.directory + "/checkpoints");
  if (!step) return "nothing was saved before";
  return fmt::format("the last saved state, {}/checkpoints/step-{}, is intact: go on with --resume",
                     config.run.directory, *step);
}

}  // namespace

RunSummary run_training(const RunConfig& config, Backend& backend, const RunOptions& options) {
  const std::unique_ptr<Communicator> alone = single_rank();
  Communicator& ranks = options.ranks == nullptr ? *alone : *options.ranks;
  // Before the ranks watch each other: one that a signal ended would be taken for lost.
  const StopSignals signals;  // a program's may live already
  // Before the ranks speak for the first time, which takes memory that the plan counts.
  const PeakMemory peak_memory(backend);
  RankWatch watch(ranks,
                  {.timeout_seconds = config.parallel.timeout_seconds,
                   .advice = fmt::format("go on from the last checkpoint with --resume, if {} has one",
                                         config.run.directory)});
  watch.doing("its preparations");
  std::int64_t step_under_way = 0;
  RunSummary summary;
  watch.run([&] {
    try {
      summary = run_steps(config, backend, ranks, options, peak_memory, watch, step_under_way);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kDevice || step_under_way == 0) throw;
      throw Error(error.kind(),
                  fmt::format("step {}: {}; {}", step_under_way, error.what(), saved_state(config)));
    }
  });
  return summary;
}

}  // namespace agoq

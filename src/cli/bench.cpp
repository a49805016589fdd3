// agoq bench: how fast this machine runs what the engine is made of.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "backend/kernel_benchmark.h"
#include "checkpoint/json_text.h"
#include "cli/build_info.h"
#include "cli/command.h"
#include "cli/device_option.h"
#include "cli/operation_table.h"
#include "cli/process_ranks.h"
#include "cli/table.h"
#include "comm/communication_benchmark.h"
#include "core/quantity.h"
#include "train/peak_memory.h"
#include "train/progress.h"
#include "train/step_benchmark.h"

namespace agoq {
namespace {

// What a GPU is measured at; a CPU takes minutes for it.
constexpr std::int64_t kDeviceTokens = 16384, kHostTokens = 256;
// As many as a micro-batch may have.
constexpr std::int64_t kMostTokens = std::int64_t{1} << 27;
constexpr std::int64_t kMostSteps = 1000;

// Gradients that ranks reduce: of a small layer, the paper's, and what a node's links are judged by. The
// last takes a CPU minutes.
constexpr std::int64_t kReducedElements[] = {std::int64_t{1} << 20, std::int64_t{1} << 25,
                                             std::int64_t{1} << 28};
constexpr std::size_t kHostSizes = 2;
constexpr std::int64_t kMostElements = std::int64_t{1} << 36;

struct BenchArguments {
  std::vector<std::string> what;  // "kernels", "comm", or "step" and a configuration
  std::optional<std::string> device;
  std::vector<std::string> settings;
  std::string operation;
  std::int64_t tokens = 0;
  std::int64_t steps = 10;
  std::int64_t warmup = 3;
  bool speed_only = false;
  std::int64_t elements = 0;
  std::int64_t bucket = CommunicationBenchmarkOptions{}.bucket_elements;
  std::int64_t repetitions = CommunicationBenchmarkOptions{}.repetitions;
  std::int64_t nccl_max_ctas = 0;
  bool no_peer_copies = false;
  std::string rendezvous = ".";
  double timeout = WorldOptions{}.timeout_seconds;
  bool json = false;
};

/// Refuses the options that only other measurements have: without effect, they would be taken for
/// heeded.
void refuse_options_of_others(const BenchArguments& given) {
  const std::string& what = given.what.front();
  const BenchArguments usual;
  const auto refuse = [&](bool is_given, const char* option, const char* of, const char* advice = "") {
    check_input(!is_given, "{} is an option of agoq bench {}, and 'agoq bench {}' was given{}", option,
                of, what, advice);
  };
  if (what != "kernels") {
    refuse(!given.operation.empty(), "--operation", "kernels");
    refuse(given.tokens != usual.tokens, "--tokens", "kernels");
  }
  if (what != "step") {
    refuse(!given.settings.empty(), "--set", "step");
    refuse(given.steps != usual.steps, "--steps", "step");
    refuse(given.warmup != usual.warmup, "--warmup", "step");
    refuse(given.speed_only, "--speed-only", "step");
  }
  if (what != "comm") {
    refuse(given.elements != usual.elements, "--elements", "comm");
    refuse(given.bucket != usual.bucket, "--bucket", "comm");
    refuse(given.repetitions != usual.repetitions, "--repetitions", "comm");
    refuse(given.nccl_max_ctas != usual.nccl_max_ctas, "--nccl-max-ctas", "comm");
    refuse(given.no_peer_copies, "--no-peer-copies", "comm");
    refuse(given.timeout != usual.timeout, "--timeout", "comm");
    refuse(given.rendezvous != usual.rendezvous, "--rendezvous", "comm");
  }
  if (what == "step") {
    refuse(given.device.has_value(), "--device", "kernels and comm",
           ": its device is a setting, --set run.device=cuda");
  }
}

double share_of_copy(const KernelTime& kernel) {
  return kernel.bytes_per_second() / kernel.copy_bytes_per_second;
}

/// What bounds the operation: "copy", or what its instructions are bound by.
std::string bound_by(const KernelTime& kernel) {
  const bool instructions = kernel.instructions && kernel.instructions->seconds >= bound_seconds(kernel);
  return instructions ? std::string(kernel.instructions->by) : "copy";
}

void print_table(const Backend& backend, const KernelSizes& sizes,
                 const std::vector<KernelTime>& times) {
  Table table({{"operation"},
               {"bytes", Align::kRight},
               {"us", Align::kRight},
               {"GB/s", Align::kRight},
               {"copy's", Align::kRight},
               {"of copy", Align::kRight},
               {"GHz", Align::kRight},
               {"instr. us", Align::kRight},
               {"bound by", Align::kRight},
               {"of bound", Align::kRight},
               {"operands"}});
  bool counted = false;
  for (const KernelTime& kernel : times) {
    counted = counted || kernel.instructions;
    table.add_row({kernel.name, format_bytes(kernel.bytes), fmt::format("{:.1f}", 1e6 * kernel.seconds),
                   fmt::format("{:.1f}", 1e-9 * kernel.bytes_per_second()),
                   fmt::format("{:.1f}", 1e-9 * kernel.copy_bytes_per_second),
                   fmt::format("{:.1f} %", 100 * share_of_copy(kernel)),
                   kernel.clock > 0 ? fmt::format("{:.2f}", 1e-9 * kernel.clock) : "",
                   kernel.instructions ? fmt::format("{:.1f}", 1e6 * kernel.instructions->seconds) : "",
                   bound_by(kernel),
                   fmt::format("{:.1f} %", 100 * bound_seconds(kernel) / kernel.seconds),
                   kernel.operands});
  }
  fmt::print(
      "{}\n{}, {} tokens, sizes of LLaMA3-8B. Each byte is counted once per read and once per write;\n"
      "times are medians. The copy, timed in turn with each operation, is its ceiling{}.\n",
      table.to_string(), backend.description(), format_count(sizes.tokens),
      counted ? ", and what the multiprocessors need for the instructions at the clock they ran at"
              : "");
}

void print_json(const Backend& backend, const KernelSizes& sizes, const std::vector<KernelTime>& times) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const KernelTime& kernel : times) {
    nlohmann::ordered_json entry;
    entry["operation"] = kernel.name;
    entry["operands"] = kernel.operands;
    entry["bytes"] = kernel.bytes;
    entry["seconds"] = kernel.seconds;
    entry["bytes_per_second"] = kernel.bytes_per_second();
    entry["copy_bytes_per_second"] = kernel.copy_bytes_per_second;
    entry["share_of_copy"] = share_of_copy(kernel);
    if (kernel.clock > 0) entry["clock"] = kernel.clock;
    if (kernel.instructions) {
      entry["instruction_seconds"] = kernel.instructions->seconds;
      entry["instructions_bound_by"] = kernel.instructions->by;
    }
    entry["bound_by"] = bound_by(kernel);
    entry["share_of_bound"] = bound_seconds(kernel) / kernel.seconds;
    entry["operand_sets"] = kernel.sets;
    list.push_back(std::move(entry));
  }
  nlohmann::ordered_json json;
  json["commit"] = build_info().commit;
  json["backend"] = backend.description();
  json["tokens"] = sizes.tokens;
  json["operations"] = std::move(list);
  fmt::print("{}\n", to_text(json));
}

void bench_kernels(const BenchArguments& arguments) {
  refuse_options_of_others(arguments);
  const std::string device = arguments.device.value_or("cpu");
  const bool cuda = device == "cuda";
  check_input(arguments.tokens >= 0, "--tokens is at least 1; {} was given", arguments.tokens);
  check_input(arguments.tokens <= kMostTokens, "--tokens is at most {}; {} was given", kMostTokens,
              arguments.tokens);
  Backend& backend = backend_named(device);
  KernelSizes sizes;
  sizes.tokens = arguments.tokens != 0 ? arguments.tokens : cuda ? kDeviceTokens : kHostTokens;
  // With few tokens the embedding's rows would take most of the time to draw and are not touched.
  sizes.vocabulary = std::min(sizes.vocabulary, 8 * sizes.tokens);
  constexpr int kRepeats = 9;
  const std::vector<KernelTime> times = measure_kernels(
      backend, sizes, kRepeats, cuda ? &cuda_instruction_meter() : nullptr, arguments.operation);
  if (arguments.json) {
    print_json(backend, sizes, times);
  } else {
    print_table(backend, sizes, times);
  }
}

void print_step(const StepBenchmark& step, const RunConfig& config) {
  if (!step.operations.empty()) fmt::print("{}\n", operation_table(step.operations));

  Table table({{}, {"", Align::kRight}});
  const auto row = [&](const std::string& name, const std::string& value) {
    table.add_row({name, value});
  };
  const auto [least, most] = std::minmax_element(step.step_seconds.begin(), step.step_seconds.end());
  row("tokens/s", fmt::format("{:.0f}", step.tokens_per_second));
  row(fmt::format("step, median of {}", step.step_seconds.size()),
      fmt::format("{:.2f} ms ({:.2f} to {:.2f})", 1e3 * step.median_seconds, 1e3 * *least, 1e3 * *most));
  row("  of which the host queues the gradients' work",
      fmt::format("{:.2f} ms, {:.1f} %", 1e3 * step.host_seconds,
                  100 * step.host_seconds / step.median_seconds));
  if (step.floor_seconds > 0) {
    row("operations, each by itself", fmt::format("{:.2f} ms", 1e3 * step.operations_seconds));
    row("floor of this machine",
        fmt::format("{:.2f} ms: the step is at {:.1f} % of its speed", 1e3 * step.floor_seconds,
                    100 * step.floor_seconds / step.median_seconds));
  }
  if (step.ranks > 1) {
    row(fmt::format("communication of {} ranks, exposed", step.ranks),
        fmt::format("{:.2f} ms, {:.2f} %", 1e3 * step.exposed_communication_seconds,
                    100 * step.exposed_communication_seconds / step.median_seconds));
    row("  before it, the fastest rank waits for the slowest",
        fmt::format("{:.2f} ms, {:.2f} %", 1e3 * step.rank_wait_seconds,
                    100 * step.rank_wait_seconds / step.median_seconds));
  }
  row("model TFLOP/s, causal attention",
      fmt::format("{:.4g}", 1e-12 * step.model_flops / step.median_seconds));
  if (step.peak_flops) {
    row("MFU, causal attention",
        fmt::format("{:.1f} %", 100 * step.model_flops / step.median_seconds / *step.peak_flops));
    row("MFU, full attention",
        fmt::format("{:.1f} %", 100 * step.model_flops_full / step.median_seconds / *step.peak_flops));
  }
  row("peak memory, predicted", format_bytes(static_cast<std::int64_t>(step.plan.predicted_peak())));
  row("peak memory, measured", format_peak(step.peak_bytes_measured));
  row("  of which arenas", format_bytes(static_cast<std::int64_t>(step.plan.arena_bytes())));
  fmt::print("{}\n{} layers, {} x {} tokens x {} micro-batches, policy {}, random tokens\n",
             table.to_string(), config.model.layers, config.run.micro_batch, config.run.sequence,
             config.run.micro_batches, name_of(config.activations.policy));
}

// Where one of several ranks fails.
constexpr const char* kAdvice = "start the measurement again";

void bench_step(const BenchArguments& arguments, ProcessRanks& ranks) {
  RunConfig config;
  ranks.together([&] {
    refuse_options_of_others(arguments);
    check_input(1 <= arguments.steps && arguments.steps <= kMostSteps,
                "--steps is from 1 to {}; {} was given", kMostSteps, arguments.steps);
    check_input(0 <= arguments.warmup && arguments.warmup <= kMostSteps,
                "--warmup is from 0 to {}; {} was given", kMostSteps, arguments.warmup);
    config = load_run_config(arguments.what[1], arguments.settings);
    ranks.set_timeout(config.parallel.timeout_seconds);
    ranks.set_command("bench step", {{"--steps", fmt::to_string(arguments.steps)},
                                     {"--warmup", fmt::to_string(arguments.warmup)}});
  });
  StepBenchmarkOptions options;
  options.steps = static_cast<int>(arguments.steps);
  options.warmup_steps = static_cast<int>(arguments.warmup);
  options.speed_only = arguments.speed_only;
  Backend& backend = ranks.join(config.run.device, world_options(config, "."), config.run.threads);
  StepBenchmark step;
  ranks.watched({.timeout_seconds = config.parallel.timeout_seconds, .advice = kAdvice}, "bench step",
                [&] { step = benchmark_step(config, backend, ranks.all(), options); });
  if (ranks.leads()) {
    config.parallel.ranks = ranks.size();
    if (const std::string idle = idle_ranks_of(config); !idle.empty()) print_notice(idle);
    if (arguments.json) {
      fmt::print("{}\n", step.to_json(config));
    } else {
      print_step(step, config);
    }
  }
  ranks.leave();
}

/// The time of `variant` at the size of `of`.
double seconds_at(const std::vector<CommunicationTime>& times, const CommunicationTime& of,
                  CommunicationVariant variant) {
  const auto found = std::find_if(times.begin(), times.end(), [&](const CommunicationTime& time) {
    return time.variant == variant && time.elements == of.elements;
  });
  return found->seconds;
}

bool has_bf16_control(const CommunicationTime& time) {
  return control_of(time.variant) == CommunicationVariant::kFp32 &&
         time.variant != CommunicationVariant::kExchange;
}

void print_comm_table(const Communicator& ranks, const Backend& backend,
                      const std::vector<CommunicationTime>& times) {
  Table table({{"elements", Align::kRight},
               {"variant"},
               {"ms", Align::kRight},
               {"sent", Align::kRight},
               {"GB/s", Align::kRight},
               {"of fp32", Align::kRight},
               {"of bf16", Align::kRight},
               {"error", Align::kRight}});
  for (const CommunicationTime& time : times) {
    const auto of = [&](CommunicationVariant control) {
      return fmt::format("{:.3f}", time.seconds / seconds_at(times, time, control));
    };
    const bool plain = time.variant == CommunicationVariant::kExchange;
    table.add_row({format_count(time.elements), std::string(name_of(time.variant)),
                   fmt::format("{:.4f}", 1e3 * time.seconds), format_bytes(time.wire_bytes),
                   fmt::format("{:.2f}", 1e-9 * time.bus_bytes_per_second()),
                   plain ? "" : of(control_of(time.variant)),
                   has_bf16_control(time) ? of(CommunicationVariant::kBf16) : "",
                   plain ? "" : fmt::format("{:.1e}", time.relative_error)});
  }
  fmt::print(
      "{}\n{} ranks, {}; rank 0: {}\nTimes are medians of the slowest rank's. Of fp32: the time of the "
      "library's fp32 all-reduce, or\nreduce-scatter for ZeRO-1. Error: relative, against the fp32 "
      "sum.\n",
      table.to_string(), ranks.size(), ranks.description(), backend.description());
}

void print_comm_json(const Communicator& ranks, const Backend& backend,
                     const std::vector<CommunicationTime>& times) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const CommunicationTime& time : times) {
    nlohmann::ordered_json entry;
    entry["elements"] = time.elements;
    entry["variant"] = name_of(time.variant);
    entry["seconds"] = time.seconds;
    entry["wire_bytes"] = time.wire_bytes;
    entry["bus_bytes_per_second"] = time.bus_bytes_per_second();
    if (time.variant != CommunicationVariant::kExchange) {
      entry["time_over_fp32"] = time.seconds / seconds_at(times, time, control_of(time.variant));
      entry["relative_error"] = time.relative_error;
    }
    if (has_bf16_control(time)) {
      entry["time_over_bf16"] = time.seconds / seconds_at(times, time, CommunicationVariant::kBf16);
    }
    list.push_back(std::move(entry));
  }
  nlohmann::ordered_json json;
  json["commit"] = build_info().commit;
  json["ranks"] = ranks.size();
  json["transport"] = ranks.description();
  json["backend"] = backend.description();
  json["variants"] = std::move(list);
  fmt::print("{}\n", to_text(json));
}

void bench_comm(const BenchArguments& arguments, ProcessRanks& ranks) {
  BackendKind device = BackendKind::kCpu;
  std::vector<std::int64_t> sizes{arguments.elements};
  ranks.together([&] {
    refuse_options_of_others(arguments);
    check_input(0 <= arguments.elements && arguments.elements <= kMostElements,
                "--elements is a multiple of {} up to {}, or 0 for the usual sizes; {} was given",
                kBenchmarkWidth, kMostElements, arguments.elements);
    check_input(1 <= arguments.bucket, "--bucket is at least 1; {} was given", arguments.bucket);
    check_input(1 <= arguments.repetitions && arguments.repetitions <= kMostSteps,
                "--repetitions is from 1 to {}; {} was given", kMostSteps, arguments.repetitions);
    check_input(0 <= arguments.nccl_max_ctas && arguments.nccl_max_ctas <= kMostCtas,
                "--nccl-max-ctas is from 0 to {}; {} was given", kMostCtas, arguments.nccl_max_ctas);
    check_input(kShortestTimeout <= arguments.timeout && arguments.timeout <= kLongestTimeout,
                "--timeout is from {:g} to {:.0f} s; {} was given", kShortestTimeout, kLongestTimeout,
                arguments.timeout);
    device = device_named(arguments.device.value_or("cpu"));
    if (arguments.elements == 0) {
      sizes.assign(std::begin(kReducedElements), device == BackendKind::kCuda
                                                     ? std::end(kReducedElements)
                                                     : std::begin(kReducedElements) + kHostSizes);
    }
    for (const std::int64_t elements : sizes) expect_measurable(elements, ranks.size());
    ranks.set_timeout(arguments.timeout);
    ranks.set_command("bench comm",
                      {{"--elements", fmt::to_string(arguments.elements)},
                       {"--bucket", fmt::to_string(arguments.bucket)},
                       {"--repetitions", fmt::to_string(arguments.repetitions)},
                       {"--nccl-max-ctas", fmt::to_string(arguments.nccl_max_ctas)},
                       {"--no-peer-copies", arguments.no_peer_copies ? "given" : "not given"},
                       {"--timeout", fmt::to_string(arguments.timeout)}});
  });
  Backend& backend = ranks.join(device,
                                {.rendezvous_directory = arguments.rendezvous,
                                 .timeout_seconds = arguments.timeout,
                                 .nccl_max_ctas = static_cast<int>(arguments.nccl_max_ctas),
                                 .peer_copies = !arguments.no_peer_copies},
                                0);
  CommunicationBenchmarkOptions options;
  options.repetitions = static_cast<int>(arguments.repetitions);
  options.bucket_elements = arguments.bucket;
  // It takes minutes where gradients are many and links slow.
  if (ranks.leads())
    options.notice = [](const CommunicationTime& time) {
      print_notice(fmt::format("{} elements, {}: {:.4f} ms", format_count(time.elements),
                               name_of(time.variant), 1e3 * time.seconds));
    };
  std::vector<CommunicationTime> times;
  ranks.watched({.timeout_seconds = arguments.timeout, .advice = kAdvice, .setting = "--timeout"},
                "bench comm", [&] {
                  for (const std::int64_t elements : sizes) {
                    for (const CommunicationTime& time :
                         measure_communication(ranks.all(), backend, elements, options)) {
                      times.push_back(time);
                    }
                  }
                });
  if (ranks.leads() && arguments.json) print_comm_json(ranks.all(), backend, times);
  if (ranks.leads() && !arguments.json) print_comm_table(ranks.all(), backend, times);
  ranks.leave();
}

void run_bench(const BenchArguments& arguments, ProcessRanks& ranks) {
  if (arguments.what.front() == "kernels" && arguments.what.size() == 1) {
    if (ranks.works_alone("bench kernels")) bench_kernels(arguments);
    return;
  }
  if (arguments.what.front() == "step" && arguments.what.size() == 2)
    return bench_step(arguments, ranks);
  if (arguments.what.front() == "comm" && arguments.what.size() == 1)
    return bench_comm(arguments, ranks);
  ranks.together([&] {
    fail_input(
        "'agoq bench kernels', 'agoq bench step CONFIG' and 'agoq bench comm' are what there is; 'agoq "
        "bench {}' was given",
        fmt::join(arguments.what, " "));
  });
}

}  // namespace

Action declare_bench(Arguments& arguments) {
  const auto given = std::make_shared<BenchArguments>();
  arguments.positional(
      "WHAT", given->what,
      "kernels: every memory-bound operation against a plain copy, at the sizes of "
      "LLaMA3-8B; step CONFIG: training steps on random tokens; comm: gradients reduced "
      "over the ranks that a launcher has started");
  arguments.option("--device", "DEVICE", given->device,
                   "kernels, comm: cpu, which it is otherwise, or cuda");
  arguments.option("--operation", "NAME", given->operation, "kernels: this one alone, beside the copy");
  arguments.option("--tokens", "N", given->tokens, "kernels: tokens; 0: 16,384 on cuda, 256 on cpu");
  arguments.option("--set", "KEY=VALUE", given->settings, "step: override a setting");
  arguments.option("--steps", "N", given->steps, "step: steps that are timed");
  arguments.option("--warmup", "N", given->warmup, "step: steps before them");
  arguments.flag("--speed-only", given->speed_only,
                 "step: neither the time of each operation nor the machine's floor, which take several "
                 "steps");
  arguments.option(
      "--elements", "N", given->elements,
      "comm: gradients that are reduced, a multiple of 4096 and 4096 for each rank at least; "
      "0: 2^20 and 2^25, on cuda also 2^28");
  arguments.option("--bucket", "N", given->bucket, "comm: gradients that are exchanged at a time");
  arguments.option("--repetitions", "N", given->repetitions, "comm: how often each is timed");
  arguments.option("--nccl-max-ctas", "N", given->nccl_max_ctas,
                   "comm: thread blocks of one of NCCL's kernels at most; 0: as many as it chooses");
  arguments.flag("--no-peer-copies", given->no_peer_copies,
                 "comm: GPUs exchange by NCCL also where their copy engines could");
  arguments.option("--timeout", "SECONDS", given->timeout, "comm: in which an exchange has to complete");
  arguments.option(
      "--rendezvous", "DIR", given->rendezvous,
      "comm: a directory that all ranks see, for those on GPUs that were started without MPI");
  arguments.flag("--json", given->json, "print JSON");
  return [given](ProcessRanks& ranks) { run_bench(*given, ranks); };
}

}  // namespace agoq

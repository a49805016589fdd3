// agoq plan: what a run will hold in memory, layer by layer and class by class, before it runs.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "cli/command.h"
#include "cli/process_ranks.h"
#include "cli/table.h"
#include "core/quantity.h"
#include "train/run_plan.h"

namespace agoq {
namespace {

struct PlanArguments {
  std::string config;
  std::vector<std::string> settings;
  std::optional<std::string> memory;
  bool json = false;
};

std::string bytes_text(std::int64_t bytes) { return format_bytes(bytes); }

std::string layers_text(const PlannedLayers& group) {
  return group.first == group.last ? fmt::format("{}", group.first)
                                   : fmt::format("{}-{}", group.first, group.last);
}

void print_slots(const RunPlan& plan) {
  Table table({{"layer"},
               {"slot"},
               {"elements/token", Align::kRight},
               {"plan"},
               {"bytes/token", Align::kRight},
               {"bytes/layer", Align::kRight}});
  for (const PlannedLayers& group : group_layers(plan)) {
    if (group.first > 0) table.add_rule();
    bool first = true;
    for (std::size_t s = 0; s < plan.slots[group.first].size(); ++s) {
      const SaveSlot& slot = plan.slots[group.first][s];
      const SlotPlan& planned = plan.bits.layers[group.first].slots[s];
      std::vector<std::string> cells{first ? layers_text(group) : "", slot.name,
                                     std::to_string(slot.width)};
      if (planned.action == SlotAction::kKeep) {
        const std::int64_t bytes = payload_bytes(planned.format, grid_of(slot, plan.tokens));
        cells.push_back("keep " + planned.format.to_string());
        cells.push_back(
            fmt::format("{:.1f}", static_cast<double>(bytes) / static_cast<double>(plan.tokens)));
        cells.push_back(bytes_text(bytes));
      } else {
        cells.push_back("recompute from " +
                        (slot.recomputed_from.empty() ? "the layer's input" : slot.recomputed_from));
      }
      table.add_row(std::move(cells));
      first = false;
    }
  }
  fmt::print("{}\n", table.to_string());
}

void print_classes(const RunPlan& plan, std::int64_t ranks) {
  Table table({{"memory"}, {"bytes", Align::kRight}, {"share", Align::kRight}});
  const auto peak = static_cast<double>(plan.predicted_peak());
  const auto add = [&](const std::string& name, std::size_t bytes) {
    table.add_row({name, bytes_text(static_cast<std::int64_t>(bytes)),
                   fmt::format("{:.1f} %", 100.0 * static_cast<double>(bytes) / peak)});
  };
  for (int c = 0; c < kMemoryClasses; ++c) {
    const auto memory = static_cast<MemoryClass>(c);
    add(std::string(name_of(memory)), plan.classes[static_cast<std::size_t>(c)]);
    if (memory == MemoryClass::kActivations) {
      for (int r = 0; r < kSlotRoles; ++r) {
        const std::int64_t bytes = saved_bytes_of_role(plan, static_cast<SlotRole>(r));
        if (bytes > 0)
          table.add_row({fmt::format("  {}", name_of(static_cast<SlotRole>(r))), bytes_text(bytes)});
      }
    }
    if (memory == MemoryClass::kWorkspace) {
      table.add_row(
          {"  of which the loss chunk takes", bytes_text(static_cast<std::int64_t>(plan.loss_chunk))});
    }
  }
  if (plan.device) {
    add("rounding of allocations", plan.rounding_bytes());
    add("kernels and libraries", plan.device->overhead);
  } else {
    add("text", plan.data);
    add("checkpoint being written", plan.checkpoint);
    add(ranks > 1 ? "program and libraries, with MPI" : "program and libraries", plan.program);
  }
  table.add_rule();
  add("predicted peak", plan.predicted_peak());
  if (plan.device && plan.device->context > 0) {
    table.add_row(
        {"CUDA context, beside it", bytes_text(static_cast<std::int64_t>(plan.device->context))});
  }
  fmt::print("{}", table.to_string());
  if (plan.device && plan.device->context > 0) {
    fmt::print(
        "\nThe process takes its CUDA context once, before the run: it is in neither the predicted nor "
        "the measured peak.\n");
  }
}

std::string ranks_text(const RunConfig& config) {
  if (config.parallel.ranks == 1) return "1 rank (parallel.ranks plans for more)";
  return fmt::format("{} ranks, {}: what one of them holds", config.parallel.ranks,
                     reduction_of(config));
}

bool all_exist(const std::vector<std::string>& paths) {
  return !paths.empty() && std::all_of(paths.begin(), paths.end(), [](const std::string& path) {
    std::error_code error;  // a path that cannot be looked at is not at hand
    return std::filesystem::exists(path, error);
  });
}

/// What --memory gives.
std::optional<std::size_t> memory_of(const PlanArguments& arguments) {
  if (!arguments.memory) return std::nullopt;
  const std::optional<std::int64_t> bytes = parse_bytes(*arguments.memory);
  check_input(bytes && *bytes > 0,
              "--memory is a number of bytes, as 85899345920 or 80GiB; '{}' was given",
              *arguments.memory);
  return static_cast<std::size_t>(*bytes);
}

void plan_command(const PlanArguments& arguments, int launched) {
  RunConfig config = load_run_config(arguments.config, arguments.settings);
  // 0 stands for as many as are launched with it, be it by `mpirun -np 4 agoq plan`.
  if (config.parallel.ranks == 0) config.parallel.ranks = launched;
  const std::optional<std::size_t> memory = memory_of(arguments);
  const bool found = all_exist(config.data.paths);
  const std::size_t data_bytes = found ? Dataset::load(config.data).bytes() : 0;
  Backend& backend = backend_of(config.run.device);
  const RunPlan plan = plan_run(config, backend, data_bytes, /*data_loaded=*/false, memory);
  std::optional<std::int64_t> fewest_layers;
  if (!plan.fits()) fewest_layers = fewest_recomputed_layers(plan, config, backend);
  if (arguments.json) {
    fmt::print("{}\n", to_json(plan, config, fewest_layers));
    return;
  }
  fmt::print(
      "{} parameters in {}, policy {}, {} tokens a micro-batch ({} x {}), {} micro-batches a "
      "step\n{}\n\n",
      plan.parameters, name_of(config.model.dtype), name_of(config.activations.policy), plan.tokens,
      config.run.micro_batch, config.run.sequence, config.run.micro_batches, ranks_text(config));
  print_slots(plan);
  print_classes(plan, config.parallel.ranks);
  if (!plan.fits()) {
    std::string text = misfit_text(plan, fewest_layers);
    text[0] = 'T';
    fmt::print("\n{}.\n", text);
  } else if (plan.room()) {
    const bool is_shared = !plan.device && config.parallel.ranks > 1;
    fmt::print("\n{} fits: {}{}.\n", is_shared ? "One rank" : "The run", fit_text(plan),
               is_shared ? "; all ranks of a machine share these" : "");
  }
  if (plan.attention_groups > 1) {
    fmt::print(
        "\nBackward attention runs in {} groups of key/value heads: all at once would not fit the {} "
        "that are free.\n",
        plan.attention_groups, bytes_text(static_cast<std::int64_t>(plan.device->free)));
  }
  if (config.data.paths.empty()) {
    fmt::print("\ndata.paths is empty: the text is not counted.\n");
  } else if (!found) {
    fmt::print("\nThe text is not at hand ({}): it is not counted.\n",
               fmt::join(config.data.paths, ", "));
  }
}

}  // namespace

Action declare_plan(Arguments& arguments) {
  const auto given = std::make_shared<PlanArguments>();
  arguments.positional("CONFIG", given->config, "The run's configuration (TOML)");
  arguments.option("--set", "KEY=VALUE", given->settings, "Override a setting");
  arguments.option("--memory", "BYTES", given->memory,
                   "Plan for a GPU, or a machine, with so much memory (80GiB), whatever is at hand");
  arguments.flag("--json", given->json, "Print JSON");
  return [given](ProcessRanks& ranks) { plan_command(*given, ranks.size()); };
}

}  // namespace agoq

#include "train/run_plan.h"

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "checkpoint/hugging_face.h"
#include "checkpoint/json_text.h"
#include "comm/transports.h"
#include "core/host_memory.h"
#include "core/quantity.h"
#include "train/memory_probe.h"
#include "train/trainer.h"

namespace agoq {
namespace {

// What a group of ranks takes of a GPU's memory, whatever the model: NCCL for exchanges, measured with
// NCCL 2.28.9 between two H200 over NVLink, and where exchanges are copies between GPUs, its flags
// (comm/nccl/peer_copies.cpp).
constexpr std::size_t kNcclBytes = std::size_t{450} << 20;
constexpr std::size_t kPeerCopiesBytes = std::size_t{2} << 20;

// What Open MPI 4.1.4 takes of a rank's host memory on one machine, to start and in the exchanges of
// training (benchmarks/results/2026-11-30-cpu-ranks-mpi-memory.json): little, and a quarter of what a
// tiny run holds.
constexpr std::size_t kMpiStartBytes = 3'200'000, kMpiStartBytesOfRank = 45'000;
constexpr std::size_t kMpiExchangeBytesOfRank = 100'000;

/// Of a plan for `ranks` on CPUs: what is not in this process's memory yet.
std::size_t mpi_bytes_to_come(std::size_t ranks) {
  if (ranks <= 1) return 0;
  const std::size_t start = mpi_is_open() ? 0 : kMpiStartBytes + ranks * kMpiStartBytesOfRank;
  return start + ranks * kMpiExchangeBytesOfRank;
}

/// A product of small matrices, for what libraries allocate at their first one. In no more memory than
/// it takes: with a tiny model the plan would otherwise be the run's peak.
void multiply_once(Backend& backend, ElementType dtype) {
  const auto multiply = [&](Arena& memory) {
    const Context context{backend, {}, memory, {}};
    const Tensor a = memory.take(dtype, Shape{8, 8});
    const Tensor product = memory.take(statistics_type(dtype), Shape{8, 8});
    if (!memory.is_measuring()) backend.zero(context, a.data, a.bytes());
    backend.matmul(context, a, Transpose::kNo, a, Transpose::kYes, product, false);
  };
  Arena measured = Arena::measuring("first product");
  multiply(measured);
  Arena memory("first product", backend.allocator(), measured.high_water());
  multiply(memory);
}

bool same_layer(const LayerPlan& a, const LayerPlan& b) {
  if (a.recompute_layer != b.recompute_layer || a.slots.size() != b.slots.size()) return false;
  for (std::size_t s = 0; s < a.slots.size(); ++s) {
    if (a.slots[s].action != b.slots[s].action || a.slots[s].format != b.slots[s].format) return false;
  }
  return true;
}

}  // namespace

std::size_t RunPlan::arena_bytes() const {
  std::size_t bytes = 0;
  for (const std::size_t of_class : classes) bytes += of_class;
  return bytes;
}

std::size_t RunPlan::rounding_bytes() const {
  if (!device) return 0;
  std::size_t bytes = 0;
  for (const std::size_t of_class : classes) bytes += device->taken_for(of_class) - of_class;
  return bytes;
}

std::size_t RunPlan::predicted_peak() const {
  return arena_bytes() + rounding_bytes() + (device ? device->overhead : data + checkpoint + program);
}

std::optional<MemoryRoom> RunPlan::room() const {
  if (!device) return host;
  if (device->total == 0) return std::nullopt;
  return MemoryRoom{device->name, device->total, device->free};
}

std::size_t RunPlan::bytes_to_take() const { return predicted_peak() - (device ? 0 : held); }

bool RunPlan::fits() const {
  const std::optional<MemoryRoom> known = room();
  return !known || bytes_to_take() <= known->free;
}

std::string fit_text(const RunPlan& plan) {
  const MemoryRoom room = plan.room().value();
  const auto text = [](std::size_t bytes) { return format_bytes(static_cast<std::int64_t>(bytes)); };
  return fmt::format("it takes {} of {}, where {} of {} are free", text(plan.bytes_to_take()), room.name,
                     text(room.free), text(room.total));
}

std::string misfit_text(const RunPlan& plan, std::optional<std::int64_t> fewest_layers) {
  const MemoryRoom room = plan.room().value();
  return fmt::format(
      "the run would take {} bytes of {}, where {} of {} are free: {}{}", plan.bytes_to_take(),
      room.name, room.free, room.total,
      fewest_layers ? fmt::format("set activations.recompute_layers = {} or a smaller train.micro_batch "
                                  "or train.sequence",
                                  *fewest_layers)
                    : "lower train.micro_batch, train.sequence or model.layers",
      plan.device ? "" : ", or run on a GPU (--set run.device=cuda)");
}

void expect_ready(const RunConfig& config, Backend& backend) {
  backend.set_deterministic(config.run.deterministic);
  backend.expect_ready();
}

void check_fits(const RunPlan& plan, const RunConfig& config, Backend& backend) {
  if (plan.fits()) return;
  fail_input("{}", misfit_text(plan, fewest_recomputed_layers(plan, config, backend)));
}

namespace {

/// What depends on the layers and the backend's groups of attention.
void measure(RunPlan& plan, const RunConfig& config, Backend& backend) {
  plan.slots = transformer_saves(config.model);
  plan.bits = make_bit_plan(plan.slots, config.activations);
  RunArenas arenas = RunArenas::measuring();
  const std::unique_ptr<Communicator> ranks =
      config.parallel.ranks > 1 ? planned_ranks(static_cast<int>(config.parallel.ranks)) : single_rank();
  Trainer trainer(config, backend, arenas, *ranks);
  const HostBatch batch = shape_only_batch(config.run.micro_batch, config.run.sequence);
  trainer.initialise();
  trainer.begin_step();
  trainer.micro_batch(batch);
  trainer.finish_step();
  trainer.evaluate(batch);
  trainer.first_not_finite(batch);
  plan.classes = arenas.high_water();
  plan.loss_chunk = trainer.loss_workspace();
}

/// measure() in the fewest groups with which the plan fits its device, where it has one; else in one.
void measure_in_groups(RunPlan& plan, const RunConfig& config, Backend& backend) {
  RunPlan tried = plan;
  for (int groups = 1; groups <= config.model.kv_heads; ++groups) {
    if (config.model.kv_heads % groups != 0) continue;
    backend.set_attention_groups(groups);
    tried.attention_groups = groups;
    measure(tried, config, backend);
    if (groups == 1) plan = tried;
    if (!plan.device) return;
    if (tried.fits()) {
      plan = std::move(tried);
      return;
    }
  }
  backend.set_attention_groups(1);
}

/// The device that a run of this plan lies in: of `total` bytes, where that is given.
std::optional<DeviceMemory> device_of(const RunConfig& config, Backend& backend,
                                      std::optional<std::size_t> total) {
  std::optional<DeviceMemory> device = backend.device_memory();
  if (!device) return device;
  if (total) {
    device->name = fmt::format("a GPU of {}", format_bytes(static_cast<std::int64_t>(*total)));
    device->total = *total;
    device->free = *total - std::min(*total, device->context);
  }
  if (config.parallel.ranks > 1) {
    device->overhead += config.parallel.peer_copies ? kPeerCopiesBytes : kNcclBytes;
  }
  return device;
}

/// The memory that a run of this machine's host lies in: of `total` bytes, where that is given.
std::optional<MemoryRoom> host_of(std::optional<std::size_t> total) {
  if (total) {
    return MemoryRoom{fmt::format("a machine of {}", format_bytes(static_cast<std::int64_t>(*total))),
                      *total, *total};
  }
  const std::optional<MemoryLimit> limit = memory_limit();
  if (!limit) return std::nullopt;
  return MemoryRoom{
      limit->of_group ? "the memory of this process's control group" : "this machine's memory",
      limit->total, limit->free};
}

}  // namespace

std::optional<std::int64_t> fewest_recomputed_layers(const RunPlan& plan, const RunConfig& config,
                                                     Backend& backend) {
  const auto fits = [&](std::int64_t layers) {
    RunConfig changed = config;
    changed.activations.recompute_layers = layers;
    RunPlan with_layers = plan;
    measure_in_groups(with_layers, changed, backend);
    return with_layers.fits();
  };
  std::int64_t too_few = -1, enough = config.model.layers;
  if (!fits(enough)) return std::nullopt;
  while (enough - too_few > 1) {
    const std::int64_t middle = (too_few + enough) / 2;
    (fits(middle) ? enough : too_few) = middle;
  }
  return enough;
}

RunPlan plan_run(const RunConfig& config, Backend& backend, std::size_t data_bytes, bool data_loaded,
                 std::optional<std::size_t> memory) {
  RunPlan plan;
  plan.parameters = parameter_count(config.model);
  plan.tokens = config.run.sequence * config.run.micro_batch;
  plan.data = data_bytes;
  std::size_t largest = 0;
  for (const Parameter& parameter : parameters_of(config.model)) {
    largest = std::max(largest, static_cast<std::size_t>(parameter.count()) * sizeof(float));
  }
  plan.checkpoint = std::min(largest, kTransferBytes);
  plan.device = device_of(config, backend, memory);
  measure_in_groups(plan, config, backend);
  if (plan.device) return plan;
  multiply_once(backend, config.model.dtype);
  plan.program = kUncountedProgramBytes;
  if (memory_probe_available()) {
    const auto in_use = static_cast<std::size_t>(memory_use().current);
    plan.program = in_use - (data_loaded ? data_bytes : 0);
  }
  if (!memory) plan.held = plan.program + (data_loaded ? data_bytes : 0);
  plan.host = host_of(memory);
  plan.program += mpi_bytes_to_come(static_cast<std::size_t>(config.parallel.ranks));
  return plan;
}

std::int64_t saved_bytes_of_role(const RunPlan& plan, SlotRole role) {
  std::int64_t bytes = 0;
  for (std::size_t l = 0; l < plan.slots.size(); ++l) {
    for (std::size_t s = 0; s < plan.slots[l].size(); ++s) {
      const SlotPlan& slot = plan.bits.layers[l].slots[s];
      if (plan.slots[l][s].role == role && slot.action == SlotAction::kKeep) {
        bytes += payload_bytes(slot.format, grid_of(plan.slots[l][s], plan.tokens));
      }
    }
  }
  return bytes;
}

std::vector<PlannedLayers> group_layers(const RunPlan& plan) {
  std::vector<PlannedLayers> groups;
  for (std::size_t l = 0; l < plan.slots.size(); ++l) {
    const bool continues = !groups.empty() && same_layer(plan.bits.layers[l], plan.bits.layers[l - 1]);
    if (continues) {
      groups.back().last = l;
    } else {
      groups.push_back({l, l, saved_bytes(plan.slots[l], plan.bits.layers[l], plan.tokens)});
    }
  }
  return groups;
}

std::string to_json(const RunPlan& plan, const RunConfig& config,
                    std::optional<std::int64_t> fewest_layers) {
  using nlohmann::ordered_json;
  ordered_json json;
  json["parameters"] = plan.parameters;
  json["tokens_per_micro_batch"] = plan.tokens;
  json["policy"] = name_of(config.activations.policy);
  json["ranks"] = std::max<std::int64_t>(config.parallel.ranks, 1);
  json["attention_groups"] = plan.attention_groups;
  ordered_json& bytes = json["bytes"];
  for (int c = 0; c < kMemoryClasses; ++c) {
    bytes[std::string(name_of(static_cast<MemoryClass>(c)))] = plan.classes[static_cast<std::size_t>(c)];
  }
  bytes["loss chunk (within workspace)"] = plan.loss_chunk;
  bytes["data"] = plan.data;
  bytes["checkpoint"] = plan.checkpoint;
  bytes["program"] = plan.program;
  if (plan.device) {
    json["device"]["name"] = plan.device->name;
    json["device"]["total_bytes"] = plan.device->total;
    json["device"]["rounding_bytes"] = plan.rounding_bytes();
    json["device"]["overhead_bytes"] = plan.device->overhead;
    json["device"]["context_bytes"] = plan.device->context;
  }
  json["peak_bytes_predicted"] = plan.predicted_peak();
  if (const std::optional<MemoryRoom> room = plan.room()) {
    ordered_json& of_room = json[plan.device ? "device" : "host"];
    of_room["total_bytes"] = room->total;
    of_room["free_bytes"] = room->free;
    json["fits"] = plan.fits();
    if (!plan.fits()) {
      ordered_json& fewest = json["fewest_recomputed_layers"];
      if (fewest_layers) fewest = *fewest_layers;
    }
  }
  for (int r = 0; r < kSlotRoles; ++r) {
    const auto role = static_cast<SlotRole>(r);
    json["saved_bytes_per_role"][std::string(name_of(role))] = saved_bytes_of_role(plan, role);
  }
  for (const PlannedLayers& group : group_layers(plan)) {
    ordered_json layers;
    layers["first"] = group.first;
    layers["last"] = group.last;
    layers["saved_bytes_per_layer"] = group.bytes_per_layer;
    layers["run_again_in_backward"] = plan.bits.layers[group.first].recompute_layer;
    for (std::size_t s = 0; s < plan.slots[group.first].size(); ++s) {
      const SaveSlot& slot = plan.slots[group.first][s];
      const SlotPlan& planned = plan.bits.layers[group.first].slots[s];
      ordered_json entry;
      entry["slot"] = slot.name;
      entry["role"] = name_of(slot.role);
      entry["elements_per_token"] = slot.width;
      if (planned.action == SlotAction::kKeep) {
        entry["keep"] = planned.format.to_string();
        entry["bytes_per_layer"] = payload_bytes(planned.format, grid_of(slot, plan.tokens));
      } else {
        entry["recompute"] = slot.recomputed_from.empty() ? "the whole layer" : slot.recomputed_from;
      }
      layers["slots"].push_back(std::move(entry));
    }
    json["layers"].push_back(std::move(layers));
  }
  return to_text(json);
}

}  // namespace agoq

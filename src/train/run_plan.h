// RunPlan: what a run will hold in memory, known before it starts.
//
// The bytes of each class are not estimated by formulas: the plan lays out a Trainer on measuring
// arenas and runs its initialisation, a training step and an evaluation there, on operations that
// take their memory and compute nothing. It needs no device and touches no memory of model size.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "activations/bit_plan.h"
#include "train/run_arenas.h"
#include "train/run_config.h"

namespace agoq {

/// Memory that a run may lie in, in bytes.
struct MemoryRoom {
  std::string name;
  std::size_t total = 0;
  std::size_t free = 0;
};

struct RunPlan {
  std::int64_t parameters = 0;
  std::int64_t tokens = 0;  // of a micro-batch
  std::vector<LayerSlots> slots;
  BitPlan bits;
  BytesPerClass classes{};     // capacities of the run's arenas
  int attention_groups = 1;    // calls into which backward attention is cut (Backend)
  std::size_t loss_chunk = 0;  // of the workspace: what head and loss take (shared with the layers)
  std::size_t data = 0;        // the text, in host memory
  std::size_t checkpoint = 0;  // host memory through which a checkpoint is written
  std::size_t program = 0;     // the program and its libraries, counted when the plan was made, and MPI
  std::size_t held = 0;  // host memory that the process had when the plan was made, of what is above
  /// The device that the arenas lie in; nothing where that is host memory.
  std::optional<DeviceMemory> device;
  /// Host memory that the arenas lie in, with what was free when the plan was made; nothing where it is
  /// not known, and with a device.
  std::optional<MemoryRoom> host;
  /// Of the memory that the arenas lie in: on a device the host's share does not count.
  std::size_t predicted_peak() const;
  /// Sum over the arenas.
  std::size_t arena_bytes() const;
  /// What the device takes for the arenas beyond that: it gives out whole granules.
  std::size_t rounding_bytes() const;
  /// The memory that the arenas lie in; nothing where it is not known.
  std::optional<MemoryRoom> room() const;
  /// What the run takes of what is free there.
  std::size_t bytes_to_take() const;
  /// True where the room is not known.
  bool fits() const;
};

/// "it takes 28.4 GiB of NVIDIA H200, where 139 GiB of 140 GiB are free": of a plan whose room is known.
std::string fit_text(const RunPlan& plan);

/// Of a plan that does not fit: what it lacks and what to do, given fewest_recomputed_layers().
std::string misfit_text(const RunPlan& plan, std::optional<std::int64_t> fewest_layers);

/// Backend::expect_ready in the run's mode. To be called before the run is planned: where a library is
/// missing, a plan is made as if the run could do without it, and warns.
void expect_ready(const RunConfig& config, Backend& backend);

/// Throws Error (kInput) naming what helps when the run takes more than is free of the memory that it is
/// to lie in: a device would refuse it, and a host kill the process in some later step, without a word.
void check_fits(const RunPlan& plan, const RunConfig& config, Backend& backend);

/// The fewest layers to recompute (activations.recompute_layers) with which the run of this plan fits
/// its room; nothing when all of them are not enough.
std::optional<std::int64_t> fewest_recomputed_layers(const RunPlan& plan, const RunConfig& config,
                                                     Backend& backend);

/// Takes the fewest groups of backward attention with which the run fits the free memory of its device,
/// one where no number does or there is no device, and leaves the backend set to them for the run.
///
/// Of the rank that holds most, rank 0; of parallel.ranks ranks, one if that is 0.
///
/// data_bytes: Dataset::bytes(), or 0 if the data are not at hand; data_loaded: whether they are in
/// memory now. What libraries allocate once and for good (oneDNN's generated code, 5 MB of it at its
/// first product) differs from processor to processor, so it is provoked here and counted.
///
/// memory: in total, of the device or machine that is planned for in place of this one. Of it nothing is
/// taken but, on a device, this process's context.
RunPlan plan_run(const RunConfig& config, Backend& backend, std::size_t data_bytes, bool data_loaded,
                 std::optional<std::size_t> memory = std::nullopt);

/// What stands for RunPlan::program in programs that do not count their memory (memory_probe.h).
inline constexpr std::size_t kUncountedProgramBytes = std::size_t{8} << 20;

/// Bytes kept in all layers by slots of `role` (payload, without alignment).
std::int64_t saved_bytes_of_role(const RunPlan& plan, SlotRole role);

/// plan.json. fewest_layers: of a plan that does not fit, as in misfit_text.
std::string to_json(const RunPlan& plan, const RunConfig& config,
                    std::optional<std::int64_t> fewest_layers = std::nullopt);

/// Layers that are planned alike, as one row: first and last layer, and a description per slot.
struct PlannedLayers {
  std::size_t first;
  std::size_t last;
  std::int64_t bytes_per_layer;
};
std::vector<PlannedLayers> group_layers(const RunPlan& plan);

}  // namespace agoq

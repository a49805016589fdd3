// ActivationStore: owns the packed bytes of what forward saves for backward, and nothing else.
//
// A frame holds one micro-batch (of one model chunk); several are open at once under a pipeline.
// A LayerFrame is a frame's part for one layer. Forward either saves a tensor (`save`), or lets an
// operation write the packed form itself (`destination`), or computes straight into the store where
// the plan keeps a slot exactly (`output`). Backward reads the packed form (`saved`) or a tensor
// (`load`). Saved and loaded slots are tracked: an undeclared slot, a slot saved twice or loaded
// before it was saved is an Error, and close() reports slots that were saved and never loaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "activations/bit_plan.h"
#include "activations/save_slot.h"
#include "backend/backend.h"

namespace agoq {

class ActivationStore;

class LayerFrame {
 public:
  /// Whether the plan keeps the slot.
  bool kept(int slot) const;
  /// Quantises `tensor` [tokens, width] into the slot; does nothing if the plan recomputes it. The
  /// source may be overwritten afterwards.
  void save(const Context&, int slot, const Tensor& tensor);
  /// Where an operation writes the slot's packed form itself; not given (false) if it is recomputed.
  QuantTensor destination(int slot);
  /// A tensor [tokens, width] of the slot's own type to compute into: the store's bytes if the plan
  /// keeps the slot exactly (it then counts as saved), else workspace.
  Tensor output(const Context&, int slot);
  /// save(), unless `tensor` came from output() and is in the store already.
  void save_output(const Context&, int slot, const Tensor& tensor);
  /// The packed form.
  QuantTensor saved(int slot);
  /// The tensor, of the slot's own type: a view into the store if kept exactly, else dequantised
  /// into the workspace.
  Tensor load(const Context&, int slot);
  /// The tensor if the plan keeps the slot, else not given: for statistics that an operation
  /// recomputes by itself.
  Tensor load_if_kept(const Context&, int slot);

  /// What fused operations need beside `destination`: the rounding key and the counters row.
  RandomKey key(const Context&, int slot) const;
  Tensor counters(int slot) const;

 private:
  friend class ActivationStore;
  LayerFrame(ActivationStore& store, std::size_t frame, std::size_t layer, bool recomputing)
      : store_(store), frame_(frame), layer_(layer), recomputing_(recomputing) {}
  struct Entry;
  Entry& entry(int slot) const;

  ActivationStore& store_;
  std::size_t frame_;
  std::size_t layer_;
  bool recomputing_;  // the store's scratch layer, filled by running a layer again
};

class ActivationStore {
 public:
  /// Lays out `frames` frames for micro-batches of `tokens` tokens in `arena`, and one scratch layer
  /// if the plan runs layers again.
  ActivationStore(Arena& arena, std::vector<LayerSlots> layers, BitPlan plan, std::int64_t tokens,
                  std::int64_t frames);
  ~ActivationStore();

  /// Opens a free frame; throws Error if all are in flight.
  std::size_t open();
  LayerFrame layer(std::size_t frame, std::size_t layer);
  /// The scratch layer in which `layer` is run again; empties it.
  LayerFrame recompute_layer(std::size_t frame, std::size_t layer);
  /// Closes the frame and returns the names of slots that were saved and never loaded
  /// ("layer 3 norm1_input").
  std::vector<std::string> close(std::size_t frame);

  const BitPlan& plan() const { return plan_; }
  /// Bytes of all slots of the frames open now / at most at once since construction.
  std::size_t bytes_in_flight() const { return bytes_in_flight_; }
  std::size_t high_water() const { return high_water_; }

  /// Sets all counters to zero; reads them back, a row per layer and slot that counted anything.
  void reset_counters(const Context&);
  struct NamedCounts {
    std::string name;
    QuantCounts counts;
  };
  std::vector<NamedCounts> read_counters(const Context&) const;

 private:
  friend class LayerFrame;
  struct Frame;

  std::vector<LayerSlots> layers_;
  BitPlan plan_;
  std::int64_t tokens_;
  std::vector<Frame> frames_;
  std::vector<LayerFrame::Entry> scratch_;
  std::vector<std::size_t> first_counter_;  // row of each layer's first slot in counters_
  Tensor counters_;                         // int64 [slots of all layers, kQuantCounters]
  std::size_t frame_bytes_ = 0;
  std::size_t bytes_in_flight_ = 0;
  std::size_t high_water_ = 0;
};

}  // namespace agoq

// ActivationStore: owns the packed bytes of what forward saves for backward, and nothing else.
//
// A frame holds one micro-batch (of one model chunk); several are open at once under a pipeline.
// A LayerFrame is a frame's part for one layer. Forward saves a tensor (`save`), lets an operation
// write the packed form itself (`destination`), or computes straight into the store where the plan
// keeps a slot exactly (`output`). Backward reads the packed form (`saved`) or a tensor (`load`).
// Saves and loads are tracked: an undeclared slot, a slot saved twice or loaded before it was saved
// is an Error, and close() names slots that were saved and never loaded.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
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

  // --- forward ---
  /// Quantises `tensor` [tokens, width] into the slot, unless the plan recomputes it or the tensor
  /// came from output() and is in the store already. The source may be overwritten afterwards.
  void save(const Context&, int slot, const Tensor& tensor);
  /// For an operation that quantises `tensor` into the slot itself: where to. Not given (false) when
  /// save() would have nothing to do.
  QuantTensor destination(int slot, const Tensor& tensor);
  /// A tensor [tokens, width] of the slot's own type to compute into: the store's bytes if the plan
  /// keeps the slot exactly, else workspace.
  Tensor output(const Context&, int slot);

  // --- backward ---
  /// The packed form.
  QuantTensor saved(int slot);
  /// The tensor, of the slot's own type: a view into the store if kept exactly, else dequantised
  /// into the workspace.
  Tensor load(const Context&, int slot);
  /// load() if the plan keeps the slot, else not given: for statistics that an operation recomputes.
  Tensor load_if_kept(const Context&, int slot);

  /// What operations that quantise need beside `destination`: the rounding key and the counters row.
  RandomKey key(const Context&, int slot) const;
  Tensor counters(int slot) const;

 private:
  friend class ActivationStore;
  struct Entry {
    QuantTensor packed;  // not given if the plan recomputes the slot
    bool saved = false;
    bool loaded = false;
  };
  LayerFrame(ActivationStore& store, std::vector<Entry>& entries, std::size_t layer)
      : store_(store), entries_(entries), layer_(layer) {}
  Entry& entry(int slot) const;
  const SaveSlot& slot_of(int slot) const;
  void tell_observer(int slot, const Tensor& tensor) const;
  /// The entry of a kept slot, now saved; throws if it was saved before.
  Entry& mark_saved(int slot);
  /// The entry of a saved slot, now loaded; throws if it was not saved.
  Entry& mark_loaded(int slot);

  ActivationStore& store_;
  std::vector<Entry>& entries_;
  std::size_t layer_;
};

class ActivationStore {
 public:
  /// Lays out `frames` frames for micro-batches of `tokens` tokens in `arena`, and one scratch layer
  /// if the plan runs layers again.
  ActivationStore(Arena& arena, std::vector<LayerSlots> layers, BitPlan plan, std::int64_t tokens,
                  std::int64_t frames);

  /// Opens a free frame; throws Error if all are in flight.
  std::size_t open();
  LayerFrame layer(std::size_t frame, std::size_t layer);
  /// The scratch layer, emptied, in which `layer` is run again; it keeps every slot exactly.
  LayerFrame recomputed_layer(std::size_t layer);
  /// Closes the frame and returns the names of slots that were saved and never loaded
  /// ("layer 3 norm1_input").
  std::vector<std::string> close(std::size_t frame);

  const BitPlan& plan() const { return plan_; }
  const std::vector<LayerSlots>& layers() const { return layers_; }
  std::int64_t tokens() const { return tokens_; }
  /// Bytes of a frame, scratch layer apart; bytes held by open frames (and the scratch layer) at most
  /// at once since construction.
  std::size_t frame_bytes() const { return frame_bytes_; }
  std::size_t high_water() const { return high_water_; }

  /// Is told of each tensor that forward computes for a slot, or hands over to be saved, whether the
  /// plan keeps it or not. An empty function ends it.
  using Observer = std::function<void(const std::string& name, const Tensor& tensor)>;
  void observe(Observer observer) { observer_ = std::move(observer); }

  /// Sets all counters to zero.
  void reset_counters(const Context&);
  /// Slots ("layer 3 gate_up") that counted anything since the last reset.
  std::vector<NamedCounts> read_counters(const Context&) const;

 private:
  friend class LayerFrame;
  struct Frame {
    bool open = false;
    std::vector<std::vector<LayerFrame::Entry>> layers;
  };
  std::string name_of_slot(std::size_t layer, std::size_t slot) const;
  std::vector<LayerFrame::Entry> place_layer(Arena& arena, std::size_t layer,
                                             const LayerPlan& plan) const;

  Observer observer_;
  std::vector<LayerSlots> layers_;
  BitPlan plan_;
  std::int64_t tokens_;
  std::vector<Frame> frames_;
  std::vector<LayerFrame::Entry> scratch_;  // empty if the plan runs no layer again
  std::vector<std::size_t> first_row_;      // of each layer's slots in counters_
  Tensor counters_;                         // int64 [slots of all layers, kQuantCounters]
  std::size_t frame_bytes_ = 0;
  std::size_t scratch_bytes_ = 0;
  std::size_t frames_open_ = 0;
  std::size_t high_water_ = 0;
};

}  // namespace agoq

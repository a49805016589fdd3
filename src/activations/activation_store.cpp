#include "activations/activation_store.h"

#include <algorithm>
#include <utility>

namespace agoq {

LayerFrame::Entry& LayerFrame::entry(int slot) const {
  check(0 <= slot && static_cast<std::size_t>(slot) < entries_.size(),
        "layer {} declares {} slots; slot {} is not among them: add it to the layer's saves()", layer_,
        entries_.size(), slot);
  return entries_[static_cast<std::size_t>(slot)];
}

const SaveSlot& LayerFrame::slot_of(int slot) const {
  entry(slot);
  return store_.layers_[layer_][static_cast<std::size_t>(slot)];
}

LayerFrame::Entry& LayerFrame::mark_saved(int slot) {
  Entry& found = entry(slot);
  check(!found.saved, "{} was saved twice", store_.name_of_slot(layer_, static_cast<std::size_t>(slot)));
  found.saved = true;
  return found;
}

LayerFrame::Entry& LayerFrame::mark_loaded(int slot) {
  Entry& found = entry(slot);
  check(found.saved, "{} was asked for and never saved: the plan {} it",
        store_.name_of_slot(layer_, static_cast<std::size_t>(slot)),
        found.packed ? "keeps" : "recomputes");
  found.loaded = true;
  return found;
}

bool LayerFrame::kept(int slot) const { return static_cast<bool>(entry(slot).packed); }

void LayerFrame::save(const Context& context, int slot, const Tensor& tensor) {
  if (const QuantTensor packed = destination(slot, tensor)) {
    context.backend.quantize(context, tensor, packed, key(context, slot), counters(slot));
  }
}

void LayerFrame::tell_observer(int slot, const Tensor& tensor) const {
  if (!store_.observer_) return;
  store_.observer_(store_.name_of_slot(layer_, static_cast<std::size_t>(slot)), tensor);
}

QuantTensor LayerFrame::destination(int slot, const Tensor& tensor) {
  const Entry& found = entry(slot);
  tell_observer(slot, tensor);
  if (!found.packed) return {};
  if (tensor.data == found.packed.codes) {
    check(found.saved, "{}: a tensor inside the store that output() did not hand out",
          store_.name_of_slot(layer_, static_cast<std::size_t>(slot)));
    return {};
  }
  return mark_saved(slot).packed;
}

Tensor LayerFrame::output(const Context& context, int slot) {
  const SaveSlot& declared = slot_of(slot);
  const bool in_store = kept(slot) && entry(slot).packed.format == exact_format(declared.type);
  const Tensor tensor =
      in_store ? mark_saved(slot).packed.exact()
               : context.workspace.take(declared.type, Shape{store_.tokens_, declared.width});
  tell_observer(slot, tensor);
  return tensor;
}

QuantTensor LayerFrame::saved(int slot) { return mark_loaded(slot).packed; }

Tensor LayerFrame::load(const Context& context, int slot) {
  const QuantTensor packed = saved(slot);
  const SaveSlot& declared = slot_of(slot);
  if (packed.format == exact_format(declared.type)) return packed.exact();
  const Tensor tensor = context.workspace.take(declared.type, Shape{store_.tokens_, declared.width});
  context.backend.dequantize(context, packed, tensor);
  return tensor;
}

Tensor LayerFrame::load_if_kept(const Context& context, int slot) {
  return kept(slot) ? load(context, slot) : Tensor{};
}

RandomKey LayerFrame::key(const Context& context, int slot) const {
  entry(slot);
  const auto tensor =
      static_cast<std::uint32_t>(store_.first_row_[layer_]) + static_cast<std::uint32_t>(slot);
  return context.random.with(RandomPurpose::kActivationRounding, tensor);
}

Tensor LayerFrame::counters(int slot) const {
  entry(slot);
  const auto row = static_cast<std::int64_t>(store_.first_row_[layer_]) + slot;
  return store_.counters_.slice_rows(row, row + 1);
}

ActivationStore::ActivationStore(Arena& arena, std::vector<LayerSlots> layers, BitPlan plan,
                                 std::int64_t tokens, std::int64_t frames)
    : layers_(std::move(layers)), plan_(std::move(plan)), tokens_(tokens) {
  check(plan_.layers.size() == layers_.size(), "a plan for {} layers was given for {}",
        plan_.layers.size(), layers_.size());
  std::size_t rows = 0;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    check(plan_.layers[l].slots.size() == layers_[l].size(), "layer {} has {} slots, its plan {}", l,
          layers_[l].size(), plan_.layers[l].slots.size());
    first_row_.push_back(rows);
    rows += layers_[l].size();
  }
  counters_ = arena.take(ElementType::kInt64, Shape{static_cast<std::int64_t>(rows), kQuantCounters});
  frames_.resize(static_cast<std::size_t>(frames));
  for (Frame& frame : frames_) {
    const std::size_t before = arena.used();
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      frame.layers.push_back(place_layer(arena, l, plan_.layers[l]));
    }
    frame_bytes_ = arena.used() - before;
  }
  // Layers are alike, so one scratch layer serves all that are run again.
  for (std::size_t l = 0; l < layers_.size() && scratch_.empty(); ++l) {
    if (!plan_.layers[l].recompute_layer) continue;
    LayerPlan keep_all;
    for (const SaveSlot& slot : layers_[l]) {
      keep_all.slots.push_back({SlotAction::kKeep, exact_format(slot.type)});
    }
    const std::size_t before = arena.used();
    scratch_ = place_layer(arena, l, keep_all);
    scratch_bytes_ = arena.used() - before;
  }
}

std::vector<LayerFrame::Entry> ActivationStore::place_layer(Arena& arena, std::size_t layer,
                                                            const LayerPlan& plan) const {
  std::vector<LayerFrame::Entry> entries(layers_[layer].size());
  for (std::size_t s = 0; s < entries.size(); ++s) {
    if (plan.slots[s].action != SlotAction::kKeep) continue;
    entries[s].packed = take(arena, plan.slots[s].format, grid_of(layers_[layer][s], tokens_));
  }
  return entries;
}

std::size_t ActivationStore::open() {
  for (std::size_t f = 0; f < frames_.size(); ++f) {
    if (frames_[f].open) continue;
    frames_[f].open = true;
    for (auto& layer : frames_[f].layers) {
      for (LayerFrame::Entry& entry : layer) entry.saved = entry.loaded = false;
    }
    ++frames_open_;
    high_water_ = std::max(high_water_, frames_open_ * frame_bytes_ + scratch_bytes_);
    return f;
  }
  fail("all {} frames are in flight: the plan was made for fewer micro-batches than the schedule runs",
       frames_.size());
}

LayerFrame ActivationStore::layer(std::size_t frame, std::size_t layer) {
  check(frame < frames_.size() && frames_[frame].open, "frame {} is not open", frame);
  return {*this, frames_[frame].layers.at(layer), layer};
}

LayerFrame ActivationStore::recomputed_layer(std::size_t layer) {
  check(plan_.layers.at(layer).recompute_layer, "the plan does not run layer {} again", layer);
  for (LayerFrame::Entry& entry : scratch_) entry.saved = entry.loaded = false;
  return {*this, scratch_, layer};
}

std::vector<std::string> ActivationStore::close(std::size_t frame) {
  check(frame < frames_.size() && frames_[frame].open, "frame {} is not open", frame);
  std::vector<std::string> unused;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    const auto& entries = frames_[frame].layers[l];
    for (std::size_t s = 0; s < entries.size(); ++s) {
      if (entries[s].saved && !entries[s].loaded) unused.push_back(name_of_slot(l, s));
    }
  }
  frames_[frame].open = false;
  --frames_open_;
  return unused;
}

void ActivationStore::reset_counters(const Context& context) {
  context.backend.zero(context, counters_.data, counters_.bytes());
}

std::vector<NamedCounts> ActivationStore::read_counters(const Context& context) const {
  const std::vector<QuantCounts> counts = read_counts(context, counters_);
  std::vector<NamedCounts> named;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    for (std::size_t s = 0; s < layers_[l].size(); ++s) {
      const QuantCounts& of_slot = counts[first_row_[l] + s];
      if (of_slot.any()) named.push_back({name_of_slot(l, s), of_slot});
    }
  }
  return named;
}

std::string ActivationStore::name_of_slot(std::size_t layer, std::size_t slot) const {
  return fmt::format("layer {} {}", layer, layers_[layer][slot].name);
}

}  // namespace agoq

#include "activations/activation_store.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace agoq {
namespace {

constexpr std::int64_t kTokens = 5;

enum Slot : int { kInput, kStatistic, kGate, kDerived };

std::vector<LayerSlots> example_layers() {
  const LayerSlots block = {
      {"input", SlotRole::kNormInput, 48, 1, ElementType::kFp32, ""},
      {"rstd", SlotRole::kRstd, 1, 1, ElementType::kFp32, "input"},
      {"gate", SlotRole::kGateUp, 64, 2, ElementType::kFp32, ""},
      {"derived", SlotRole::kMlpHidden, 32, 1, ElementType::kFp32, "gate"},
  };
  return {block, block, {{"final", SlotRole::kNormInput, 48, 1, ElementType::kFp32, ""}}};
}

class ActivationStoreTest : public ::testing::Test {
 protected:
  ActivationStore store(SavePolicy policy, std::int64_t frames = 1) {
    ActivationConfig config;
    config.policy = policy;
    return ActivationStore(arena_, example_layers(), make_bit_plan(example_layers(), config), kTokens,
                           frames);
  }
  Tensor values(std::int64_t width, float first) {
    const Tensor tensor = workspace_.take(ElementType::kFp32, Shape{kTokens, width});
    for (std::int64_t i = 0; i < tensor.count(); ++i) {
      tensor.as<float>()[i] = first + std::sin(static_cast<float>(i));
    }
    return tensor;
  }

  Arena arena_{"activations", host_allocator(), 1 << 20};
  Arena workspace_{"workspace", host_allocator(), 1 << 20};
  Context context_{cpu_backend(), {}, workspace_, {}};
};

TEST_F(ActivationStoreTest, OwnsItsBytesSoTheSourceMayBeOverwritten) {
  ActivationStore store = this->store(SavePolicy::kAgoq);
  const std::size_t frame = store.open();
  LayerFrame layer = store.layer(frame, 0);
  const Tensor source = values(48, 0.0f);
  std::vector<float> before(source.as<float>(), source.as<float>() + source.count());
  layer.save(context_, kInput, source);
  for (std::int64_t i = 0; i < source.count(); ++i) source.as<float>()[i] = 1e30f;
  const Tensor loaded = layer.load(context_, kInput);
  for (std::int64_t i = 0; i < loaded.count(); ++i) {
    // Half the widest gap between NF4 levels, .15 of the largest magnitude, 1; and the scale's rounding.
    EXPECT_NEAR(loaded.as<float>()[i], before[static_cast<std::size_t>(i)], 0.17f);
  }
}

TEST_F(ActivationStoreTest, ComputesStraightIntoSlotsThatAreKeptExactly) {
  ActivationStore store = this->store(SavePolicy::kKeep);
  const std::size_t frame = store.open();
  LayerFrame layer = store.layer(frame, 0);
  const std::size_t used = workspace_.used();
  const Tensor gate = layer.output(context_, kGate);
  EXPECT_EQ(workspace_.used(), used) << "an exact slot needs no workspace";
  gate.as<float>()[7] = 42.0f;
  layer.save(context_, kGate, gate);  // in the store already: nothing to do
  EXPECT_FALSE(layer.destination(kGate, gate));
  EXPECT_EQ(layer.load(context_, kGate).data, gate.data);
  EXPECT_EQ(layer.load(context_, kGate).as<float>()[7], 42.0f);
}

TEST_F(ActivationStoreTest, GivesWorkspaceForSlotsThatAreQuantisedOrRecomputed) {
  ActivationStore store = this->store(SavePolicy::kAgoq);
  const std::size_t frame = store.open();
  LayerFrame layer = store.layer(frame, 0);
  const Tensor gate = layer.output(context_, kGate);
  EXPECT_TRUE(layer.destination(kGate, gate)) << "quantised: an operation packs it";
  const Tensor derived = layer.output(context_, kDerived);
  EXPECT_FALSE(layer.destination(kDerived, derived)) << "recomputed: nothing to pack";
  layer.save(context_, kDerived, derived);
  EXPECT_FALSE(layer.kept(kDerived));
  EXPECT_FALSE(layer.load_if_kept(context_, kStatistic));
}

TEST_F(ActivationStoreTest, RefusesSlotsThatWereNotDeclaredSavedTwiceOrNeverSaved) {
  ActivationStore store = this->store(SavePolicy::kAgoq);
  const std::size_t frame = store.open();
  LayerFrame layer = store.layer(frame, 0);
  const Tensor source = values(48, 0.0f);
  EXPECT_THROW(layer.save(context_, 4, source), Error);
  EXPECT_THROW(layer.load(context_, kInput), Error);
  layer.save(context_, kInput, source);
  EXPECT_THROW(layer.save(context_, kInput, source), Error);
  EXPECT_THROW(layer.saved(kDerived), Error) << "the plan recomputes it";
}

TEST_F(ActivationStoreTest, NamesSlotsThatWereSavedAndNeverLoaded) {
  ActivationStore store = this->store(SavePolicy::kAgoq);
  const std::size_t frame = store.open();
  LayerFrame layer = store.layer(frame, 1);
  layer.save(context_, kInput, values(48, 0.0f));
  layer.save(context_, kGate, values(64, 0.0f));
  layer.load(context_, kInput);
  EXPECT_EQ(store.close(frame), std::vector<std::string>{"layer 1 gate"});
}

TEST_F(ActivationStoreTest, HoldsSeveralMicroBatchesAtOnce) {
  ActivationStore store = this->store(SavePolicy::kAgoq, 2);
  const std::size_t first = store.open();
  const std::size_t second = store.open();
  EXPECT_THROW(store.open(), Error);
  store.layer(first, 0).save(context_, kInput, values(48, 10.0f));
  store.layer(second, 0).save(context_, kInput, values(48, -10.0f));
  EXPECT_GT(store.layer(first, 0).load(context_, kInput).as<float>()[0], 5.0f);
  EXPECT_LT(store.layer(second, 0).load(context_, kInput).as<float>()[0], -5.0f);
  EXPECT_EQ(store.high_water(), 2 * store.frame_bytes());
  store.close(first);
  EXPECT_EQ(store.open(), first) << "a closed frame is free again";
  EXPECT_THROW(store.layer(first, 0).load(context_, kInput), Error) << "and empty";
}

TEST_F(ActivationStoreTest, CountsPerSlotAndNamesIt) {
  ActivationStore store = this->store(SavePolicy::kAgoq);
  store.reset_counters(context_);
  EXPECT_TRUE(store.read_counters(context_).empty());
  const std::size_t frame = store.open();
  const Tensor source = values(64, 0.0f);
  source.as<float>()[3] = std::nanf("");
  store.layer(frame, 1).save(context_, kGate, source);
  const auto counts = store.read_counters(context_);
  ASSERT_EQ(counts.size(), 1u);
  EXPECT_EQ(counts[0].name, "layer 1 gate");
  EXPECT_EQ(counts[0].counts.non_finite, 1);
}

TEST_F(ActivationStoreTest, KeepsOneScratchLayerForLayersThatAreRunAgain) {
  ActivationStore store = this->store(SavePolicy::kRecompute);
  const std::size_t frame = store.open();
  store.layer(frame, 0).save(context_, kInput, values(48, 1.0f));
  EXPECT_FALSE(store.layer(frame, 0).kept(kGate));
  LayerFrame scratch = store.recomputed_layer(0);
  EXPECT_TRUE(scratch.kept(kGate));
  scratch.save(context_, kGate, values(64, 3.0f));
  EXPECT_EQ(scratch.load(context_, kGate).as<float>()[0], 3.0f);
  EXPECT_THROW(store.recomputed_layer(0).load(context_, kGate), Error) << "each use starts empty";
  EXPECT_THROW(store.recomputed_layer(2), Error);
}

TEST_F(ActivationStoreTest, MeasuresWhatItTakes) {
  Arena measuring = Arena::measuring("plan");
  ActivationConfig config;
  const BitPlan plan = make_bit_plan(example_layers(), config);
  const ActivationStore planned(measuring, example_layers(), plan, kTokens, 2);
  const std::size_t before = arena_.used();
  const ActivationStore real = store(SavePolicy::kAgoq, 2);
  EXPECT_EQ(measuring.high_water(), arena_.used() - before);
}

}  // namespace
}  // namespace agoq

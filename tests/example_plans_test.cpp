// What agoq plan says of every examples/*.toml, without a device and without data: the plan succeeds,
// its classes sum to the peak, its parameters are those of the published models; and what the method has
// to save, in bytes, at the quickstart's shape.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "checkpoint/json_text.h"
#include "keep_baseline.h"
#include "model/parameters.h"
#include "train/run_plan.h"
#include "train/trainer.h"

namespace agoq {
namespace {

std::vector<std::string> examples() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(AGOQ_EXAMPLES)) {
    if (entry.path().extension() == ".toml") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

RunConfig example(const std::string& name) {
  return load_run_config(std::string(AGOQ_EXAMPLES) + "/" + name + ".toml");
}

RunPlan plan_of(const RunConfig& config) {
  return plan_run(config, backend_of(config.run.device), 0, /*data_loaded=*/false);
}

std::size_t bytes_of(const RunPlan& plan, MemoryClass memory) {
  return plan.classes[static_cast<std::size_t>(memory)];
}

// Of the published weights; a head that is tied to the embedding counts once.
TEST(ExamplePlans, HaveTheParametersOfThePublishedModels) {
  const std::map<std::string, std::int64_t> published{
      {"codellama-34b", 33'743'970'304}, {"llama2-13b", 13'015'864'320}, {"llama2-7b", 6'738'415'616},
      {"llama3-8b", 8'030'261'248},      {"llama3.2-1b", 1'235'814'400}, {"olmo-1b", 1'176'764'416},
      {"quickstart", 3'820'800}};
  std::vector<std::string> known;
  for (const auto& [name, parameters] : published) known.push_back(name);
  EXPECT_EQ(examples(), known) << "a new example needs its number of parameters here";
  for (const auto& [name, parameters] : published) {
    EXPECT_EQ(parameter_count(example(name).model), parameters) << name;
  }
}

TEST(ExamplePlans, SucceedAndSumToTheirPeak) {
  for (const std::string& name : examples()) {
    SCOPED_TRACE(name);
    const RunConfig config = example(name);
    const RunPlan plan = plan_of(config);
    EXPECT_EQ(plan.parameters, parameter_count(config.model));

    const auto json = parse_json(to_json(plan, config));
    std::size_t sum = 0;
    for (const auto& [memory, bytes] : json.at("bytes").items()) {
      if (memory.find("within") == std::string::npos) sum += bytes.get<std::size_t>();
    }
    EXPECT_EQ(sum, json.at("peak_bytes_predicted"));
    EXPECT_EQ(sum, plan.predicted_peak());
    std::int64_t layers = 0;
    for (const auto& group : json.at("layers")) {
      layers += group.at("last").get<std::int64_t>() - group.at("first").get<std::int64_t>() + 1;
    }
    // Beside the transformer's blocks there is the head, which saves too.
    EXPECT_EQ(layers, static_cast<std::int64_t>(plan.slots.size()));
    EXPECT_GE(layers, config.model.layers);

    // Each class against what its parameters take, tensor by tensor; the arenas align tensors to less
    // than a thousandth.
    const auto parameters = static_cast<double>(plan.parameters);
    const auto share = [&](MemoryClass memory) {
      return static_cast<double>(bytes_of(plan, memory)) / parameters;
    };
    EXPECT_NEAR(share(MemoryClass::kWeights), 2.0, 0.002);                 // BF16
    EXPECT_NEAR(share(MemoryClass::kMasters), 2.0, 0.002);                 // its 16-bit remainder
    EXPECT_NEAR(share(MemoryClass::kGradients), 1 + 4.0 / 128, 0.01);      // E4M3, a scale per 128
    EXPECT_NEAR(share(MemoryClass::kMoments), 2 * (1 + 4.0 / 256), 0.02);  // 8 bits, a scale per 256
    std::int64_t saved = 0;
    for (int r = 0; r < kSlotRoles; ++r) saved += saved_bytes_of_role(plan, static_cast<SlotRole>(r));
    EXPECT_GE(bytes_of(plan, MemoryClass::kActivations), static_cast<std::size_t>(saved));
    EXPECT_LE(static_cast<double>(bytes_of(plan, MemoryClass::kActivations)),
              1.002 * static_cast<double>(saved));
  }
}

// What AGoQ may take of what keeping everything takes: the bounds that the method is held to.
TEST(ExamplePlans, TheQuickstartSavesWhatTheMethodPromises) {
  const RunConfig agoq = example("quickstart");
  const RunConfig keep = keep_baseline(agoq);
  const RunPlan planned = plan_of(agoq);
  const RunPlan kept = plan_of(keep);
  const auto ratio = [&](MemoryClass memory) {
    return static_cast<double>(bytes_of(planned, memory)) / static_cast<double>(bytes_of(kept, memory));
  };
  EXPECT_LE(ratio(MemoryClass::kActivations), 1.0 / 3);
  EXPECT_LE(ratio(MemoryClass::kGradients), 0.265);
  EXPECT_LE(ratio(MemoryClass::kMoments), 0.265);
  EXPECT_LT(planned.predicted_peak(), kept.predicted_peak());
  // FP32 gradients and moments are exactly that, so the ratios are against what they should be.
  EXPECT_GE(bytes_of(kept, MemoryClass::kGradients), 4 * static_cast<std::size_t>(kept.parameters));
  EXPECT_LE(bytes_of(kept, MemoryClass::kGradients),
            4 * static_cast<std::size_t>(kept.parameters) + 16384);
  EXPECT_GE(bytes_of(kept, MemoryClass::kMoments), 8 * static_cast<std::size_t>(kept.parameters));
  EXPECT_LE(bytes_of(kept, MemoryClass::kMoments),
            8 * static_cast<std::size_t>(kept.parameters) + 16384);

  // The counts that a run reports, of the tensors themselves.
  const auto counts = [](const RunConfig& config) {
    RunArenas arenas = RunArenas::measuring();
    const Trainer trainer(config, cpu_backend(), arenas);
    return std::vector<double>{static_cast<double>(trainer.activations().frame_bytes()),
                               static_cast<double>(trainer.gradients().bytes()),
                               static_cast<double>(trainer.optimizer().moment_bytes())};
  };
  const std::vector<double> few = counts(agoq), many = counts(keep);
  EXPECT_LE(few[0], many[0] / 3);
  EXPECT_LE(few[1], 0.265 * many[1]);
  EXPECT_LE(few[2], 0.265 * many[2]);
}

}  // namespace
}  // namespace agoq

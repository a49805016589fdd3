#include "train/fidelity.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "core/temporary_folder.h"

namespace agoq {
namespace {

std::string error_of(const std::string& setting) {
  try {
    parse_fidelity_setting(setting);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kInput);
    return error.what();
  }
  return "accepted";
}

TEST(Fidelity, SettingsAreFormatsWithOrWithoutAPolicy) {
  const FidelitySetting plain = parse_fidelity_setting("nf4/128/fp32");
  EXPECT_EQ(plain.policy, SavePolicy::kAgoq);
  EXPECT_EQ(plain.format, parse_format("nf4/128/fp32"));
  const FidelitySetting uniform = parse_fidelity_setting("uniform:paper-fp4");
  EXPECT_EQ(uniform.policy, SavePolicy::kUniform);
  EXPECT_EQ(uniform.format, parse_format("bnbfp4/128/fp32"));
  EXPECT_NE(error_of("keep:nf4/128/fp32").find("write FORMAT or uniform:FORMAT"), std::string::npos);
  EXPECT_NE(error_of("dynamic8-unsigned/256/fp32").find("negative"), std::string::npos);
  EXPECT_NE(error_of("nf5/128/fp32").find("nf5"), std::string::npos);
}

TEST(Fidelity, DistancesArePerKindAndOfTheWhole) {
  const std::vector<Parameter> parameters = {{"a", ParameterKind::kQkv, 1, 2, 1},
                                             {"b", ParameterKind::kQkv, 1, 1, 1},
                                             {"c", ParameterKind::kDown, 1, 1, 1},
                                             {"d", ParameterKind::kNorm, 1, 1, 1}};
  const HostGradients reference = {{3, 4}, {12}, {1}, {0}};
  const HostGradients gradients = {{3, 5}, {12}, {3}, {0}};
  const GradientDistance found = distance(parameters, reference, gradients);
  EXPECT_DOUBLE_EQ(found.kinds.at(ParameterKind::kQkv), 1.0 / 13);
  EXPECT_DOUBLE_EQ(found.kinds.at(ParameterKind::kDown), 2.0);
  EXPECT_EQ(found.kinds.count(ParameterKind::kNorm), 0u);
  EXPECT_DOUBLE_EQ(found.whole, std::sqrt(5.0 / 170));
  EXPECT_DOUBLE_EQ(found.cosine, (9 + 20 + 144 + 3) / std::sqrt(170.0 * 187.0));
  EXPECT_EQ(distance_by_layer(parameters, ParameterKind::kQkv, reference, gradients),
            (std::vector<double>{1.0 / 5, 0.0}));
  EXPECT_THROW(distance(parameters, {{0, 0}, {0}, {0}, {0}}, gradients), Error);
}

// Ones, and channel 5 at 20: one block of 32 loses, the other is exact.
TEST(Fidelity, StatisticsOfAnActivationWithAnOutlierChannel) {
  constexpr std::int64_t kWidth = 64, kRows = 100;
  std::vector<float> values;
  for (std::int64_t r = 0; r < kRows; ++r) {
    for (std::int64_t c = 0; c < kWidth; ++c) {
      values.push_back(((r + c) % 2 == 0 ? 1.0f : -1.0f) * (c == 5 ? 20.0f : 1.0f));
    }
  }
  const SaveSlot whole{"gate_up", SlotRole::kGateUp, kWidth, 1, ElementType::kFp32, ""};
  SaveSlot halves = whole;
  halves.segments = 2;
  const std::vector<QuantFormat> formats = {parse_format("int8/32/fp32"), parse_format("int8/128/fp32"),
                                            parse_format("fp32")};
  const ActivationStatistics found = measure_activation(whole, 3, values, formats);
  EXPECT_EQ(found.layer, 3u);
  EXPECT_EQ(found.slot, "gate_up");
  const double square = 63 + 400;  // of a row
  EXPECT_NEAR(found.rms, std::sqrt(square / kWidth), 1e-9);
  EXPECT_NEAR(found.peak, 20 / found.rms, 1e-6);
  EXPECT_NEAR(found.largest_channel, 20, 1e-9);
  EXPECT_EQ(found.outlier_channels, 1);
  // 1 is 6.35 steps of 20/127 and becomes 6 of them.
  const double lost = 1 - 6 * 20.0 / 127;
  const auto sqnr = [&](int elements) { return -10 * std::log10(elements * lost * lost / square); };
  EXPECT_NEAR(found.sqnr_db[0], sqnr(31), 1e-3);
  EXPECT_NEAR(found.sqnr_db[1], sqnr(63), 1e-3);
  EXPECT_TRUE(std::isinf(found.sqnr_db[2]));
  // Blocks restart at segments, so 128 elements are 32.
  EXPECT_NEAR(measure_activation(halves, 3, values, formats).sqnr_db[1], sqnr(31), 1e-3);

  const std::vector<float> even(values.size(), 2.0f);
  EXPECT_EQ(measure_activation(whole, 0, even, formats).outlier_channels, 0);
  EXPECT_THROW(measure_activation(whole, 0, std::vector<float>(values.size(), 0.0f), formats), Error);
}

TEST(Fidelity, TheBatchIsSpreadOverTheValidationDocuments) {
  const TemporaryFolder folder;
  for (int d = 0; d < 8; ++d) {
    folder.write("text/" + std::to_string(d) + ".txt", std::string(37, static_cast<char>('a' + d)));
  }
  DataConfig config;
  config.paths = {folder.path("text")};
  config.holdout_every = 2;
  config.holdout_index = 1;
  const Dataset data = Dataset::load(config);
  constexpr std::int64_t kSequence = 16;  // 4 documents of 38 tokens: 10 sequences
  ASSERT_EQ(data.sequences(Split::kValidation, kSequence), 10);
  const HostBatch batch = spread_batch(data, 5, kSequence);
  std::int64_t valid = 0;
  std::vector<std::int32_t> starts;
  for (std::int64_t s = 0; s < 5; ++s) {
    HostBatch one;
    data.fill(Split::kValidation, 0, 2 * s, 1, kSequence, one);
    for (std::size_t i = 0; i < one.tokens.size(); ++i) {
      const std::size_t at = static_cast<std::size_t>(s * kSequence) + i;
      EXPECT_EQ(batch.tokens[at], one.tokens[i]);
      EXPECT_EQ(batch.targets[at], one.targets[i]);
      EXPECT_EQ(batch.weights[at], one.weights[i]);
      EXPECT_EQ(batch.positions[at], one.positions[i]);
    }
    for (std::int64_t d = 0; d < one.document_count; ++d) {
      starts.push_back(static_cast<std::int32_t>(s * kSequence) +
                       one.document_starts[static_cast<std::size_t>(d)]);
    }
    valid += one.valid_tokens;
  }
  EXPECT_EQ(batch.document_count, static_cast<std::int64_t>(starts.size()));
  starts.push_back(static_cast<std::int32_t>(5 * kSequence));
  EXPECT_EQ(batch.document_starts, starts);
  EXPECT_EQ(batch.longest_document, kSequence);
  EXPECT_EQ(batch.valid_tokens, valid);
  EXPECT_THROW(spread_batch(data, 11, kSequence), Error);
  EXPECT_THROW(spread_batch(data, 0, kSequence), Error);
}

}  // namespace
}  // namespace agoq

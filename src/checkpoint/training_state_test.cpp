#include "checkpoint/training_state.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "backend/backend.h"
#include "checkpoint/durable_file.h"
#include "core/random.h"
#include "model/parameters.h"

namespace agoq {
namespace {

namespace fs = std::filesystem;

ModelConfig tiny_config() {
  ModelConfig config;
  config.hidden = 64;
  config.layers = 1;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_size = 16;
  config.feed_forward = 48;
  config.vocabulary = 80;
  config.dtype = ElementType::kBf16;
  return config;
}

OptimizerConfig optimizer_config(MasterKind master, bool moments_8bit) {
  OptimizerConfig config;
  config.master = master;
  config.moments_8bit = moments_8bit;
  return config;
}

/// A model's weights, gradients and optimizer, without the model: what a step updates.
struct Trainee {
  Trainee(const ModelConfig& model, const OptimizerConfig& optimizer_settings)
      : config{model, 128, 7},
        parameters(parameters_of(model)),
        optimizer(memory, memory, parameters, optimizer_settings, model.dtype),
        gradients(memory, parameters, {}, model.dtype) {
    for (const Parameter& parameter : parameters) {
      weights.push_back(memory.take(model.dtype, Shape{parameter.rows, parameter.columns}));
    }
  }

  /// Starts from random weights.
  void initialise() {
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const Arena::Scope scope(workspace);
      const Tensor initial =
          workspace.take(ElementType::kFp32, Shape{parameters[p].rows, parameters[p].columns});
      fill(initial, p, 0, 0.02f);
      optimizer.initialise(context, p, initial, weights[p]);
    }
  }
  /// One update with the gradients of that step.
  void update(std::int64_t step) {
    context.random.step = static_cast<std::uint32_t>(step);
    gradients.zero(context);
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const Arena::Scope scope(workspace);
      const Tensor addend =
          workspace.take(ElementType::kFp32, Shape{parameters[p].rows, parameters[p].columns});
      fill(addend, p, step, 1.0f);
      gradients.add(context, p, addend);
    }
    optimizer.update(context, weights, gradients, 1e-2, 0.01, step);
  }
  static void fill(const Tensor& tensor, std::size_t parameter, std::int64_t step, float scale) {
    RandomKey key;
    key.step = static_cast<std::uint32_t>(step);
    key.tensor = static_cast<std::uint32_t>(parameter);
    for (std::int64_t i = 0; i < tensor.count(); ++i) {
      tensor.as<float>()[i] =
          scale * static_cast<float>(random_normal(key, static_cast<std::uint64_t>(i)));
    }
  }
  /// Weights, masters and every plane of the moments, one after another.
  std::string bytes() const {
    std::string all;
    const auto append = [&](const std::byte* data, std::size_t count) {
      all.append(reinterpret_cast<const char*>(data), count);
    };
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      append(weights[p].data, weights[p].bytes());
      if (const Tensor& master = optimizer.master(p)) append(master.data, master.bytes());
      for (const QuantTensor* moment : {&optimizer.first_moment(p), &optimizer.second_moment(p)}) {
        const RowBytes row = row_bytes(moment->format, moment->grid);
        const auto rows = moment->rows();
        append(moment->codes, static_cast<std::size_t>(rows * row.codes));
        append(moment->scales, static_cast<std::size_t>(rows * row.scales));
      }
    }
    return all;
  }
  TrainingSubject subject() const {
    return {config, parameters, weights, optimizer, GradientConfig{}.format};
  }

  Arena memory{"memory", host_allocator(), std::size_t{4} << 20};
  Arena workspace{"workspace", host_allocator(), std::size_t{4} << 20};
  Context context{cpu_backend(), {}, workspace, {}};
  HuggingFaceConfig config;
  std::vector<Parameter> parameters;
  AdamW optimizer;
  MainGradients gradients;
  std::vector<Tensor> weights;
};

class TrainingState : public testing::Test {
 protected:
  void SetUp() override {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    directory_ =
        fs::path(testing::TempDir()) / fmt::format("training_state_{}_{}", info->name(), ::getpid());
    checkpoints_ = (directory_ / "checkpoints").string();
  }
  void TearDown() override { fs::remove_all(directory_); }

  void write(const Trainee& trainee, std::int64_t step, std::int64_t keep = 10) const {
    write_checkpoint(trainee.context, checkpoints_, trainee.subject(), {step, 8 * step, 42, 43}, keep,
                     "test");
  }
  TrainingPosition read(const Trainee& trainee, std::int64_t step) const {
    return read_checkpoint(trainee.context, checkpoint_directory(checkpoints_, step), trainee.subject());
  }
  std::string error_of_reading(const Trainee& trainee, std::int64_t step) const {
    const std::string before = trainee.bytes();
    try {
      read(trainee, step);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInput);
      EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos) << error.what();
      EXPECT_EQ(trainee.bytes(), before) << "a refused checkpoint changed something";
      return error.what();
    }
    ADD_FAILURE() << "the checkpoint was accepted";
    return "";
  }
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(checkpoints_))
      found.push_back(entry.path().filename().string());
    std::sort(found.begin(), found.end());
    return found;
  }

  fs::path directory_;
  std::string checkpoints_;
};

TEST_F(TrainingState, AResumedRunContinuesBitForBit) {
  for (const MasterKind master : {MasterKind::kRemainder, MasterKind::kFp32, MasterKind::kNone}) {
    for (const bool moments_8bit : {true, false}) {
      SCOPED_TRACE(fmt::format("master {} 8-bit moments {}", static_cast<int>(master), moments_8bit));
      const OptimizerConfig settings = optimizer_config(master, moments_8bit);
      Trainee straight(tiny_config(), settings);
      straight.initialise();
      for (std::int64_t step = 1; step <= 3; ++step) straight.update(step);
      write(straight, 3);
      const std::string at_checkpoint = straight.bytes();
      for (std::int64_t step = 4; step <= 6; ++step) straight.update(step);
      ASSERT_NE(straight.bytes(), at_checkpoint);

      Trainee resumed(tiny_config(), settings);
      const TrainingPosition position = read(resumed, 3);
      EXPECT_EQ(position.step, 3);
      EXPECT_EQ(position.next_sequence, 24);
      EXPECT_EQ(position.seed, 42u);
      EXPECT_EQ(position.data_seed, 43u);
      EXPECT_EQ(resumed.bytes(), at_checkpoint);
      for (std::int64_t step = 4; step <= 6; ++step) resumed.update(step);
      EXPECT_EQ(resumed.bytes(), straight.bytes());
      fs::remove_all(checkpoints_);
    }
  }
}

TEST_F(TrainingState, KeepsTheLastOnes) {
  Trainee trainee(tiny_config(), optimizer_config(MasterKind::kRemainder, true));
  trainee.initialise();
  EXPECT_EQ(latest_checkpoint(checkpoints_), std::nullopt);
  for (const std::int64_t step : {8, 9, 10, 100}) write(trainee, step, 3);
  EXPECT_EQ(checkpoint_steps(checkpoints_), (std::vector<std::int64_t>{9, 10, 100}));
  EXPECT_EQ(latest_checkpoint(checkpoints_), 100);
  EXPECT_EQ(names(), (std::vector<std::string>{"step-10", "step-100", "step-9"}));
  EXPECT_EQ(read_training_position(checkpoint_directory(checkpoints_, 100)).next_sequence, 800);
  EXPECT_THROW(write(trainee, 101, 0), Error);
}

TEST_F(TrainingState, TakesThePlaceOfTheSameStepButNotOfALaterOne) {
  Trainee trainee(tiny_config(), optimizer_config(MasterKind::kRemainder, true));
  trainee.initialise();
  trainee.update(1);
  write(trainee, 2);
  trainee.update(2);
  write(trainee, 2);
  EXPECT_EQ(names(), std::vector<std::string>{"step-2"});
  const std::string bytes = trainee.bytes();
  trainee.update(3);
  read(trainee, 2);
  EXPECT_EQ(trainee.bytes(), bytes);
  EXPECT_THROW(write(trainee, 1), Error);
  EXPECT_EQ(names(), std::vector<std::string>{"step-2"});
}

TEST_F(TrainingState, TakesNoNoticeOfUnfinishedCheckpointsAndRemovesThem) {
  Trainee trainee(tiny_config(), optimizer_config(MasterKind::kRemainder, true));
  trainee.initialise();
  write(trainee, 5);
  // What a crash leaves, and what others may have put there.
  fs::copy(checkpoint_directory(checkpoints_, 5), fs::path(checkpoints_) / ".step-6.tmp");
  fs::remove(fs::path(checkpoints_) / ".step-6.tmp" / "state.safetensors");
  fs::create_directory(fs::path(checkpoints_) / "step-7");  // without files
  fs::create_directory(fs::path(checkpoints_) / "step-08");
  fs::create_directory(fs::path(checkpoints_) / "step-9x");
  write_durably((fs::path(checkpoints_) / "notes.txt").string(), "mine");
  EXPECT_EQ(checkpoint_steps(checkpoints_), std::vector<std::int64_t>{5});
  EXPECT_EQ(latest_checkpoint(checkpoints_), 5);
  remove_unfinished_checkpoints(checkpoints_);
  EXPECT_EQ(names(), (std::vector<std::string>{"notes.txt", "step-08", "step-5", "step-7", "step-9x"}));
  fs::create_directory(fs::path(checkpoints_) / ".step-6.tmp");
  write(trainee, 6);
  EXPECT_EQ(checkpoint_steps(checkpoints_), (std::vector<std::int64_t>{5, 6}));
  EXPECT_FALSE(fs::exists(fs::path(checkpoints_) / ".step-6.tmp"));
}

TEST_F(TrainingState, SaysWhatDiffersAndTouchesNothing) {
  Trainee trainee(tiny_config(), optimizer_config(MasterKind::kRemainder, true));
  trainee.initialise();
  write(trainee, 1);

  ModelConfig wider = tiny_config();
  wider.feed_forward = 64;
  Trainee other_model(wider, optimizer_config(MasterKind::kRemainder, true));
  other_model.initialise();
  EXPECT_NE(error_of_reading(other_model, 1).find("feed_forward 64 against 48"), std::string::npos);

  ModelConfig segmented = tiny_config();
  segmented.segments = 8;
  Trainee other_grid(segmented, optimizer_config(MasterKind::kRemainder, true));
  other_grid.initialise();
  EXPECT_NE(error_of_reading(other_grid, 1).find("segments 8 against 16"), std::string::npos);

  ModelConfig fp32 = tiny_config();
  fp32.dtype = ElementType::kFp32;
  Trainee other_type(fp32, optimizer_config(MasterKind::kRemainder, true));
  other_type.initialise();
  EXPECT_NE(error_of_reading(other_type, 1).find("dtype fp32 against bf16"), std::string::npos);

  Trainee other_moments(tiny_config(), optimizer_config(MasterKind::kRemainder, false));
  other_moments.initialise();
  const std::string moments = error_of_reading(other_moments, 1);
  EXPECT_NE(moments.find("dynamic8/256/fp32"), std::string::npos) << moments;
  EXPECT_NE(moments.find("fp32 over"), std::string::npos) << moments;

  Trainee other_master(tiny_config(), optimizer_config(MasterKind::kFp32, true));
  other_master.initialise();
  const std::string master = error_of_reading(other_master, 1);
  EXPECT_NE(master.find("master is remainder in the checkpoint and fp32 configured"), std::string::npos)
      << master;

  EXPECT_NE(error_of_reading(trainee, 99).find("config.json"), std::string::npos);
}

TEST_F(TrainingState, RefusesABrokenState) {
  Trainee trainee(tiny_config(), optimizer_config(MasterKind::kRemainder, true));
  trainee.initialise();
  write(trainee, 1);
  const fs::path state = fs::path(checkpoint_directory(checkpoints_, 1)) / "state.safetensors";
  fs::resize_file(state, fs::file_size(state) - 1);
  EXPECT_NE(error_of_reading(trainee, 1).find("cut short"), std::string::npos);
  write_safetensors(state.string(), {}, {{"step", "1"}, {"next_sequence", "-3"}, {"seed", "1"}});
  EXPECT_NE(error_of_reading(trainee, 1).find("next_sequence is '-3'"), std::string::npos);
  write_safetensors(state.string(), {}, {{"step", "1"}, {"seed", "1"}});
  EXPECT_NE(error_of_reading(trainee, 1).find("'next_sequence'"), std::string::npos);
  fs::remove(state);
  EXPECT_NE(error_of_reading(trainee, 1).find("state.safetensors"), std::string::npos);
}

TEST_F(TrainingState, SkipsWhatIsNotWholeAndSaysWhy) {
  Trainee trainee(tiny_config(), optimizer_config(MasterKind::kRemainder, true));
  trainee.initialise();
  const auto file = [&](std::int64_t step, const char* name) {
    return fs::path(checkpoint_directory(checkpoints_, step)) / name;
  };
  for (const std::int64_t step : {1, 2, 3, 4, 5, 6}) write(trainee, step);
  fs::remove(file(6, "model.safetensors"));
  fs::resize_file(file(5, "model.safetensors"), fs::file_size(file(5, "model.safetensors")) - 1);
  fs::resize_file(file(4, "state.safetensors"), fs::file_size(file(4, "state.safetensors")) + 1);
  write_durably(file(3, "config.json").string(), "{");
  std::vector<std::string> skipped;
  EXPECT_EQ(latest_checkpoint(checkpoints_, skipped), 2);
  ASSERT_EQ(skipped.size(), 4u);
  const std::vector<std::pair<const char*, const char*>> expected{
      {"step-6: ", "model.safetensors is missing"},
      {"step-5: ", "cut short"},
      {"step-4: ", "state.safetensors"},
      {"step-3: ", "config.json"}};
  for (std::size_t i = 0; i < skipped.size(); ++i) {
    for (const char* text : {expected[i].first, expected[i].second}) {
      EXPECT_NE(skipped[i].find(text), std::string::npos) << skipped[i];
    }
    EXPECT_EQ(skipped[i].find('\n'), std::string::npos) << skipped[i];
  }
  EXPECT_EQ(checkpoint_steps(checkpoints_), (std::vector<std::int64_t>{1, 2}));
  // They neither stand in the way of the run that goes on nor count among those that are kept.
  write(trainee, 3, 2);
  EXPECT_EQ(checkpoint_steps(checkpoints_), (std::vector<std::int64_t>{2, 3}));
  write(trainee, 5, 2);
  EXPECT_EQ(checkpoint_steps(checkpoints_), (std::vector<std::int64_t>{3, 5}));
}

TEST_F(TrainingState, RefusesADirectoryThatIsNamedAfterAnotherStep) {
  Trainee trainee(tiny_config(), optimizer_config(MasterKind::kRemainder, true));
  trainee.initialise();
  write(trainee, 4);
  fs::rename(checkpoint_directory(checkpoints_, 4), checkpoint_directory(checkpoints_, 9));
  EXPECT_NE(error_of_reading(trainee, 9).find("holds the state after step 4: rename it to step-4"),
            std::string::npos);
  EXPECT_THROW(read_training_position(checkpoint_directory(checkpoints_, 9)), Error);
}

TEST_F(TrainingState, WritesTheSameBytesForTheSameState) {
  Trainee trainee(tiny_config(), optimizer_config(MasterKind::kRemainder, true));
  trainee.initialise();
  const auto content = [&](const char* name) {
    std::ifstream file(fs::path(checkpoint_directory(checkpoints_, 1)) / name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  write(trainee, 1);
  const std::string first =
      content("state.safetensors") + content("model.safetensors") + content("config.json");
  write(trainee, 1);
  EXPECT_EQ(content("state.safetensors") + content("model.safetensors") + content("config.json"), first);
  EXPECT_GT(first.size(), 10000u);
}

}  // namespace
}  // namespace agoq

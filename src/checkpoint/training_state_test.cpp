#include "checkpoint/training_state.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "backend/backend.h"
#include "checkpoint/durable_file.h"
#include "checkpoint/manifest.h"
#include "comm/thread_ranks.h"
#include "core/random.h"
#include "gradients/lone_reducer.h"
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
  Trainee(const ModelConfig& model, const OptimizerConfig& optimizer_settings,
          const OptimizerShare& share = {})
      : config{model, 128, 7},
        parameters(parameters_of(model)),
        optimizer(memory, memory, parameters, optimizer_settings, model.dtype, share),
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
    const LoneReducer alone(gradients);
    optimizer.update(context, weights, alone.reducer, 1e-2, 0.01, step);
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
    write_checkpoint(trainee.context, *alone_, checkpoints_, trainee.subject(), {step, 8 * step, 42, 43},
                     keep, "test");
  }
  TrainingPosition read(const Trainee& trainee, std::int64_t step) const {
    return read_checkpoint(trainee.context, *alone_, checkpoint_directory(checkpoints_, step),
                           trainee.subject());
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

  std::string content(std::int64_t step, const char* name) const {
    std::ifstream file(fs::path(checkpoint_directory(checkpoints_, step)) / name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
  std::string content(std::int64_t step) const {
    std::string all;
    for (const char* name : kFiles) all += content(step, name);
    return all;
  }

  static constexpr const char* kFiles[] = {"config.json", "model.safetensors", "state.safetensors",
                                           "manifest.json"};

  std::unique_ptr<Communicator> alone_ = single_rank();
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

  EXPECT_NE(error_of_reading(trainee, 99).find("manifest.json is missing"), std::string::npos);
}

TEST_F(TrainingState, RefusesABrokenState) {
  Trainee trainee(tiny_config(), optimizer_config(MasterKind::kRemainder, true));
  trainee.initialise();
  write(trainee, 1);
  const fs::path state = fs::path(checkpoint_directory(checkpoints_, 1)) / "state.safetensors";
  fs::resize_file(state, fs::file_size(state) - 1);
  EXPECT_NE(error_of_reading(trainee, 1).find("cut short"), std::string::npos);
  fs::remove(state);
  EXPECT_NE(error_of_reading(trainee, 1).find("state.safetensors is missing"), std::string::npos);
  // A state that its manifest describes and that makes no sense.
  const auto replace = [&](const SafetensorsMetadata& metadata) {
    fs::remove(state);
    write_safetensors(state.string(), {}, metadata);
    Manifest manifest = read_manifest(state.parent_path().string());
    for (ManifestFile& file : manifest.files) {
      if (file.name == "state.safetensors") file.bytes = fs::file_size(state);
    }
    write_durably((state.parent_path() / "manifest.json").string(), to_json(manifest));
  };
  replace({{"step", "1"}, {"next_sequence", "-3"}, {"seed", "1"}});
  EXPECT_NE(error_of_reading(trainee, 1).find("next_sequence is '-3'"), std::string::npos);
  replace({{"step", "1"}, {"seed", "1"}});
  EXPECT_NE(error_of_reading(trainee, 1).find("'next_sequence'"), std::string::npos);
}

TEST_F(TrainingState, NamesTheTensorInWhichAByteHasFlipped) {
  Trainee trainee(tiny_config(), optimizer_config(MasterKind::kRemainder, true));
  trainee.initialise();
  trainee.update(1);
  write(trainee, 1);
  Trainee reader(tiny_config(), optimizer_config(MasterKind::kRemainder, true));
  reader.initialise();
  const fs::path directory = checkpoint_directory(checkpoints_, 1);
  const auto flip = [](const fs::path& path, std::uint64_t at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(at));
    const char flipped = static_cast<char>(file.get() ^ 0x10);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(flipped);
  };
  int tensors = 0;
  for (const char* name : {"model.safetensors", "state.safetensors"}) {
    const fs::path path = directory / name;
    const SafetensorsReader written(path.string());
    for (const SafetensorsEntry& entry : written.entries()) {
      // The first byte, the last and one in between.
      for (const std::uint64_t at :
           {std::uint64_t{0}, std::uint64_t{entry.bytes() / 3}, std::uint64_t{entry.bytes() - 1}}) {
        flip(path, entry.begin + at);
        EXPECT_EQ(defect_of_checkpoint(directory.string()), "");  // nothing that sizes show
        const std::string error = error_of_reading(reader, 1);
        EXPECT_NE(error.find(fmt::format("{}' is damaged: the bytes of tensor '{}'", name, entry.name)),
                  std::string::npos)
            << error;
        flip(path, entry.begin + at);
      }
      ++tensors;
    }
    // In the metadata of the header: version "test" becomes "dest".
    const std::size_t at = content(1, name).find(name[0] == 'm' ? "pt\"" : "test\"");
    ASSERT_NE(at, std::string::npos);
    flip(path, at);
    const std::string error = error_of_reading(reader, 1);
    EXPECT_NE(error.find(fmt::format("{}' is damaged: its bytes", name)), std::string::npos) << error;
    flip(path, at);
  }
  EXPECT_GT(tensors, 20);
  // 7 becomes 6: another end of the document, of which nothing else would tell.
  const std::size_t at = content(1, "config.json").find("\"eos_token_id\": 7");
  ASSERT_NE(at, std::string::npos);
  std::string config = content(1, "config.json");
  config.replace(at, 17, "\"eos_token_id\": 6");
  write_durably((directory / "config.json").string(), config);
  EXPECT_NE(error_of_reading(reader, 1).find("config.json' is damaged"), std::string::npos);
  EXPECT_THROW(verify_weights(directory.string()), Error);
  config.replace(at, 17, "\"eos_token_id\": 7");
  write_durably((directory / "config.json").string(), config);
  verify_weights(directory.string());
  read(reader, 1);
  EXPECT_EQ(reader.bytes(), trainee.bytes());
}

TEST_F(TrainingState, RefusesAManifestThatIsNone) {
  Trainee trainee(tiny_config(), optimizer_config(MasterKind::kRemainder, true));
  trainee.initialise();
  write(trainee, 1);
  const std::string directory = checkpoint_directory(checkpoints_, 1);
  const std::string path = (fs::path(directory) / "manifest.json").string();
  const std::string good = content(1, "manifest.json");
  const auto expect = [&](const std::string& text, const std::string& words) {
    write_durably(path, text);
    const std::string error = error_of_reading(trainee, 1);
    EXPECT_NE(error.find(words), std::string::npos) << error;
  };
  const auto changed = [&](const std::string& from, const std::string& to) {
    const std::size_t at = good.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return good.substr(0, at) + to + good.substr(at + from.size());
  };
  expect("{", "manifest.json");
  expect("{}", "not the manifest of a checkpoint");
  expect(changed("\"version\": 1", "\"version\": 2"), "version 2; this program reads 1");
  expect(changed("state.safetensors", "other.safetensors"), "does not list state.safetensors");
  expect(changed("\"config.json\"",
                 "\"../config.json\": {\"bytes\": 1, \"crc32\": \"00000000\"}, \"config.json\""),
         "which is no file of it");
  expect(changed("\"crc32\": \"", "\"crc32\": \"x"), "8 hexadecimal digits");
  expect(changed("\"step\"", "\"stop\""), "does not give a step");
  fs::remove(path);
  EXPECT_NE(defect_of_checkpoint(directory).find("a version before there were manifests"),
            std::string::npos);
  write_durably(path, good);
  read(trainee, 1);
}

// The requirement: what W ranks have saved, any other number goes on with, bit for bit.
TEST_F(TrainingState, IsTheSameForEveryNumberOfRanks) {
  for (const bool moments_8bit : {true, false}) {
    const OptimizerConfig settings = optimizer_config(MasterKind::kRemainder, moments_8bit);
    Trainee alone(tiny_config(), settings);
    alone.initialise();
    for (std::int64_t step = 1; step <= 3; ++step) alone.update(step);
    write(alone, 3);
    const std::string expected = content(3);
    for (const int size : {1, 2, 3, 5, 8, 100}) {  // 100: more than some tensors have rows
      for (const bool sharded : {false, true}) {
        SCOPED_TRACE(fmt::format("{} ranks, sharded {}, 8-bit moments {}", size, sharded, moments_8bit));
        testing_comm::on_ranks(size, [&](Communicator& ranks) {
          const OptimizerShare share =
              sharded ? OptimizerShare{ranks.rank(), ranks.size()} : OptimizerShare{};
          Trainee rank(tiny_config(), settings, share);
          const TrainingPosition position = read_checkpoint(
              rank.context, ranks, checkpoint_directory(checkpoints_, 3), rank.subject());
          if (!sharded) {
            EXPECT_EQ(rank.bytes(), alone.bytes());
          }
          EXPECT_EQ(position.next_sequence, 24);
          write_checkpoint(rank.context, ranks, checkpoints_ + "-of-ranks", rank.subject(), position, 1,
                           "test");
        });
        const std::string written = checkpoints_;
        checkpoints_ += "-of-ranks";
        EXPECT_TRUE(content(3) == expected);
        EXPECT_EQ(names(), std::vector<std::string>{"step-3"});
        Trainee resumed(tiny_config(), settings);
        read(resumed, 3);
        EXPECT_EQ(resumed.bytes(), alone.bytes());
        fs::remove_all(checkpoints_);
        checkpoints_ = written;
      }
    }
    fs::remove_all(checkpoints_);
  }
}

TEST_F(TrainingState, WhenOneRankFailsNoneHasSaved) {
  const OptimizerConfig settings = optimizer_config(MasterKind::kRemainder, true);
  Trainee alone(tiny_config(), settings);
  alone.initialise();
  write(alone, 3);
  const std::string before = content(3);
  for (const int failing : {0, 2}) {
    SCOPED_TRACE(failing);
    std::vector<std::string> errors(3);
    testing_comm::on_ranks(3, [&](Communicator& ranks) {
      Trainee rank(tiny_config(), settings);
      rank.initialise();
      rank.update(1);
      // One weight short: found by this rank only.
      if (ranks.rank() == failing) rank.weights.pop_back();
      try {
        write_checkpoint(rank.context, ranks, checkpoints_, rank.subject(), {4, 32, 42, 43}, 10, "test");
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(ranks.rank())] = fmt::format("thrown: {}", error.what());
      }
    });
    EXPECT_EQ(errors[0].rfind(fmt::format("thrown: rank {}: ", failing), 0), 0u) << errors[0];
    EXPECT_EQ(errors[1], "thrown: ");
    EXPECT_EQ(errors[2], "thrown: ");
    EXPECT_EQ(names(), std::vector<std::string>{"step-3"});
    EXPECT_TRUE(content(3) == before);
  }
}

TEST_F(TrainingState, ADirectoryThatIsNotSharedIsSaidSo) {
  const OptimizerConfig settings = optimizer_config(MasterKind::kRemainder, true);
  std::vector<std::string> errors(2);
  testing_comm::on_ranks(2, [&](Communicator& ranks) {
    Trainee rank(tiny_config(), settings);
    rank.initialise();
    const std::string own = checkpoints_ + std::to_string(ranks.rank());
    try {
      write_checkpoint(rank.context, ranks, own, rank.subject(), {4, 32, 42, 43}, 10, "test");
    } catch (const Error& error) {
      errors[static_cast<std::size_t>(ranks.rank())] = error.what();
    }
  });
  EXPECT_NE(errors[0].find("rank 1: cannot open"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("a file system that their machines share"), std::string::npos) << errors[0];
  EXPECT_TRUE(fs::is_empty(checkpoints_ + "0"));
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
  write(trainee, 1);
  const std::string first = content(1);
  write(trainee, 1);
  EXPECT_EQ(content(1), first);
  EXPECT_GT(first.size(), 10000u);
}

}  // namespace
}  // namespace agoq

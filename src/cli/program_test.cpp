// The program from outside: exit statuses, one-line errors, help.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <string>

#include "core/checksum.h"
#include "core/host_memory.h"
#include "core/temporary_folder.h"

namespace {

struct Outcome {
  int status = -1;
  std::string out;
  std::string error;
};

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// `before` stands before the command: a program that runs it, or what the shell does first.
Outcome run(const std::string& arguments, const std::string& before = "") {
  std::string folder = (std::filesystem::temp_directory_path() / "agoq-program-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return {};
  const std::string command = before + std::string(AGOQ_PROGRAM) + " " + arguments + " >" + folder +
                              "/out 2>" + folder + "/error";
  const int result = std::system(command.c_str());
  Outcome outcome{WIFEXITED(result) ? WEXITSTATUS(result) : -1, read_file(folder + "/out"),
                  read_file(folder + "/error")};
  std::filesystem::remove_all(folder);
  return outcome;
}

// Exit status 2 and exactly one line "agoq: ...", which holds `text`.
void expect_bad_input(const std::string& arguments, const std::string& text) {
  SCOPED_TRACE(arguments);
  const Outcome outcome = run(arguments);
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.error.rfind("agoq: ", 0), 0u) << outcome.error;
  EXPECT_EQ(outcome.error.find('\n'), outcome.error.size() - 1) << outcome.error;
  EXPECT_NE(outcome.error.find(text), std::string::npos) << outcome.error;
}

TEST(Program, WithoutArgumentsShowsWhatANewcomerNeeds) {
  const Outcome outcome = run("");
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.error, "");
  for (const char* text : {"agoq plan ", "agoq train ", "agoq generate ", "fidelity", "info"}) {
    EXPECT_NE(outcome.out.find(text), std::string::npos) << text;
  }
}

TEST(Program, HelpAndVersionSucceed) {
  EXPECT_EQ(run("--help").status, 0);
  EXPECT_EQ(run("info --help").status, 0);
  const Outcome version = run("--version");
  EXPECT_EQ(version.status, 0);
  EXPECT_NE(version.out.find('.'), std::string::npos);
}

TEST(Program, RefusesAWrongCommandLineInOneLine) {
  expect_bad_input("inof", "unknown command 'inof'; did you mean info?");
  expect_bad_input("zzzzzzzz", "unknown command 'zzzzzzzz'; the commands are ");
  expect_bad_input("--colour", "agoq --help shows the commands");
  expect_bad_input("info --jsn", "info: ");
  expect_bad_input("info extra", "info: ");
}

TEST(Program, EchoesWhatWasWrittenAndNamesPathsItCannotUse) {
  const std::string huge = "99999999999999999999";
  expect_bad_input("generate run --tokens " + huge,
                   "--tokens: an integer of at most 64 bits was expected, '" + huge + "' was given");
  expect_bad_input("generate run --seed=-" + huge, "'-" + huge + "' was given");
  expect_bad_input("generate run --seed -1", "--seed must not be negative; -1 was given");
  expect_bad_input("generate run --tokens 1e3", "'1e3' was given");
  expect_bad_input("bench comm --timeout 3s", "--timeout: a number was expected, '3s' was given");
  expect_bad_input("generate run --temperature warm",
                   "--temperature: a number was expected, 'warm' was");
  expect_bad_input("bench kernels --tokens 9223372036854775807", "--tokens is at most 134217728");
  expect_bad_input("bench step run.toml --steps 0", "--steps is from 1 to 1000; 0 was given");
  const std::string long_name(5000, 'x');
  expect_bad_input("report " + long_name, "summary.json cannot be read: File name too long");
  expect_bad_input("train " + long_name, "cannot be read: File name too long");
  const Outcome plan =
      run("plan " + std::string(AGOQ_EXAMPLES) + "/quickstart.toml --set data.paths=" + long_name);
  EXPECT_EQ(plan.status, 0) << plan.error;
}

// Started as torchrun and srun start ranks, which cannot speak with each other yet. Whoever has come to
// it says it: the first rank of the machine may have read its input well.
TEST(Program, RanksOfAMachineSayOnceWhatIsWrong) {
  const auto expect_line = [](const std::string& ranks, const std::string& variables,
                              const std::string& config, const std::string& text) {
    SCOPED_TRACE(variables);
    const agoq::TemporaryFolder folder;
    const std::string command = "for r in " + ranks + "; do RANK=$r " + variables + " " + AGOQ_PROGRAM +
                                " train " + config + " 2>>" + folder.path("error") + " & done; wait";
    EXPECT_EQ(std::system(command.c_str()), 0);
    const std::string error = read_file(folder.path("error"));
    EXPECT_EQ(error.rfind("agoq: " + text, 0), 0u) << error;
    EXPECT_EQ(error.find('\n'), error.size() - 1) << error;
  };
  const std::string absent = "/nowhere/run.toml", no_file = absent + ": cannot be read";
  expect_line("0 1 2 3", "WORLD_SIZE=4 LOCAL_RANK=$r", absent, no_file);
  expect_line("3", "WORLD_SIZE=4 LOCAL_RANK=3", absent, no_file);
  expect_line("0 1 2 3", "WORLD_SIZE=4", std::string(AGOQ_EXAMPLES) + "/quickstart.toml",
              "RANK and WORLD_SIZE are set and LOCAL_RANK is not");
}

TEST(Program, InfoIsReadByPeopleAndByPrograms) {
  const Outcome text = run("info");
  EXPECT_EQ(text.status, 0);
  EXPECT_NE(text.out.find("oneDNN"), std::string::npos);
  const Outcome outcome = run("info --json");
  EXPECT_EQ(outcome.status, 0);
  const auto json = nlohmann::json::parse(outcome.out);
  EXPECT_GT(json.at("threads").get<int>(), 0);
  EXPECT_GT(json.at("memory_bytes").get<long long>(), 0);
  EXPECT_FALSE(json.at("libraries").at("oneDNN").get<std::string>().empty());
  EXPECT_FALSE(json.at("compiler").get<std::string>().empty());
  const bool cuda = json.at("cuda").at("available").get<bool>();
  EXPECT_FALSE(json.at("cuda").at(cuda ? "description" : "reason").get<std::string>().empty());
  // Of a build that has the backend, also where there is no GPU.
  if (json.at("cuda").contains("libraries")) {
    for (const char* library : {"cuBLASLt", "cuDNN"}) {
      const std::string version = json.at("cuda").at("libraries").at(library);
      EXPECT_FALSE(version.empty());
      EXPECT_NE(text.out.find(version), std::string::npos) << text.out;
    }
  } else {
    EXPECT_FALSE(cuda);
  }
#ifdef AGOQ_SANITIZED
  EXPECT_FALSE(json.at("memory_probe").get<bool>());
#else
  EXPECT_TRUE(json.at("memory_probe").get<bool>());
#endif
}

TEST(Program, BenchStepPrintsSpeedFloorAndShares) {
  const Outcome outcome =
      run("bench step " + std::string(AGOQ_EXAMPLES) +
          "/quickstart.toml --json --steps 2 --set train.steps=1 --set optimizer.warmup_steps=0 --set "
          "train.sequence=32 --set train.micro_batches=1 "
          "--set model.layers=1 --set model.hidden=64 --set model.heads=1 --set model.kv_heads=1");
  ASSERT_EQ(outcome.status, 0) << outcome.error;
  const nlohmann::json json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json.at("tokens_per_step"), 64);
  EXPECT_GT(json.at("tokens_per_second"), 0.0);
  EXPECT_GT(json.at("floor_seconds"), 0.0);
  EXPECT_EQ(json.at("step_seconds").size(), 2u);
  double matrix_flops = 0;
  for (const auto& operation : json.at("operations")) {
    if (operation.at("operation") == "matmul" ||
        operation.at("operation") == "accumulate_weight_gradient") {
      matrix_flops += operation.at("flops").get<double>();
    }
  }
  // Forward and twice as much backward: 6 per weight and token, the causal part of attention aside.
  const double weights = 64 * (3 * 64 + 64 + 3 * 704 + 257);
  EXPECT_EQ(matrix_flops, 6 * weights * 64);
#ifndef AGOQ_SANITIZED  // memory is not counted then
  const double predicted = json.at("peak_bytes_predicted");
  EXPECT_NEAR(json.at("peak_bytes_measured").get<double>(), predicted, 0.02 * predicted);
#endif
}

TEST(Program, BenchStepTakesNoMoreStepsThanItIsAskedFor) {
  const std::string command =
      "bench step " + std::string(AGOQ_EXAMPLES) +
      "/quickstart.toml --speed-only --steps 1 --warmup 0 --set train.sequence=32 --set "
      "train.micro_batches=1 --set model.layers=1 --set model.hidden=64 --set model.heads=1 --set "
      "model.kv_heads=1";
  const Outcome outcome = run(command + " --json");
  ASSERT_EQ(outcome.status, 0) << outcome.error;
  const nlohmann::json json = nlohmann::json::parse(outcome.out);
  EXPECT_GT(json.at("tokens_per_second"), 0.0);
  EXPECT_FALSE(json.contains("floor_seconds"));
  EXPECT_FALSE(json.contains("operations"));
  const Outcome printed = run(command);
  EXPECT_NE(printed.out.find("step, median of 1"), std::string::npos) << printed.out;
  EXPECT_EQ(printed.out.find("floor"), std::string::npos) << printed.out;
  expect_bad_input("bench comm --speed-only", "--speed-only is an option of agoq bench step, and");
}

TEST(Program, BenchKernelsPrintsBytesTimeAndShareOfTheCopy) {
  const Outcome outcome = run("bench kernels --tokens 2 --json");
  EXPECT_EQ(outcome.status, 0) << outcome.error;
  const auto json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json.at("tokens"), 2);
  const auto& operations = json.at("operations");
  ASSERT_GT(operations.size(), 10u);
  EXPECT_EQ(operations[0].at("operation"), "copy");
  EXPECT_EQ(operations[0].at("share_of_copy"), 1.0);
  for (const auto& operation : operations) {
    EXPECT_GT(operation.at("seconds").get<double>(), 0);
    EXPECT_NEAR(operation.at("bytes_per_second").get<double>() * operation.at("seconds").get<double>(),
                operation.at("bytes").get<double>(), 1);
  }
  expect_bad_input("bench steps", "'agoq bench steps' was given");
  expect_bad_input("bench step", "'agoq bench step' was given");
  expect_bad_input("bench step /nowhere.toml", "/nowhere.toml");
  expect_bad_input("bench kernels --device gpu", "--device is cpu or cuda; 'gpu' was given");
  expect_bad_input("bench kernels --tokens -1", "--tokens is at least 1");
  const std::string step = std::string("bench step ") + AGOQ_EXAMPLES + "/quickstart.toml ";
  expect_bad_input(
      step + "--device cuda",
      "--device is an option of agoq bench kernels and comm, and 'agoq bench step' was given: "
      "its device is a setting, --set run.device=cuda");
  expect_bad_input(step + "--elements 4096", "--elements is an option of agoq bench comm, and");
  expect_bad_input("bench comm --set run.device=cuda", "--set is an option of agoq bench step, and");
  expect_bad_input("bench comm --tokens 5", "--tokens is an option of agoq bench kernels, and");
  expect_bad_input("bench kernels --no-peer-copies", "--no-peer-copies is an option of agoq bench comm");
  expect_bad_input("bench comm", "and there is one: start several");
  expect_bad_input("bench comm --elements -1", "--elements is a multiple of 4096 up to");
  expect_bad_input("bench comm --repetitions 0", "--repetitions is from 1 to 1000; 0 was given");
}

/// A model that can be planned and of which no machine holds a part: should a run of it ever start, its
/// first arena of many terabytes fails.
const std::string kBeyondAnyMachine =
    "--set model.hidden=65536 --set model.layers=40 --set model.heads=512 --set model.kv_heads=512 "
    "--set model.head_size=128 --set model.feed_forward=262144";

/// A folder with text, a configuration of a run of two steps, and what runs there wrote.
class TinyRuns : public testing::Test {
 protected:
  void SetUp() override {
    for (int d = 0; d < 20; ++d) {
      std::string text;
      for (int s = 0; s < 8; ++s) text += fmt::format("document {} keeps sentence {}. ", d, s);
      folder_.write(fmt::format("text/{:02}.txt", d), text);
    }
    folder_.write("run.toml", fmt::format(R"(
[model]
hidden = 32
layers = 1
heads = 2
kv_heads = 1
head_size = 16
feed_forward = 32
segments = 1
[data]
paths = ["{0}/text"]
[train]
steps = 2
sequence = 32
micro_batch = 1
micro_batches = 1
[optimizer]
warmup_steps = 0
[run]
directory = "{0}/run"
threads = 1
)",
                                          folder_.path()));
  }

  std::string path(const std::string& name) const { return folder_.path(name); }
  std::string train(const std::string& arguments = "") const {
    return "train " + path("run.toml") + " " + arguments;
  }
  void train_once() const {
    const Outcome outcome = run(train("--json"));
    ASSERT_EQ(outcome.status, 0) << outcome.error;
  }
  /// Every file under `name` with its content.
  std::map<std::string, std::string> content(const std::string& name) const {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path(name))) {
      if (entry.is_regular_file()) files[entry.path().string()] = read_file(entry.path().string());
    }
    return files;
  }
  /// Makes the first weights of the newest checkpoint NaN: BF16 with all exponent bits set.
  /// Makes all weights NaN, in a checkpoint that is otherwise as if they had been trained to that.
  void break_weights() const {
    const std::string file = path("run/checkpoints/step-2/model.safetensors");
    std::string bytes = read_file(file);
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof header);
    for (std::size_t i = 8 + header; i < bytes.size(); ++i) bytes[i] = '\x7F' | '\x80';
    std::ofstream(file, std::ios::binary) << bytes;

    const auto checksum_of = [&](std::size_t begin, std::size_t end) {
      return fmt::format("{:08x}", agoq::checksum(bytes.data() + begin, end - begin));
    };
    const std::string manifest = path("run/checkpoints/step-2/manifest.json");
    auto listed = nlohmann::json::parse(read_file(manifest));
    auto& of_file = listed.at("files").at("model.safetensors");
    of_file.at("crc32") = checksum_of(0, bytes.size());
    const auto described = nlohmann::json::parse(bytes.substr(8, header));
    for (const auto& [name, tensor] : described.items()) {
      if (name == "__metadata__") continue;
      const auto& offsets = tensor.at("data_offsets");
      of_file.at("tensors").at(name) = checksum_of(8 + header + offsets[0].get<std::size_t>(),
                                                   8 + header + offsets[1].get<std::size_t>());
    }
    std::ofstream(manifest) << listed;
  }

  agoq::TemporaryFolder folder_;
};

TEST_F(TinyRuns, EveryCommandDoesItsWorkAndPrintsJson) {
  const auto json_of = [](const std::string& arguments) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.status, 0) << arguments << ": " << outcome.error;
    return nlohmann::json::parse(outcome.out, nullptr, false);
  };
  const auto plan = json_of("plan " + path("run.toml") + " --json");
  EXPECT_GT(plan.at("parameters"), 0);
  EXPECT_GT(plan.at("bytes").at("weights"), 0);
  EXPECT_FALSE(plan.at("layers").empty());

  const auto summary = json_of(train("--json"));
  EXPECT_EQ(summary.at("steps"), 2);
  EXPECT_EQ(summary.at("stopped"), false);
  EXPECT_EQ(summary.at("parameters"), plan.at("parameters"));
  EXPECT_GT(summary.at("validation_loss"), 0.0);
  EXPECT_EQ(summary, nlohmann::json::parse(read_file(path("run/summary.json"))));

  const auto loss = json_of("eval " + path("run") + " --json");
  EXPECT_EQ(loss.at("loss"), summary.at("validation_loss"));
  EXPECT_GT(loss.at("tokens"), 0);
  const auto other = json_of("eval " + path("run") + " --json --data " + path("text/03.txt"));
  EXPECT_EQ(other.at("tokens").get<std::size_t>(), read_file(path("text/03.txt")).size() + 1);

  const Outcome text = run("generate " + path("run") + " --prompt ab --tokens 3");
  EXPECT_EQ(text.status, 0);
  EXPECT_EQ(text.out.substr(0, 2), "ab");

  const auto report = json_of("report " + path("run") + " --json --out " + path("report.json"));
  EXPECT_EQ(report.at("run"), summary);
  EXPECT_EQ(report, nlohmann::json::parse(read_file(path("report.json"))));

  // What is stored loses less in 8 bits than in 4, and keeping everything repeats exactly on a CPU.
  const auto fidelity =
      json_of("fidelity " + path("run") +
              " --json --sequences 2 --format int8/32/fp32 --format uniform:paper-fp4");
  EXPECT_EQ(fidelity.at("sequences"), 2);
  EXPECT_EQ(fidelity.at("keep_repeated").at("whole"), 0.0);
  const auto& settings = fidelity.at("settings");
  ASSERT_EQ(settings.size(), 2u);
  EXPECT_GT(settings[0].at("gradient").at("whole"), 0.0);
  EXPECT_GT(settings[1].at("gradient").at("whole"), settings[0].at("gradient").at("whole"));
  EXPECT_GT(fidelity.at("activations").size(), 8u);
  for (const auto& tensor : fidelity.at("activations")) {
    EXPECT_GT(tensor.at("sqnr_db").at("int8/32/fp32"), tensor.at("sqnr_db").at("bnbfp4/128/fp32"));
    EXPECT_GE(tensor.at("largest_channel_over_median"), 1.0);
  }
  const Outcome table = run("fidelity " + path("run") + " --sequences 1");
  EXPECT_EQ(table.status, 0) << table.error;
  EXPECT_NE(table.out.find("uniform FP4/128"), std::string::npos);
  expect_bad_input("fidelity " + path("run") + " --sequences 100000", "the validation documents hold");
  expect_bad_input("fidelity " + path("run") + " --format keep:bf16", "uniform:FORMAT");

  EXPECT_FALSE(json_of("formats --json").empty());
  EXPECT_EQ(run("formats").status, 0);
  EXPECT_EQ(run("plan " + path("run.toml")).status, 0);
  EXPECT_EQ(run("report " + path("run")).status, 0);
}

TEST_F(TinyRuns, ARunThatCannotStartLeavesTheOldOneAsItWas) {
  train_once();
  const auto before = content("run");
  expect_bad_input(train("--overwrite --set train.sequence=10000"), "sequence");
  expect_bad_input(train("--overwrite --set run.seed=1e9"), "run.seed");
  expect_bad_input(train("--overwrite --set data.paths=/nowhere"), "/nowhere");
  const std::optional<agoq::MemoryLimit> machine = agoq::memory_limit();
#ifndef AGOQ_SANITIZED  // sanitizers take the address space for themselves
  // 1.6 GiB, which fit what the machine has free and fail when the arenas are allocated.
  if (!machine || machine->free > std::size_t{2} << 30) {
    EXPECT_EQ(run(train("--overwrite --set model.hidden=200000"), "ulimit -v 1000000; ").status, 1);
  }
#endif
  if (machine) expect_bad_input(train("--overwrite " + kBeyondAnyMachine), "are free: lower");
  expect_bad_input(train("--resume"), "raise train.steps");
  expect_bad_input(train("--resume --set train.steps=4 --set model.feed_forward=64"), "feed_forward");
  expect_bad_input(train("--resume --set train.steps=4 --set run.seed=2"), "run.seed is 1 in");
  expect_bad_input(train("--resume --set train.steps=4 --set data.seed=2"), "data.seed is 1 in");
  expect_bad_input(train(), "--overwrite");
  EXPECT_TRUE(content("run") == before);
  EXPECT_EQ(run("eval " + path("run")).status, 0);
  EXPECT_EQ(run(train("--resume --json --set train.steps=4")).status, 0);
  EXPECT_EQ(run(train("--overwrite --json")).status, 0);
}

TEST_F(TinyRuns, AResumedRunKeepsItsStreamAndItsStateAndTellsWhatElseChanged) {
  train_once();
  const auto before = content("run");
  for (const char* setting :
       {"train.sequence=16", "train.micro_batch=2", "train.micro_batches=2", "data.holdout_every=10",
        "data.holdout_index=3", "data.document_attention=false", "run.seed=7", "gradients.format=fp32",
        "optimizer.moments_8bit=false", "optimizer.master=fp32", "optimizer.beta1=0.8",
        "model.rope_theta=500"}) {
    const std::string key(setting, std::strchr(setting, '='));
    expect_bad_input(train(fmt::format("--resume --set train.steps=4 --set {}", setting)),
                     fmt::format("{} is ", key));
  }
  const std::string other = path("text/00.txt");
  expect_bad_input(train("--resume --set train.steps=4 --set data.paths=" + other),
                   fmt::format("data.paths is [\"{}\"] in {} and [\"{}\"] now", path("text"),
                               path("run/config.toml"), other));
  EXPECT_TRUE(content("run") == before);

  const Outcome resumed =
      run(train("--resume --json --set train.steps=4 --set optimizer.learning_rate=1e-4 --set "
                "activations.policy=keep --set activations.qkv=bf16 --set checkpoint.every=2"));
  EXPECT_EQ(resumed.status, 0);
  EXPECT_EQ(resumed.error,
            "changed: train.steps 2 -> 4\n"
            "changed: optimizer.learning_rate 0.0003 -> 0.0001\n"
            "changed: activations.policy \"agoq\" -> \"keep\"\n"
            "changed: activations.qkv \"policy\" -> \"bf16\"\n"
            "changed: checkpoint.every 0 -> 2\n");
  // What it was resumed with is what the next resumption is held against.
  EXPECT_EQ(run(train("--resume --json --set train.steps=5")).status, 0);
  std::filesystem::remove(path("run/config.toml"));
  expect_bad_input(train("--resume --set train.steps=6"), "config.toml is missing");
}

TEST_F(TinyRuns, SaysWhichCheckpointItSkippedAndWhy) {
  ASSERT_EQ(run(train("--json --set checkpoint.every=1")).status, 0);
  const std::string newest = path("run/checkpoints/step-2");
  std::filesystem::resize_file(newest + "/state.safetensors", 2000);
  const auto expect_notice = [&](const Outcome& outcome, const std::string& why) {
    EXPECT_EQ(outcome.status, 0) << outcome.error;
    EXPECT_EQ(outcome.error.rfind("skipped checkpoint " + newest + ": ", 0), 0u) << outcome.error;
    EXPECT_NE(outcome.error.find(why), std::string::npos) << outcome.error;
    EXPECT_NE(outcome.error.find("; " + path("run/checkpoints/step-1") + " is taken"), std::string::npos)
        << outcome.error;
    EXPECT_EQ(outcome.error.find('\n'), outcome.error.size() - 1) << outcome.error;
  };
  expect_notice(run("eval " + path("run")), "state.safetensors has 2000 bytes and was written with");
  std::filesystem::remove(newest + "/model.safetensors");
  expect_notice(run("generate --tokens 1 " + path("run")), "model.safetensors is missing");
  expect_notice(run(train("--resume --json --set checkpoint.every=1")), "model.safetensors is missing");
  EXPECT_EQ(run("eval " + path("run")).error, "") << "the resumed run wrote step 2 again";
  for (const char* step : {"step-1", "step-2"}) {
    std::filesystem::remove(path("run/checkpoints/") + step + "/config.json");
  }
  expect_bad_input("eval " + path("run"), "holds no whole checkpoint; the newest is checkpoint " +
                                              newest + ": config.json is missing");
  expect_bad_input(train("--resume"), "holds no whole checkpoint");
}

TEST_F(TinyRuns, NamesTheTensorInWhichAByteHasChanged) {
  train_once();
  const auto change_last_byte = [&](const std::string& name) {
    std::string bytes = read_file(path("run/checkpoints/step-2/" + name));
    bytes.back() = static_cast<char>(bytes.back() ^ 1);
    std::ofstream(path("run/checkpoints/step-2/" + name), std::ios::binary) << bytes;
  };
  change_last_byte("state.safetensors");
  expect_bad_input(train("--resume --set train.steps=4"),
                   "state.safetensors' is damaged: the bytes of tensor '");
  EXPECT_EQ(run("eval " + path("run")).status, 0);  // which reads the weights only
  change_last_byte("model.safetensors");
  for (const char* command : {"eval ", "generate "}) {
    expect_bad_input(command + path("run"), "model.safetensors' is damaged: the bytes of tensor '");
  }
  change_last_byte("state.safetensors");
  change_last_byte("model.safetensors");
  EXPECT_EQ(run(train("--resume --json --set train.steps=4")).status, 0);
}

TEST_F(TinyRuns, RefusesACheckpointThatWasRenamed) {
  train_once();
  std::filesystem::rename(path("run/checkpoints/step-2"), path("run/checkpoints/step-3"));
  for (const std::string& command : {"eval " + path("run"), train("--resume --set train.steps=4")}) {
    expect_bad_input(command, "step-3' holds the state after step 2: rename it to step-2");
  }
}

TEST_F(TinyRuns, LeavesAloneWhatNoRunWrote) {
  for (const char* name : {"checkpoints/best.pt", "metrics.jsonl", "summary.json", "plan.json"}) {
    const std::string project = std::string("project-") + std::to_string(std::strlen(name));
    folder_.write(project + "/" + name, "mine");
    // Also beside a configuration that a person wrote.
    for (const bool with_config : {false, true}) {
      if (with_config) folder_.write(project + "/config.toml", "[train]\nsteps = 2\n");
      const auto before = content(project);
      for (const char* how : {"", "--overwrite"}) {
        expect_bad_input(train(fmt::format("{} --set run.directory={}", how, path(project))),
                         "not agoq's to replace");
      }
      EXPECT_TRUE(content(project) == before) << name;
    }
  }
  train_once();
  folder_.write("run/checkpoints/best.pt", "mine");
  folder_.write("run/checkpoints/step-old/notes.txt", "mine");
  folder_.write("run/checkpoints/.step-old.tmp/notes.txt", "mine");
  folder_.write("run/checkpoints/.step-7.tmp/config.json", "what a crash left");
  EXPECT_EQ(run(train("--overwrite --json --set train.steps=1")).status, 0);
  EXPECT_EQ(read_file(path("run/checkpoints/best.pt")), "mine");
  EXPECT_EQ(read_file(path("run/checkpoints/step-old/notes.txt")), "mine");
  EXPECT_EQ(read_file(path("run/checkpoints/.step-old.tmp/notes.txt")), "mine");
  EXPECT_FALSE(std::filesystem::exists(path("run/checkpoints/.step-7.tmp")));
  EXPECT_FALSE(std::filesystem::exists(path("run/checkpoints/step-2")));
  EXPECT_TRUE(std::filesystem::exists(path("run/checkpoints/step-1")));
}

TEST_F(TinyRuns, OneRunAtATimeHasADirectory) {
  folder_.write("run/run.lock", "");
  const int lock = open(path("run/run.lock").c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(flock(lock, LOCK_EX | LOCK_NB), 0);
  expect_bad_input(train(), "in use by another run");
  close(lock);
  train_once();
}

TEST_F(TinyRuns, ASignalledRunStillPrintsItsSummary) {
  for (const char* before : {"timeout --preserve-status --signal=TERM 1 ",
                             // Whatever the tests are run under, nohup for instance.
                             "timeout --preserve-status --signal=HUP 1 env --default-signal=HUP "}) {
    SCOPED_TRACE(before);
    const Outcome outcome = run(train("--overwrite --json --set train.steps=1000000"), before);
    EXPECT_EQ(outcome.status, 0) << outcome.error;
    const auto json = nlohmann::json::parse(outcome.out, nullptr, false);
    ASSERT_TRUE(json.is_object()) << outcome.out;
    EXPECT_EQ(json.at("stopped"), true);
    EXPECT_LT(json.at("steps"), 1000000);
    EXPECT_TRUE(std::filesystem::exists(
        path(fmt::format("run/checkpoints/step-{}", json.at("steps").get<int>()))));
  }
}

TEST_F(TinyRuns, IsFoundByItsName) {
  // The program starts itself again where these are not set.
  const std::string command = fmt::format(
      "env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT {} {} >{} 2>&1 & "
      "for i in $(seq 200); do sleep 0.1; [ -s {} ] && break; done; "
      "cat /proc/$!/comm >{}; kill $!; wait",
      AGOQ_PROGRAM, train("--set train.steps=1000000"), path("out"), path("run/metrics.jsonl"),
      path("name"));
  ASSERT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(read_file(path("name")), std::filesystem::path(AGOQ_PROGRAM).filename().string() + "\n");
}

TEST_F(TinyRuns, GoesOnAfterAHangupUnderNohup) {
  const auto start = std::chrono::steady_clock::now();
  const Outcome outcome =
      run(train("--json --set train.steps=1000000"),
          "timeout --preserve-status --signal=TERM 2 timeout --preserve-status --signal=HUP 1 "
          "env --ignore-signal=HUP ");
  EXPECT_EQ(outcome.status, 0) << outcome.error;
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(1900));
}

TEST_F(TinyRuns, SavesAndStopsWhenNobodyReadsItsOutput) {
  const std::string command =
      fmt::format("bash -c '{} {} 2>{} | head -n 1 >{}; exit ${{PIPESTATUS[0]}}'", AGOQ_PROGRAM,
                  train("--set train.steps=1000000"), path("error"), path("out"));
  const int result = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(result));
  EXPECT_EQ(WEXITSTATUS(result), 1);
  EXPECT_NE(read_file(path("out")).find("step 1/1000000"), std::string::npos);
  const std::string error = read_file(path("error"));
  const std::string start =
      "agoq: stdout cannot be written (Broken pipe): stopped with a checkpoint after step ";
  ASSERT_EQ(error.rfind(start, 0), 0u) << error;
  EXPECT_EQ(error.find('\n'), error.size() - 1) << error;
  const int step = std::stoi(error.substr(start.size()));
  EXPECT_TRUE(std::filesystem::exists(path(fmt::format("run/checkpoints/step-{}", step))));
  const Outcome resumed = run(
      fmt::format("train {} --resume --json --set train.steps={}", path("run/config.toml"), step + 1));
  EXPECT_EQ(resumed.status, 0) << resumed.error;
}

// The CUDA backend is a module, and what keeps the loader from opening it is told in one line.
TEST_F(TinyRuns, TellsWhyTheCudaBackendCannotBeOpened) {
  folder_.write("text.so", "no library");
  const auto expect_line = [&](const std::string& module, const std::vector<std::string>& parts) {
    SCOPED_TRACE(module);
    for (const char* command : {"train", "plan"}) {
      const Outcome outcome = run(fmt::format("{} {} --set run.device=cuda", command, path("run.toml")),
                                  "AGOQ_CUDA_MODULE=" + module + " ");
      EXPECT_EQ(outcome.status, 2);
      EXPECT_EQ(outcome.out, "");
      EXPECT_EQ(outcome.error.rfind("agoq: ", 0), 0u) << outcome.error;
      EXPECT_EQ(outcome.error.find('\n'), outcome.error.size() - 1) << outcome.error;
      for (const std::string& part : parts) {
        EXPECT_NE(outcome.error.find(part), std::string::npos) << outcome.error;
      }
    }
    EXPECT_FALSE(std::filesystem::exists(path("run")));
  };
  expect_line(AGOQ_MODULE_WITHOUT_LIBRARY,
              {"needs libcublasLt.so.99, which the loader does not find", "libraries of CUDA 99",
               "LD_LIBRARY_PATH", "run.device=cpu"});
  expect_line(path("nowhere.so"), {path("nowhere.so"), "No such file", "AGOQ_CUDA_MODULE"});
  expect_line(path("text.so"), {path("text.so"), "build it again"});
  expect_line("libm.so.6", {"libm.so.6 is not agoq's CUDA backend", "AGOQ_CUDA_MODULE"});
}

// For a GPU that is not at hand, with the memory that is given: needs the CUDA backend, and no GPU.
TEST_F(TinyRuns, PlansForAGpuOfSoMuchMemory) {
  const std::string plan = "plan " + path("run.toml") + " ";
  expect_bad_input(plan + "--set run.device=cuda --memory 80GB",
                   "--memory is a number of bytes, as 85899345920 or 80GiB; '80GB' was given");
  expect_bad_input(plan + "--set run.device=cuda --memory 0", "'0' was given");
  const std::string cuda = plan + "--set run.device=cuda ";
  if (const Outcome outcome = run(cuda); outcome.status != 0) GTEST_SKIP() << outcome.error;
  const Outcome fits = run(cuda + "--memory 80GiB");
  EXPECT_EQ(fits.status, 0) << fits.error;
  EXPECT_NE(fits.out.find("\nCUDA context, beside it "), std::string::npos) << fits.out;
  EXPECT_NE(fits.out.find(" of a GPU of 80.0 GiB, where 79.5 GiB of 80.0 GiB are free.\n"),
            std::string::npos)
      << fits.out;
  const Outcome lacks = run(cuda + "--memory 530MiB");
  EXPECT_EQ(lacks.status, 0) << lacks.error;
  EXPECT_NE(lacks.out.find("\nThe run would take "), std::string::npos) << lacks.out;
  EXPECT_NE(lacks.out.find(fmt::format(" bytes of a GPU of 530 MiB, where {} of {} are free: lower "
                                       "train.micro_batch",
                                       3 << 20, 530 << 20)),
            std::string::npos)
      << lacks.out;
  const auto json = nlohmann::json::parse(run(cuda + "--memory 555745280 --json").out, nullptr, false);
  EXPECT_EQ(json.at("device").at("free_bytes"), 3 << 20);
  EXPECT_EQ(json.at("fits"), false);
  EXPECT_TRUE(json.at("fewest_recomputed_layers").is_null());
}

// More than any machine has: the run is refused before it takes any of it.
TEST_F(TinyRuns, RefusesWhatTheMachineHasNoRoomFor) {
  if (!agoq::memory_limit()) GTEST_SKIP() << "the kernel does not say what is free";
  for (const std::string& command :
       {train(kBeyondAnyMachine), "bench step " + path("run.toml") + " " + kBeyondAnyMachine}) {
    expect_bad_input(
        command,
        "are free: lower train.micro_batch, train.sequence or model.layers, or run on a GPU "
        "(--set run.device=cuda)");
  }
  EXPECT_FALSE(std::filesystem::exists(path("run")));
  const std::string plan = "plan " + path("run.toml");
  Outcome outcome = run(plan + " " + kBeyondAnyMachine);
  EXPECT_EQ(outcome.status, 0) << outcome.error;
  EXPECT_NE(outcome.out.find("\nThe run would take "), std::string::npos) << outcome.out;
  outcome = run(plan + " --memory 1.5GiB");
  EXPECT_NE(outcome.out.find(" of a machine of 1.50 GiB, where 1.50 GiB of 1.50 GiB are free.\n"),
            std::string::npos)
      << outcome.out;
  outcome = run(plan + " --set parallel.ranks=4");
  EXPECT_NE(outcome.out.find("\nOne rank fits: it takes "), std::string::npos) << outcome.out;
  EXPECT_NE(outcome.out.find(" are free; all ranks of a machine share these.\n"), std::string::npos)
      << outcome.out;
}

// The same line, whichever command is to work on the run.
TEST_F(TinyRuns, TellsWhereNoRunIs) {
  for (const char* command : {"eval", "generate", "fidelity"}) {
    for (const char* device : {"", " --device cpu"}) {
      expect_bad_input(
          fmt::format("{} {}{}", command, path("none"), device),
          fmt::format("{0} holds no run: start one with agoq train CONFIG --set run.directory={0}",
                      path("none")));
    }
  }
}

// What the GPU's attention does not serve is a setting that can be changed.
TEST_F(TinyRuns, RefusesAHeadSizeThatTheGpuDoesNotServe) {
  const std::string cuda = "plan " + path("run.toml") + " --set run.device=cuda ";
  if (const Outcome outcome = run(cuda); outcome.status != 0) GTEST_SKIP() << outcome.error;
  for (const int size : {12, 264}) {
    expect_bad_input(
        cuda + fmt::format("--set model.head_size={}", size),
        fmt::format("on the GPU model.head_size is a multiple of 8 up to 256 and is {}: choose another, "
                    "or run on the CPU (--set run.device=cpu)",
                    size));
  }
}

/// Metrics without the timings.
std::string losses(const std::string& metrics) {
  return std::regex_replace(metrics, std::regex(R"re(,"seconds":[^,]*,"tokens_per_second":[0-9.]*)re"),
                            "");
}

/// Why the program cannot train on this device here; empty where it can.
std::string unusable(const std::string& device) {
  if (device == "cpu") return "";
  const auto cuda = nlohmann::json::parse(run("info --json").out).at("cuda");
  return cuda.at("available").get<bool>() ? "" : cuda.at("reason").get<std::string>();
}

class TinyRunsOn : public TinyRuns, public testing::WithParamInterface<const char*> {};

// Each part in a process of its own: what the first one chose by timing is forgotten in the second.
TEST_P(TinyRunsOn, ADeterministicRunThatIsStoppedAndResumedHasTheBitsOfOneThatIsNot) {
  const std::string reason = unusable(GetParam());
  if (!reason.empty()) GTEST_SKIP() << reason;
  // On a GPU as large as it takes for several algorithms to be worth timing.
  std::string common = fmt::format(
      "--json --set run.device={} --set run.deterministic=true --set train.steps=6 "
      "--set checkpoint.every=3 --set train.micro_batches=2",
      GetParam());
  if (GetParam() == std::string("cuda")) {
    common +=
        " --set model.hidden=1024 --set model.layers=2 --set model.heads=16 --set model.kv_heads=4 "
        "--set "
        "model.head_size=64 --set model.feed_forward=2816 --set train.sequence=512 --set "
        "train.micro_batch=2";
    // As much text as sequences of this length take.
    for (int d = 0; d < 20; ++d) {
      std::string text;
      for (int s = 0; s < 400; ++s) text += fmt::format("document {} keeps sentence {}. ", d, s);
      folder_.write(fmt::format("text/{:02}.txt", d), text);
    }
  }
  const auto run_in = [&](const std::string& name, const std::string& how) {
    const Outcome outcome = run(train(common + " --set run.directory=" + path(name) + how));
    ASSERT_EQ(outcome.status, 0) << outcome.error;
  };
  run_in("whole", "");
  run_in("parts", "");
  // As if it had been killed between the two checkpoints.
  std::filesystem::remove_all(path("parts/checkpoints/step-6"));
  std::filesystem::remove(path("parts/summary.json"));
  run_in("parts", " --resume");
  for (const char* file : {"model.safetensors", "state.safetensors"}) {
    for (const char* step : {"step-3", "step-6"}) {
      const std::string name = fmt::format("/checkpoints/{}/{}", step, file);
      EXPECT_TRUE(read_file(path("whole" + name)) == read_file(path("parts" + name))) << name;
      EXPECT_FALSE(read_file(path("whole" + name)).empty()) << name;
    }
  }
  EXPECT_EQ(losses(read_file(path("whole/metrics.jsonl"))),
            losses(read_file(path("parts/metrics.jsonl"))));
}

INSTANTIATE_TEST_SUITE_P(Devices, TinyRunsOn, testing::Values("cpu", "cuda"),
                         [](const auto& device) { return std::string(device.param); });

TEST_F(TinyRuns, WeightsThatAreNotFiniteFailEvalAndGenerate) {
  train_once();
  break_weights();
  for (const char* command : {"eval ", "eval --json ", "generate ", "fidelity "}) {
    const Outcome outcome = run(command + path("run"));
    EXPECT_EQ(outcome.status, 1) << command;
    EXPECT_EQ(outcome.out, "") << command;
    EXPECT_NE(outcome.error.find("NaN or infinity"), std::string::npos) << outcome.error;
    EXPECT_EQ(outcome.error.find('\n'), outcome.error.size() - 1) << outcome.error;
  }
}

TEST_F(TinyRuns, RefusesWhatCannotBeMeant) {
  train_once();
  expect_bad_input("report " + path("run") + " --out /dev/full", "not a regular file");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/full"));
  expect_bad_input("report " + path("run") + " --out " + path("text"), "it exists and is a folder");
  folder_.write("empty.txt", "");
  expect_bad_input("eval " + path("run") + " --data " + path("empty.txt"), "empty.txt is empty");
  for (const char* option : {"--data", "--device"}) {
    expect_bad_input("eval " + path("run") + " " + option + " ''", "an empty value was given");
  }
  expect_bad_input("report " + path("run") + " --out ''", "an empty value was given");
  expect_bad_input(train("--set run.directory=\xFF-x"), "must be text in UTF-8");
  expect_bad_input("plan " + path("run.toml") + " --set model.hidden=9007199254740992",
                   "more than the 4e+12 that can be planned");
}

TEST_F(TinyRuns, TellsWhatThePlanLeavesOut) {
  folder_.write("bare.toml", "[train]\nsequence = 8\n");
  const Outcome bare = run("plan " + path("bare.toml"));
  EXPECT_EQ(bare.status, 0);
  EXPECT_NE(bare.out.find("data.paths is empty: the text is not counted."), std::string::npos);
  EXPECT_EQ(bare.out.find("()"), std::string::npos);
}

// A shell that closes streams: no error can be shown, and none may end in an abort or in a file.
TEST_F(TinyRuns, ClosedStreamsFailTheRunAndSpoilNoFile) {
  const auto status_of = [&](const std::string& arguments, const char* closed) {
    const int result = std::system((std::string(AGOQ_PROGRAM) + " " + arguments + closed).c_str());
    return WIFEXITED(result) ? WEXITSTATUS(result) : -1;
  };
  EXPECT_EQ(status_of(train(), " <&- >&- 2>&-"), 1);
  for (const auto& [name, text] : content("run")) {
    EXPECT_EQ(("\n" + text).find("\nagoq"), std::string::npos) << name << ": " << text;
  }
  EXPECT_EQ(status_of("--help", " >&- 2>&-"), 1);
  EXPECT_EQ(status_of("", " >&- 2>&-"), 1);
  EXPECT_EQ(status_of("info", " >&- 2>&-"), 1);
  EXPECT_EQ(status_of("train /nowhere.toml", " >&- 2>&-"), 2);
}

// The shell's limit, in blocks of 512 bytes: the configuration fits, a checkpoint does not.
TEST_F(TinyRuns, SaysWhenAFileGrowsBeyondWhatIsAllowed) {
  const Outcome outcome = run(train("--json"), "ulimit -f 16; ");
  EXPECT_EQ(outcome.status, 1);
  EXPECT_NE(outcome.error.find("File too large"), std::string::npos) << outcome.error;
  EXPECT_EQ(outcome.error.find("agoq: "), outcome.error.rfind("agoq: ")) << outcome.error;
}

TEST(Program, FailsWhenItsOutputCannotBeWritten) {
  const std::string command = std::string(AGOQ_PROGRAM) + " info >/dev/full 2>/dev/null";
  const int result = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(result));
  EXPECT_EQ(WEXITSTATUS(result), 1);
}

}  // namespace

// The program from outside: exit statuses, one-line errors, help.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

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

Outcome run(const std::string& arguments) {
  std::string folder = (std::filesystem::temp_directory_path() / "agoq-program-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return {};
  const std::string command =
      std::string(AGOQ_PROGRAM) + " " + arguments + " >" + folder + "/out 2>" + folder + "/error";
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
  for (const char* text : {"agoq plan ", "agoq train ", "agoq generate ", "info"}) {
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
#ifdef AGOQ_SANITIZED
  EXPECT_FALSE(json.at("memory_probe").get<bool>());
#else
  EXPECT_TRUE(json.at("memory_probe").get<bool>());
#endif
}

TEST(Program, BenchStepPrintsSpeedFloorAndShares) {
  const Outcome outcome =
      run("bench step " + std::string(AGOQ_EXAMPLES) +
          "/quickstart.toml --json --steps 2 --set train.sequence=32 --set train.micro_batches=1 "
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
}

TEST(Program, FailsWhenItsOutputCannotBeWritten) {
  const std::string command = std::string(AGOQ_PROGRAM) + " info >/dev/full 2>/dev/null";
  const int result = std::system(command.c_str());
  ASSERT_TRUE(WIFEXITED(result));
  EXPECT_EQ(WEXITSTATUS(result), 1);
}

}  // namespace

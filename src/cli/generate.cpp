// agoq generate: text from a trained model.
#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "cli/command.h"
#include "cli/device_option.h"
#include "train/inference.h"

namespace agoq {

Action declare_generate(Arguments& arguments) {
  struct Given {
    std::string run;
    Generation generation;
    std::int64_t seed = 1;
    std::optional<std::string> device;
  };
  const auto given = std::make_shared<Given>();
  arguments.positional("RUN", given->run, "Run directory");
  arguments.option("--prompt", "TEXT", given->generation.prompt, "What the text begins with");
  arguments.option("--tokens", "N", given->generation.tokens, "Tokens to generate at most");
  arguments.option("--temperature", "T", given->generation.temperature,
                   "0: always the most likely token");
  arguments.option("--seed", "N", given->seed, "The same seed gives the same text");
  arguments.option("--device", "NAME", given->device, kDeviceOptionHelp);
  return [given](ProcessRanks&) {
    check_input(given->generation.tokens >= 0, "--tokens must not be negative; {} was given",
                given->generation.tokens);
    check_input(given->seed >= 0, "--seed must not be negative; {} was given", given->seed);
    given->generation.seed = static_cast<std::uint64_t>(given->seed);
    const std::unique_ptr<Inference> inference =
        Inference::load(given->run, backend_for_run(given->run, given->device), 1);
    fmt::print("{}", given->generation.prompt);
    generate(*inference, given->generation, [](char byte) {
      std::fputc(byte, stdout);
      std::fflush(stdout);
    });
    std::fputc('\n', stdout);
  };
}

}  // namespace agoq

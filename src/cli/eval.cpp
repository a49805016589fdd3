// agoq eval: the loss of a trained model on text.
#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <numbers>

#include "checkpoint/json_text.h"
#include "cli/command.h"
#include "cli/device_option.h"
#include "cli/table.h"
#include "train/inference.h"
#include "train/run_directory.h"
#include "train/validation.h"

namespace agoq {
namespace {

struct EvalArguments {
  std::string run;
  std::optional<std::string> data;
  std::optional<std::string> device;
  bool json = false;
};

void evaluate(const EvalArguments& arguments) {
  const RunConfig run = RunDirectory(arguments.run, RunStart::kResume).config();
  DataConfig source = run.data;
  if (arguments.data) source.paths = {*arguments.data};
  const Dataset data = Dataset::load(source, arguments.data ? DataUse::kEvaluation : DataUse::kTraining);
  const std::unique_ptr<Inference> inference = Inference::load(
      arguments.run, backend_for_run(arguments.run, arguments.device), run.run.micro_batch);
  HostBatch batch;
  const ValidationResult result = validate(*inference, data, inference->config(), 0, batch);
  const double bits = result.loss / std::numbers::ln2;
  if (arguments.json) {
    nlohmann::ordered_json json;
    json["run"] = arguments.run;
    json["data"] = source.paths;
    json["tokens"] = result.tokens;
    json["loss"] = result.loss;
    json["perplexity"] = std::exp(result.loss);
    json["bits_per_token"] = bits;
    fmt::print("{}\n", to_text(json));
    return;
  }
  Table table({{}, {"", Align::kRight}});
  table.add_row({"tokens", std::to_string(result.tokens)});
  table.add_row({"loss (nats/token)", fmt::format("{:.4f}", result.loss)});
  table.add_row({"perplexity", fmt::format("{:.3f}", std::exp(result.loss))});
  table.add_row({"bits/token", fmt::format("{:.4f}", bits)});
  fmt::print("{}", table.to_string());
}

}  // namespace

Action declare_eval(Arguments& arguments) {
  const auto given = std::make_shared<EvalArguments>();
  arguments.positional("RUN", given->run, "Run directory");
  arguments.option("--data", "PATH", given->data,
                   "A text file or folder, all of it; default: the run's validation documents");
  arguments.option("--device", "NAME", given->device, kDeviceOptionHelp);
  arguments.flag("--json", given->json, "Print JSON");
  return [given](ProcessRanks&) { evaluate(*given); };
}

}  // namespace agoq

// agoq bench: how fast this machine runs what the engine is made of.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "backend/kernel_benchmark.h"
#include "checkpoint/json_text.h"
#include "cli/build_info.h"
#include "cli/command.h"
#include "cli/device_option.h"
#include "cli/table.h"
#include "core/quantity.h"

namespace agoq {
namespace {

// What a GPU is measured at; a CPU takes minutes for it.
constexpr std::int64_t kDeviceTokens = 16384, kHostTokens = 256;

struct BenchArguments {
  std::string what;
  std::string device = "cpu";
  std::int64_t tokens = 0;
  bool json = false;
};

double share_of_copy(const KernelTime& kernel, const KernelTime& copy) {
  return kernel.bytes_per_second() / copy.bytes_per_second();
}

void print_table(const Backend& backend, const KernelSizes& sizes,
                 const std::vector<KernelTime>& times) {
  Table table({{"operation"},
               {"bytes", Align::kRight},
               {"us", Align::kRight},
               {"GB/s", Align::kRight},
               {"of copy", Align::kRight},
               {"operands"}});
  for (const KernelTime& kernel : times) {
    table.add_row({kernel.name, format_bytes(kernel.bytes), fmt::format("{:.1f}", 1e6 * kernel.seconds),
                   fmt::format("{:.1f}", 1e-9 * kernel.bytes_per_second()),
                   fmt::format("{:.1f} %", 100 * share_of_copy(kernel, times.front())),
                   kernel.operands});
  }
  fmt::print(
      "{}\n{}, {} tokens, sizes of LLaMA3-8B. Each byte is counted once per read and once per write;\n"
      "times are medians. The copy is the ceiling.\n",
      table.to_string(), backend.description(), format_count(sizes.tokens));
}

void print_json(const Backend& backend, const KernelSizes& sizes, const std::vector<KernelTime>& times) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const KernelTime& kernel : times) {
    nlohmann::ordered_json entry;
    entry["operation"] = kernel.name;
    entry["operands"] = kernel.operands;
    entry["bytes"] = kernel.bytes;
    entry["seconds"] = kernel.seconds;
    entry["bytes_per_second"] = kernel.bytes_per_second();
    entry["share_of_copy"] = share_of_copy(kernel, times.front());
    list.push_back(std::move(entry));
  }
  nlohmann::ordered_json json;
  json["commit"] = build_info().commit;
  json["backend"] = backend.description();
  json["tokens"] = sizes.tokens;
  json["operations"] = std::move(list);
  fmt::print("{}\n", to_text(json));
}

void run_bench(const BenchArguments& arguments) {
  check_input(arguments.what == "kernels", "bench kernels is what there is; 'bench {}' was given",
              arguments.what);
  const bool cuda = arguments.device == "cuda";
  check_input(arguments.tokens >= 0, "--tokens is at least 1; {} was given", arguments.tokens);
  Backend& backend = backend_named(arguments.device);
  KernelSizes sizes;
  sizes.tokens = arguments.tokens != 0 ? arguments.tokens : cuda ? kDeviceTokens : kHostTokens;
  // With few tokens the embedding's rows would take most of the time to draw and are not touched.
  sizes.vocabulary = std::min(sizes.vocabulary, 8 * sizes.tokens);
  const std::vector<KernelTime> times = measure_kernels(backend, sizes);
  if (arguments.json) {
    print_json(backend, sizes, times);
  } else {
    print_table(backend, sizes, times);
  }
}

}  // namespace

Action declare_bench(Arguments& arguments) {
  const auto given = std::make_shared<BenchArguments>();
  arguments.positional("what", given->what,
                       "kernels: every memory-bound operation against a plain copy, at the sizes of "
                       "LLaMA3-8B");
  arguments.option("--device", "DEVICE", given->device, "cpu or cuda");
  arguments.option("--tokens", "N", given->tokens, "tokens; default: 16,384 on cuda, 256 on cpu");
  arguments.flag("--json", given->json, "print JSON");
  return [given] { run_bench(*given); };
}

}  // namespace agoq

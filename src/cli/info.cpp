// agoq info: the program, its libraries, and the machine it runs on.
#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "checkpoint/json_text.h"
#include "cli/build_info.h"
#include "cli/command.h"
#include "cli/table.h"
#include "core/host_memory.h"
#include "core/quantity.h"
#include "train/memory_probe.h"

namespace agoq {
namespace {

// The text after "name:" in a file of /proc, without leading blanks; empty when it is not there.
std::string proc_field(const char* path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name, 0) != 0) continue;
    const std::size_t colon = line.find(':');
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::int64_t machine_memory() {
  return static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
}

// 0 where it is not known.
std::int64_t available_memory() {
  return static_cast<std::int64_t>(host_memory().value_or(HostMemory{}).available);
}

struct Cuda {
  bool available = false;
  std::string text;  // the GPU, or why there is none
  std::vector<BackendLibrary> libraries;
};

Cuda find_cuda() {
  Cuda cuda;
  try {
    Backend& backend = cuda_backend();
    cuda.libraries = backend.found_libraries();  // plans read them without a GPU
    cuda.text = backend.description();
    cuda.available = true;
  } catch (const Error& error) {
    cuda.text = error.what();
  }
  return cuda;
}

void print_info() {
  const BuildInfo& build = build_info();
  Table table({{}, {}});
  table.add_row({"agoq", build.version});
  if (!build.commit.empty()) table.add_row({"commit", build.commit});
  table.add_row({"compiler", fmt::format("{}, {}", build.compiler, build.build_type)});
  table.add_row({"backend", cpu_backend().description()});
  const Cuda cuda = find_cuda();
  table.add_row({"", cuda.available ? cuda.text : "cuda: no: " + cuda.text});
  for (const auto& [name, version] : cuda.libraries) table.add_row({name, version});
  table.add_row({"processor", fmt::format("{}, {} threads", proc_field("/proc/cpuinfo", "model name"),
                                          std::thread::hardware_concurrency())});
  table.add_row({"memory", fmt::format("{}, {} available", format_bytes(machine_memory()),
                                       format_bytes(available_memory()))});
  table.add_row(
      {"memory probe", memory_probe_available() ? "malloc and mmap are counted" : "not in this build"});
  for (const auto& [name, version] : build.libraries) table.add_row({name, version});
  fmt::print("{}", table.to_string());
}

void print_info_json() {
  const BuildInfo& build = build_info();
  nlohmann::ordered_json json;
  json["version"] = build.version;
  json["commit"] = build.commit;
  json["compiler"] = build.compiler;
  json["build_type"] = build.build_type;
  json["backend"] = cpu_backend().description();
  const Cuda cuda = find_cuda();
  json["cuda"]["available"] = cuda.available;
  json["cuda"][cuda.available ? "description" : "reason"] = cuda.text;
  for (const auto& [name, version] : cuda.libraries) json["cuda"]["libraries"][name] = version;
  json["processor"] = proc_field("/proc/cpuinfo", "model name");
  json["threads"] = omp_get_max_threads();
  json["memory_bytes"] = machine_memory();
  json["available_memory_bytes"] = available_memory();
  json["memory_probe"] = memory_probe_available();
  for (const auto& [name, version] : build.libraries) json["libraries"][name] = version;
  fmt::print("{}\n", to_text(json));
}

}  // namespace

Action declare_info(Arguments& arguments) {
  const auto json = std::make_shared<bool>(false);
  arguments.flag("--json", *json, "Print JSON");
  return [json](ProcessRanks&) { *json ? print_info_json() : print_info(); };
}

}  // namespace agoq

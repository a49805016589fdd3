#include "cli/device_option.h"

#include "train/run_directory.h"

namespace agoq {

BackendKind device_named(const std::string& device) {
  check_input(device == "cpu" || device == "cuda", "--device is cpu or cuda; '{}' was given", device);
  return device == "cuda" ? BackendKind::kCuda : BackendKind::kCpu;
}

Backend& backend_named(const std::string& device) { return backend_of(device_named(device)); }

Backend& backend_for_run(const std::string& directory, const std::optional<std::string>& device) {
  if (!device) {
    return backend_of(RunDirectory(directory, RunStart::kResume).config().run.device);
  }
  return backend_named(*device);
}

}  // namespace agoq

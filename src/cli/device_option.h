// The option --device of commands that work on a finished run.
#pragma once

#include <optional>
#include <string>

#include "backend/backend.h"

namespace agoq {

inline constexpr const char* kDeviceOptionHelp = "cpu or cuda; default: where the run was trained";

/// The device that `device` names, and its backend. Throw Error (kInput) for names other than cpu and
/// cuda.
BackendKind device_named(const std::string& device);
Backend& backend_named(const std::string& device);

/// The backend that `device` names; without it the one that the run in `directory` was trained
/// with. Throws Error (kInput) for other names.
Backend& backend_for_run(const std::string& directory, const std::optional<std::string>& device);

}  // namespace agoq

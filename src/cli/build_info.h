// What this program was built from and with; build_info.cpp is generated (cmake/BuildInfo.cmake).
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace agoq {

struct BuildInfo {
  std::string version;   // "0.1.0"
  std::string commit;    // of git, "+" behind it when files were changed; empty without git
  std::string compiler;  // "GNU 12.2.0"
  std::string build_type;
  std::vector<std::pair<std::string, std::string>> libraries;  // name, version
};

const BuildInfo& build_info();

}  // namespace agoq

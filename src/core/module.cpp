#include "core/module.h"

#include <cstdlib>
#include <filesystem>

namespace agoq {

std::string module_path(const char* file, const char* variable, const char* built) {
  if (const char* given = std::getenv(variable); given != nullptr && *given != '\0') return given;
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    const std::filesystem::path beside = program.parent_path() / file;
    if (std::filesystem::exists(beside, error)) return beside.string();
  }
  return built;
}

}  // namespace agoq

#include "core/module.h"

#include <dlfcn.h>

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

void* open_module(const std::string& path, bool lends_symbols, std::string& problem) {
  void* const module = dlopen(path.c_str(), RTLD_NOW | (lends_symbols ? RTLD_GLOBAL : RTLD_LOCAL));
  if (module == nullptr) {
    const char* const words = dlerror();
    problem = words == nullptr ? "no reason given" : words;
  }
  return module;
}

void* function_of_module(void* module, const char* name) { return dlsym(module, name); }

}  // namespace agoq

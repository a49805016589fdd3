// Modules: parts of the program that live in shared objects of their own, so that the libraries behind
// them (CUDA, NCCL, MPI) weigh on no run that does not use them and one that is missing gets a message.
#pragma once

#include <string>

#include "core/error.h"

namespace agoq {

/// Where the module `file` is: the path that the environment variable `variable` holds, or beside the
/// program, or `built`, where the build put it; empty if there is none of these.
std::string module_path(const char* file, const char* variable, const char* built);

/// Opens the module at `path` to the end of the process: what it returns may have static storage. With
/// `lends_symbols` libraries that are opened later find its own. Null when it cannot be opened: then
/// `problem` is the loader's text.
void* open_module(const std::string& path, bool lends_symbols, std::string& problem);

/// The function `name` of an open module; null if it has none.
void* function_of_module(void* module, const char* name);

/// What the module's function `entry`, which takes nothing, returns a pointer to. Throws Error (kInput)
/// naming path, `what` and `variable` where the module has no such function.
template <typename Object>
Object& object_of_module(void* module, const char* entry, const std::string& path, const char* what,
                         const char* variable) {
  const auto function = reinterpret_cast<Object* (*)()>(function_of_module(module, entry));
  check_input(function != nullptr, "{} is not agoq's {}: build it again (./dev build), or correct {}",
              path, what, variable);
  return *function();
}

}  // namespace agoq

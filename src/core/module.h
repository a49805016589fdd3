// Modules: parts of the program that live in shared objects of their own, so that the libraries behind
// them (CUDA, NCCL, MPI) weigh on no run that does not use them and one that is missing gets a message.
#pragma once

#include <string>

namespace agoq {

/// Where the module `file` is: the path that the environment variable `variable` holds, or beside the
/// program, or `built`, where the build put it; empty if there is none of these.
std::string module_path(const char* file, const char* variable, const char* built);

}  // namespace agoq

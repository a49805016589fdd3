// Opens the transports' modules.
#include "comm/transports.h"

#include <dlfcn.h>

#include "core/error.h"
#include "core/module.h"

namespace agoq {
namespace {

#ifdef AGOQ_MPI_MODULE
constexpr const char* kMpiModule = AGOQ_MPI_MODULE;
#else
constexpr const char* kMpiModule = "";
#endif
#ifdef AGOQ_NCCL_MODULE
constexpr const char* kNcclModule = AGOQ_NCCL_MODULE;
#else
constexpr const char* kNcclModule = "";
#endif

/// What `entry` of the module returns. The module stays open to the end of the process.
template <typename Transport>
Transport& open(const std::string& path, const char* entry, const char* library, const char* missing) {
  check_input(!path.empty(), "this build of agoq has no {}: {}", library, missing);
  // MPI loads plug-ins of its own, which look for its symbols.
  void* const module = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (module == nullptr) {
    const char* const words = dlerror();
    fail_input("{} cannot be opened ({}): {}", path, words == nullptr ? "no reason given" : words,
               missing);
  }
  using Entry = Transport* (*)();
  const auto function = reinterpret_cast<Entry>(dlsym(module, entry));
  check_input(function != nullptr, "{} is not agoq's module for {}: build it again (./dev build)", path,
              library);
  return *function();
}

}  // namespace

MpiTransport& mpi_transport() {
  static MpiTransport& transport = open<MpiTransport>(
      module_path("libagoq_mpi.so", "AGOQ_MPI_MODULE", kMpiModule), "agoq_mpi_transport", "MPI",
      "install Open MPI (Debian: libopenmpi-dev openmpi-bin) and build again (./dev build)");
  return transport;
}

NcclTransport& nccl_transport() {
  static NcclTransport& transport = open<NcclTransport>(
      module_path("libagoq_nccl.so", "AGOQ_NCCL_MODULE", kNcclModule), "agoq_nccl_transport", "NCCL",
      "install NCCL 2.18 or newer (it comes with PyTorch as nvidia-nccl-cu13, or from "
      "developer.nvidia.com/nccl) and build again (./dev build)");
  return transport;
}

}  // namespace agoq

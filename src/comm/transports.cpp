// Opens the transports' modules.
#include "comm/transports.h"

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

template <typename Transport>
Transport& open(const char* file, const char* variable, const char* built, const char* entry,
                const char* library, const char* missing) {
  const std::string path = module_path(file, variable, built);
  check_input(!path.empty(), "this build of agoq has no {}: {}", library, missing);
  std::string problem;
  // MPI loads plug-ins of its own, which look for its symbols.
  void* const module = open_module(path, /*lends_symbols=*/true, problem);
  check_input(module != nullptr, "{} cannot be opened ({}): {}", path, problem, missing);
  return object_of_module<Transport>(module, entry, path, fmt::format("module for {}", library).c_str(),
                                     variable);
}

bool mpi_opened = false;

}  // namespace

bool mpi_is_open() { return mpi_opened; }

MpiTransport& mpi_transport() {
  static MpiTransport& transport = open<MpiTransport>(
      "libagoq_mpi.so", "AGOQ_MPI_MODULE", kMpiModule, "agoq_mpi_transport", "MPI",
      "install Open MPI (Debian: libopenmpi-dev openmpi-bin) and build again (./dev build)");
  mpi_opened = true;
  return transport;
}

NcclTransport& nccl_transport() {
  static NcclTransport& transport = open<NcclTransport>(
      "libagoq_nccl.so", "AGOQ_NCCL_MODULE", kNcclModule, "agoq_nccl_transport", "NCCL",
      "install NCCL 2.18 or newer (it comes with PyTorch as nvidia-nccl-cu13, or from "
      "developer.nvidia.com/nccl) and build again (./dev build)");
  return transport;
}

}  // namespace agoq

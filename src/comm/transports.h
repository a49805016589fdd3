// The transports, modules beside the program: libagoq_mpi.so and libagoq_nccl.so.
#pragma once

#include <array>
#include <cstddef>
#include <memory>

#include "backend/backend.h"
#include "comm/communicator.h"

namespace agoq {

class MpiTransport {
 public:
  virtual ~MpiTransport() = default;
  /// Initialises MPI at the first call. All ranks that the launcher started; collective.
  virtual std::unique_ptr<Communicator> world(double timeout_seconds) = 0;
  /// Ends MPI, where it was initialised: at the regular end of a process, collective. A process that
  /// fails ends without it, and the launcher ends the others.
  virtual void leave() = 0;
};

/// Bytes of an ncclUniqueId.
using NcclId = std::array<std::byte, 128>;

struct NcclOptions {
  double timeout_seconds = 60;  // of one operation
  int max_ctas = 0;         // thread blocks of one of NCCL's kernels at most; 0: as many as it chooses
  bool peer_copies = true;  // exchanges by the copy engines where all GPUs reach each other
};

class NcclTransport {
 public:
  virtual ~NcclTransport() = default;
  virtual NcclId new_id() = 0;
  /// The group of `size` ranks that got the same id; on the GPU that `backend` computes on. Collective.
  virtual std::unique_ptr<Communicator> join(const NcclId& id, int rank, int size, Backend& backend,
                                             const NcclOptions& options) = 0;
};

/// Open the module at the first call. Throw Error (kInput) where the build has none or a library that it
/// needs is missing.
MpiTransport& mpi_transport();
/// Whether mpi_transport() has been there: what MPI takes to start is then in this process's memory.
bool mpi_is_open();
NcclTransport& nccl_transport();

}  // namespace agoq

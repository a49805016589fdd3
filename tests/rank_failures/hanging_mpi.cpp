// libagoq_mpi.so, but that a call of MPI's never returns: AGOQ_TEST_HANG="MPI_Iallgather 2" is the
// second of that name.
#include <mpi.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <string>

namespace {

void come_to(const std::string& call) {
  static std::map<std::string, int> calls;
  const char* const last = std::getenv("AGOQ_TEST_HANG");
  if (last != nullptr && last == call + " " + std::to_string(++calls[call])) {
    for (;;) ::pause();
  }
}

}  // namespace

#define MPI_Iallgather(...) (come_to("MPI_Iallgather"), MPI_Iallgather(__VA_ARGS__))
#define MPI_Comm_dup(...) (come_to("MPI_Comm_dup"), MPI_Comm_dup(__VA_ARGS__))
#define MPI_Finalize() (come_to("MPI_Finalize"), MPI_Finalize())
// Compiled anew, with these calls.
#include "comm/mpi/mpi_transport.cpp"  // NOLINT(bugprone-suspicious-include)

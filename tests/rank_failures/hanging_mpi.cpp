// libagoq_mpi.so, but that a call of MPI's never returns, and the file AGOQ_TEST_HANGS says when it has
// come: AGOQ_TEST_HANG="MPI_Iallgather 2" is the second of that name, "MPI_Iallgather" with
// AGOQ_TEST_HANG_WHEN=PATH the first behind which PATH exists.
#include <fcntl.h>
#include <mpi.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <string>

namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

void come_to(const std::string& call) {
  static std::map<std::string, int> calls;
  const std::string numbered = call + " " + std::to_string(++calls[call]);
  const std::string last = variable("AGOQ_TEST_HANG"), when = variable("AGOQ_TEST_HANG_WHEN");
  if (last != (when.empty() ? numbered : call)) return;
  if (!when.empty() && ::access(when.c_str(), F_OK) != 0) return;
  ::close(::open(variable("AGOQ_TEST_HANGS").c_str(), O_WRONLY | O_CREAT, 0666));
  for (;;) ::pause();
}

}  // namespace

#define MPI_Iallgather(...) (come_to("MPI_Iallgather"), MPI_Iallgather(__VA_ARGS__))
#define MPI_Isend(...) (come_to("MPI_Isend"), MPI_Isend(__VA_ARGS__))
#define MPI_Comm_dup(...) (come_to("MPI_Comm_dup"), MPI_Comm_dup(__VA_ARGS__))
#define MPI_Finalize() (come_to("MPI_Finalize"), MPI_Finalize())
// Compiled anew, with these calls.
#include "comm/mpi/mpi_transport.cpp"  // NOLINT(bugprone-suspicious-include)

// The ranks that run this program's tests together, one process each, started by mpirun; one rank where
// nothing started several. Every rank runs the same tests in the same order, so that a test may call
// collective operations.
//
// A test looks at its own rank's results with EXPECT and ASSERT. A rank on which one has failed may have
// left operations out that the others wait for, so the first test that fails is the last (main.cpp).
#pragma once

#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/context.h"
#include "comm/communicator.h"

namespace agoq {

/// All ranks.
Communicator& ranks();
/// The CPU's, or with AGOQ_TEST_DEVICE=cuda in the environment the GPU's in deterministic mode: then all
/// data that ranks exchange lie in GPU memory and go through NCCL. Several ranks may share one GPU where
/// each has an NCCL_HOSTID of its own (docs/ranks.md).
Backend& rank_backend();
BackendKind rank_device();
/// With 64 MiB of workspace.
const Context& rank_context();

/// What lies in the backend's memory.
std::string bytes_of(const std::byte* memory, std::size_t bytes);
inline std::string bytes_of(const Tensor& x) { return bytes_of(x.data, x.bytes()); }
template <typename Element>
void upload(const std::vector<Element>& values, const Tensor& x) {
  rank_backend().upload(rank_context(), values.data(), x.data, x.bytes());
}

}  // namespace agoq

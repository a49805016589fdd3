// The ranks that run this program's tests together, one process each, started by mpirun; one rank where
// nothing started several. Every rank runs the same tests in the same order, so that a test may call
// collective operations.
//
// A test looks at its own rank's results with EXPECT and ASSERT. A rank on which one has failed may have
// left operations out that the others wait for, so the first test that fails is the last (main.cpp).
#pragma once

#include "backend/context.h"
#include "comm/communicator.h"

namespace agoq {

/// All ranks.
Communicator& ranks();
/// Of the CPU backend, with 64 MiB of workspace.
const Context& rank_context();

}  // namespace agoq

// Stream: the queue on which a backend runs its operations. On the CPU operations run at once and
// the handle is null; on CUDA it is a cudaStream_t, which a host framework may lend.
#pragma once

namespace agoq {

struct Stream {
  void* handle = nullptr;
};

}  // namespace agoq

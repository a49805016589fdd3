// PeerCopies: messages between GPUs of one machine by their copy engines, which leave the
// multiprocessors to the backward pass beside them. A rank maps the others' memory (CUDA IPC) and writes
// into it.
//
// One exchange, for a rank that receives and one that sends:
//
//   receiver                              sender
//   host:   offers the address and size   host:   takes the offers, in order, as destinations
//           of every message
//   stream: ready -> the sender's flag    stream: waits for its flag; copies; sent -> the receiver's
//   flag stream: waits for its flag
//
// Offers go through memory that the hosts share, flags are words of GPU memory that the streams write
// and wait for. Hosts meet at every exchange; the GPUs do where their streams come to it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "backend/backend.h"
#include "comm/communicator.h"
#include "comm/shared_host_memory.h"

namespace agoq {

class PeerCopies {
 public:
  /// For the ranks of `ranks`, each with the GPU that is current; null on all of them unless every one
  /// can write into the memory of every other. Keeps `shared`. Collective.
  static std::unique_ptr<PeerCopies> connect(Communicator& ranks, Backend& backend,
                                             SharedHostMemory& shared);
  ~PeerCopies();
  PeerCopies(const PeerCopies&) = delete;
  PeerCopies& operator=(const PeerCopies&) = delete;

  /// Communicator::exchange, queued on `stream`; memory of the backend's allocator. look_after(peer,
  /// seconds) is called again and again while this host waits for that of `peer`, and may throw.
  void exchange(cudaStream_t stream, std::span<const Message> sends, std::span<const Message> receives,
                const std::function<void(int peer, double seconds)>& look_after);

  /// Ends every wait that is queued, so that the streams can be given up.
  void release();
  /// Gives the others' memory back, before they free it: no exchange comes after it.
  void unmap();

 private:
  struct State;
  explicit PeerCopies(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace agoq

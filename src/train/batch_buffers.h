// BatchBuffers: backend memory for the tokens of one micro-batch, filled from host arrays.
#pragma once

#include "backend/backend.h"
#include "data/dataset.h"
#include "model/batch.h"

namespace agoq {

class BatchBuffers {
 public:
  /// For micro-batches of `tokens` tokens in sequences of `sequence`.
  BatchBuffers(Arena& arena, std::int64_t tokens, std::int64_t sequence);

  /// Copies `host` into the buffers; the Batch is valid until the next upload.
  Batch upload(const Context&, const HostBatch& host);

 private:
  Batch batch_;
};

/// A micro-batch of `sequences` sequences, each one document of weight 1, for measuring arenas and for
/// filling in: its token ids are 0.
HostBatch shape_only_batch(std::int64_t sequences, std::int64_t sequence);

}  // namespace agoq

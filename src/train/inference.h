// A trained model read back from a run directory: its loss on text, and text from it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "data/dataset.h"
#include "model/transformer.h"
#include "train/batch_buffers.h"
#include "train/run_arenas.h"
#include "train/run_config.h"

namespace agoq {

/// A model in memory for forward passes over micro-batches of `sequences` sequences.
class Inference {
 public:
  /// Weights of the newest checkpoint of `directory`. Throws Error (kInput) if there is none.
  static std::unique_ptr<Inference> load(const std::string& directory, Backend& backend,
                                         std::int64_t sequences);

  const RunConfig& config() const { return config_; }
  /// Sum of weighted token losses.
  double evaluate(const HostBatch& batch);
  /// Logits, V of them, of the token after the first `length` tokens of a one-sequence batch. Throws
  /// Error (kFailure) when one is not finite.
  void next_token_logits(const HostBatch& batch, std::int64_t length, std::vector<float>& logits);

 private:
  Inference(const RunConfig& config, Backend& backend, std::int64_t sequences);
  /// Lays the model out in `arenas`, measuring ones or those of the measured size.
  struct Parts {
    Parts(const RunConfig& config, Backend& backend, RunArenas& arenas, std::int64_t sequences);
    Transformer model;
    ActivationStore store;  // keeps nothing
    BatchBuffers buffers;
    Tensor token_loss;
    Tensor total;   // fp64 [1]
    Tensor logits;  // [1, V]
  };
  static BytesPerClass measure(const RunConfig& config, Backend& backend, std::int64_t sequences);

  RunConfig config_;
  Backend& backend_;
  RunArenas arenas_;
  Context context_;
  Parts parts_;
};

struct Generation {
  std::string prompt;
  std::int64_t tokens = 256;  // at most; an end of document ends it earlier
  double temperature = 0.8;   // 0: the most likely token
  std::uint64_t seed = 1;
};

/// Samples tokens and passes the text on as it comes, byte by byte. Each token is predicted from at
/// most the last sequence-length - 1 bytes.
void generate(Inference& inference, const Generation& generation,
              const std::function<void(char byte)>& emit);

}  // namespace agoq

// Dataset: documents of token ids, split into training and validation by document, and the order in
// which training walks through them.
//
// The built-in vocabulary is bytes: ids 0-255, and id 256 ends a document. Documents are shuffled
// once per epoch by a counter-based key, concatenated, and cut into sequences of `sequence` tokens;
// a sequence's targets are its tokens shifted by one, so sequence i covers stream positions
// [i * sequence, (i + 1) * sequence] and the last position is the next one's first.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/random.h"

namespace agoq {

inline constexpr std::int32_t kEndOfDocument = 256;
inline constexpr std::int64_t kByteVocabulary = 257;

struct DataConfig {
  /// Text files, or folders that are searched for files ending in one of `extensions`.
  std::vector<std::string> paths;
  std::vector<std::string> extensions{".txt", ".md", ".pod"};
  /// Document d is held out for validation when d % holdout_every == holdout_index; documents are in
  /// order of their path.
  std::int64_t holdout_every = 20;
  std::int64_t holdout_index = 7;
  /// Tokens attend within their document only; false: across the whole sequence.
  bool document_attention = true;

  bool operator==(const DataConfig&) const = default;
};

enum class Split : std::uint8_t { kTraining, kValidation };

/// Host arrays of one micro-batch; the layout of model/batch.h.
struct HostBatch {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> targets;
  std::vector<float> weights;
  std::vector<std::int32_t> positions;
  std::vector<std::int32_t> document_starts;  // cumulative; at most N + 1 entries used
  std::int64_t document_count = 0;
  std::int64_t longest_document = 0;
  std::int64_t valid_tokens = 0;  // targets of weight > 0
};

class Dataset {
 public:
  /// Reads all documents. Throws Error (kInput): no documents, an unreadable file, an empty split.
  static Dataset load(const DataConfig& config);

  std::int64_t documents(Split split) const;
  /// Tokens of one pass, document ends included.
  std::int64_t tokens(Split split) const;
  /// Bytes of host memory that the text takes (for the memory plan).
  std::size_t bytes() const;

  /// Sequences of `sequence` tokens in one pass: training drops the rest of a pass; validation
  /// covers every token, its last sequence padded with weight 0.
  std::int64_t sequences(Split split, std::int64_t sequence) const;
  /// Fills `batch` with `count` sequences from number `first` of the endless training stream, or of
  /// the one validation pass (past its end: weight 0). Does not allocate once `batch` has its size.
  void fill(Split split, std::uint64_t seed, std::int64_t first, std::int64_t count,
            std::int64_t sequence, HostBatch& batch) const;

  /// Cross-entropy in nats per token, on the validation documents, of an order-1 byte model counted
  /// on the training documents (add-one smoothing over the 257 symbols): the bar any model must beat.
  double order1_loss() const;
};

}  // namespace agoq

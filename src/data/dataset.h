// Dataset: documents of token ids, split into training and validation by document, and the order in
// which training walks through them.
//
// The built-in vocabulary is bytes: ids 0-255, and id 256 stands at the border of two documents. The
// stream of a pass is, document after document, the border token and then the document's bytes; what
// follows a document's last byte is the next border token. So every token has a target in its own
// document: the border predicts the first byte, and the last byte predicts the border. Documents are
// shuffled once per epoch by a counter-based key, and the stream is cut into sequences of `sequence`
// tokens. Training takes the sequences of an epoch not one after another but spread over the stream
// (`spread`): neighbours come from one document, and a step made of them would learn from that alone.
//
// A position counts from the start of the document (document attention) or of the sequence, whichever
// came last; every sequence starts a new entry of document_starts.
//
// The text is held once, as bytes; tokens exist only in the batch that fill() writes.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/random.h"

namespace agoq {

inline constexpr std::int32_t kDocumentBorder = 256;
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
  /// Of the order in which an epoch walks its documents. Apart from run.seed, so that runs that differ
  /// in their weights see the same batches.
  std::uint64_t seed = 1;

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

/// What documents are read for: training and validation, or evaluation of all of them.
enum class DataUse : std::uint8_t { kTraining, kEvaluation };

class Dataset {
 public:
  /// Reads all documents; empty files are none. Throws Error (kInput): a path that does not exist, a
  /// folder without a file of the extensions, an unreadable file, an empty split. For kEvaluation every
  /// document is a validation document.
  static Dataset load(const DataConfig& config, DataUse use = DataUse::kTraining);

  std::int64_t documents(Split split) const;
  /// Tokens of one pass, borders included.
  std::int64_t tokens(Split split) const;
  /// "12 documents of 3456 bytes with the CRC-32 0123abcd": equal for equal documents in the same order.
  std::string fingerprint() const;
  /// Bytes of host memory that the text and its order take (for the memory plan).
  std::size_t bytes() const;

  /// Sequences of `sequence` tokens in one pass: training drops the rest of a pass; validation
  /// covers every token, its last sequence padded with weight 0.
  std::int64_t sequences(Split split, std::int64_t sequence) const;
  /// The place in the epoch's stream of training sequence `number`: a permutation of [0, per_epoch).
  static std::int64_t spread(std::int64_t number, std::int64_t per_epoch);
  /// Fills `batch` with `count` sequences from number `first` of the endless training stream, or of
  /// the one validation pass (past its end: weight 0). Does not allocate once `batch` has its size.
  /// Any `first` costs a search among the documents, and a shuffle of them when the epoch changes.
  /// Throws Error (kInput) when training text is shorter than a sequence. Safe to call concurrently.
  void fill(Split split, std::uint64_t seed, std::int64_t first, std::int64_t count,
            std::int64_t sequence, HostBatch& batch) const;

  /// Cross-entropy in nats per token, on the validation documents, of an order-1 byte model counted
  /// on the training documents (add-one smoothing over the 257 symbols): the bar any model must beat.
  double order1_loss() const;

 private:
  struct Document {
    std::int64_t begin;   // in text_
    std::int64_t length;  // bytes, the border token not included
  };
  // The documents of a pass in the order in which it walks them.
  struct Order {
    std::vector<std::int32_t> documents;  // indices into the split's documents
    std::vector<std::int64_t> starts;     // stream position of each, and the end of the pass
  };
  // The order of the epoch that was asked for last: one, whatever the number of epochs.
  struct Epoch {
    std::mutex mutex;
    bool shuffled = false;
    std::uint64_t seed = 0;
    std::int64_t number = 0;
    Order order;
  };

  Dataset() = default;
  const std::vector<Document>& documents_of(Split split) const {
    return split == Split::kTraining ? training_ : validation_;
  }
  static void set_starts(const std::vector<Document>& documents, Order& order);
  void shuffle(std::uint64_t seed, std::int64_t number) const;
  void fill_sequence(const std::vector<Document>& documents, const Order& order, std::int64_t position,
                     std::int64_t sequence, std::int64_t at, HostBatch& batch) const;

  bool document_attention_ = true;
  std::vector<char> text_;
  std::vector<Document> training_;
  std::vector<Document> validation_;
  Order validation_order_;
  std::unique_ptr<Epoch> epoch_;  // mutable through the pointer, guarded by its mutex
};

}  // namespace agoq

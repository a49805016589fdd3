// Checkpoints of a training run: all that a step reads and writes, as bytes, so that a resumed run
// continues bit for bit.
//
// Layout, under a run's checkpoints/ directory:
//   step-N/config.json          the model, readable by transformers (checkpoint/hugging_face.h)
//   step-N/model.safetensors    weights, each in its own element type
//   step-N/state.safetensors    per parameter <name>.master (F32, or the I16 remainder) where there is
//                               one, and the planes <name>.{first,second}_moment.{codes,bits,scales,
//                               super} as U8 [rows, bytes per row]; in __metadata__ step, next_sequence,
//                               seed, data_seed, formats and grids
//   step-N/manifest.json        sizes and checksums of the others (checkpoint/manifest.h)
// Main gradients are zero between steps and are not stored.
//
// Ranks. Tensors are stored whole, and the files are the same bytes for every number of ranks, whether
// they hold the optimizer's state whole or each a share of its rows. Rank r of W writes rows
// own_rows(rows, W, r) of every tensor, at their place in the file; it reads the weights and the rows
// that its optimizer holds. So what W ranks have saved, any other number goes on with.
//
// Invariant: a directory named step-N is whole. It is written as .step-N.tmp, every file synced by all
// who wrote it, and renamed when all ranks have succeeded; a removed one is renamed back first. What a
// crash leaves behind bears a name that no reader looks at, and the next writer removes it.
//
// Damage. defect_of_checkpoint finds files that are missing or have not their size. read_checkpoint and
// verify_weights compare the checksums of all bytes of the files that they read, before anything is
// overwritten.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "backend/context.h"
#include "checkpoint/hugging_face.h"
#include "comm/communicator.h"
#include "core/tensor.h"
#include "gradients/parameter.h"
#include "model/model_config.h"
#include "optim/adamw.h"

namespace agoq {

/// Where a run stands.
struct TrainingPosition {
  std::int64_t step = 0;           // updates done
  std::int64_t next_sequence = 0;  // number of the next sequence of the training stream (data/dataset.h)
  std::uint64_t seed = 0;          // of weights and rounding
  std::uint64_t data_seed = 0;     // of the order of documents
};

/// What a checkpoint is made from and read into.
struct TrainingSubject {
  const HuggingFaceConfig& config;
  const std::vector<Parameter>& parameters;
  const std::vector<Tensor>& weights;
  const AdamW& optimizer;
  /// Of the main gradients: not stored, but a resumed run with another one would not be the same run.
  QuantFormat gradient_format;
};

/// The directory of a checkpoint: `checkpoints`/step-N.
std::string checkpoint_directory(const std::string& checkpoints, std::int64_t step);
/// Why `directory` is no whole checkpoint: a file is missing, cut short or not what it should be; empty
/// if it is one. Headers and sizes are held against the manifest, tensors are not read.
std::string defect_of_checkpoint(const std::string& directory);
/// The steps of all whole checkpoints in `checkpoints`, ascending; empty if the directory is absent.
std::vector<std::int64_t> checkpoint_steps(const std::string& checkpoints);
/// The last of them. Each later one that is not whole is named, with its defect, in a text in `skipped`.
std::optional<std::int64_t> latest_checkpoint(const std::string& checkpoints,
                                              std::vector<std::string>& skipped);
std::optional<std::int64_t> latest_checkpoint(const std::string& checkpoints);
/// Removes all checkpoints, whole or not, and then `checkpoints` itself if nothing else is in it.
void remove_checkpoints(const std::string& checkpoints);
/// Removes what crashes left in `checkpoints`.
void remove_unfinished_checkpoints(const std::string& checkpoints);

/// Writes `checkpoints`/step-N for position.step, taking the place of one that is there, and then
/// removes all but the last `keep` checkpoints (keep >= 1). `version` names the program that writes.
/// Collective: the directory is one that all ranks see; weights and position are the same on all, and
/// the optimizer holds the whole state or the rows of the rank's slot. When a rank fails, all throw, and
/// nothing is published. Throws Error (kInput) if there is one of a later step: `latest` would lead a
/// resumed run astray. A run that does not resume should look for checkpoints before it starts.
void write_checkpoint(const Context&, Communicator& ranks, const std::string& checkpoints,
                      const TrainingSubject& subject, const TrainingPosition& position,
                      std::int64_t keep, const std::string& version);

/// Where the run of a checkpoint stood, without reading its state. Throws Error (kInput), as
/// read_checkpoint does, if `directory` is named after another step.
TrainingPosition read_training_position(const std::string& directory);

/// Fills weights, masters and moments from a checkpoint of any number of ranks. Collective. Throws Error
/// (kInput) on all ranks, before anything is overwritten, if model, formats or grids are not those of
/// the subject, or bytes are not those that were written; it says what differs.
TrainingPosition read_checkpoint(const Context&, Communicator& ranks, const std::string& directory,
                                 const TrainingSubject& subject);

/// Compares the bytes of config.json and model.safetensors with the manifest. Throws Error (kInput).
void verify_weights(const std::string& directory);

}  // namespace agoq

// The mean loss over the validation documents.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>

#include "data/dataset.h"
#include "train/trainer.h"

namespace agoq {

struct ValidationResult {
  double loss = 0;  // nats per valid token
  std::int64_t tokens = 0;
};

/// Over the first `batches` micro-batches of the validation pass, or all of it if 0, shared out among
/// `ranks`. Evaluator has `double evaluate(const HostBatch&)`: the sum of weighted token losses. Nothing
/// when is_stopped(), which all ranks ask together before each of their micro-batches, says so: the same
/// to all, since one that went on would be waited for until it is late. Collective.
template <typename Evaluator, typename IsStopped>
std::optional<ValidationResult> validate(Evaluator& evaluator, Communicator& ranks, const Dataset& data,
                                         const RunConfig& config, std::int64_t batches, HostBatch& batch,
                                         IsStopped is_stopped) {
  const std::int64_t per_batch = config.run.micro_batch;
  const std::int64_t sequences = data.sequences(Split::kValidation, config.run.sequence);
  const std::int64_t all = (sequences + per_batch - 1) / per_batch;
  const std::int64_t count = batches == 0 ? all : std::min(batches, all);
  struct OfRank {
    double sum = 0;
    std::int64_t tokens = 0;
  };
  OfRank own;
  for (std::int64_t first = 0; first < count; first += ranks.size()) {
    if (is_stopped()) return std::nullopt;
    const std::int64_t b = first + ranks.rank();
    if (b >= count) continue;
    data.fill(Split::kValidation, config.data.seed, b * per_batch, per_batch, config.run.sequence,
              batch);
    own.sum += evaluator.evaluate(batch);
    own.tokens += batch.valid_tokens;
  }
  ValidationResult result;
  double sum = 0;
  for (const OfRank& of : ranks.gather_values(own)) {
    sum += of.sum;
    result.tokens += of.tokens;
  }
  check_input(result.tokens > 0, "the validation documents hold no target: add text");
  result.loss = sum / static_cast<double>(result.tokens);
  check(std::isfinite(result.loss),
        "the loss is {}, so the model's weights hold NaN or infinity: go back to an earlier checkpoint",
        result.loss);
  return result;
}

template <typename Evaluator>
ValidationResult validate(Evaluator& evaluator, const Dataset& data, const RunConfig& config,
                          std::int64_t batches, HostBatch& batch) {
  const std::unique_ptr<Communicator> alone = single_rank();
  return *validate(evaluator, *alone, data, config, batches, batch, [] { return false; });
}

}  // namespace agoq

#include "train/nonfinite_steps.h"

#include <nlohmann/json.hpp>

#include "comm/together.h"
#include "train/rank_counts.h"

namespace agoq {

std::optional<StepReport> NonFiniteSteps::finish_step(std::int64_t first_sequence, HostBatch& batch) {
  std::string refused;
  try {
    StepReport report = trainer_.finish_step();
    in_a_row_ = 0;
    return report;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kNotFinite) throw;
    refused = error.what();
  }
  const std::string where = origin(first_sequence, batch);
  if (config_.run.nonfinite == NonFiniteAction::kStop) {
    throw Error(ErrorKind::kNotFinite,
                fmt::format("{}; {}: lower optimizer.learning_rate, look at the data, or let such steps "
                            "be skipped with run.nonfinite = skip",
                            refused, where));
  }
  ++skipped_;
  ++in_a_row_;
  if (in_a_row_ >= config_.run.nonfinite_limit) {
    throw Error(ErrorKind::kNotFinite,
                fmt::format("{}; {}: {} steps in a row were not finite, as many as "
                            "run.nonfinite_limit allows: lower optimizer.learning_rate, look at the "
                            "data, or go back to an earlier checkpoint",
                            refused, where, in_a_row_));
  }
  note_ = fmt::format("{}; {}: skipped, {} in a row", refused, where, in_a_row_);
  metrics_line_ =
      fmt::format(R"({{"step":{},"skipped":true,"reason":{},"skipped_in_a_row":{}}})",
                  trainer_.step() + 1, nlohmann::json(refused + "; " + where).dump(), in_a_row_) +
      "\n";
  trainer_.skip_step();
  return std::nullopt;
}

std::string NonFiniteSteps::origin(std::int64_t first_sequence, HostBatch& batch) {
  std::string found;
  for (std::int64_t i = 0; i < trainer_.own_micro_batches() && found.empty(); ++i) {
    const std::int64_t m = trainer_.micro_batch_number(i);
    data_.fill(Split::kTraining, config_.data.seed, first_sequence + m * config_.run.micro_batch,
               config_.run.micro_batch, config_.run.sequence, batch);
    if (const std::optional<std::string> first = trainer_.first_not_finite(batch)) {
      found = fmt::format("the first tensor with NaN or Inf is {}, in micro-batch {}", *first, m + 1);
    }
  }
  const Patience patience(trainer_.ranks());  // one may look through all of its micro-batches
  const std::vector<std::string> of_ranks = trainer_.ranks().gather_texts(found);
  for (std::size_t r = 0; r < of_ranks.size(); ++r) {
    if (!of_ranks[r].empty()) return of_ranks[r] + of_rank(trainer_.ranks(), static_cast<int>(r));
  }
  return "the forward pass is finite, so it arose going backward";
}

}  // namespace agoq

// What the tensors of all ranks counted in a step (quant/quant_counters.h).
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "comm/communicator.h"

namespace agoq {

struct RankCounts {
  int rank = 0;
  std::string name;
  QuantCounts counts;
  bool is_gradient = false;
};

/// What every rank counted, in rank order. The first `activations` of `counted` are of activations, the
/// rest of gradients. Collective; texts go from rank to rank only in steps in which a rank counted
/// something.
std::vector<RankCounts> gather_counts(Communicator& ranks, const std::vector<NamedCounts>& counted,
                                      std::size_t activations);

/// One entry per name, in the order in which names first appear.
std::vector<NamedCounts> sum_over_ranks(const std::vector<RankCounts>& counted);

/// " on rank 2", nothing for a rank that is alone.
std::string of_rank(const Communicator& ranks, int rank);

}  // namespace agoq

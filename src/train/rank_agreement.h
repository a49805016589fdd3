// What the ranks of a run must have in common, compared before anything is written: libraries, settings,
// data, and a run directory that all of them see. That they are the same program is known already
// (comm/greeting.h).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "backend/context.h"
#include "comm/communicator.h"
#include "data/dataset.h"
#include "gradients/parameter.h"
#include "train/run_config.h"
#include "train/run_directory.h"

namespace agoq {

/// Name and value, as text, of something that has to be equal on all ranks.
using RankFact = std::pair<std::string, std::string>;

/// Threads may differ: no result depends on them.
std::vector<RankFact> facts_of_run(const Communicator& ranks, const RunConfig& config, RunStart start);
std::vector<RankFact> facts_of_data(const Dataset& data);

/// A checksum of the bytes of each weight: what every rank updates, or is sent, has to stay the same on
/// all. Waits for the device; through kTransferBytes of host memory.
std::vector<RankFact> facts_of_weights(const Context&, const std::vector<Parameter>& parameters,
                                       const std::vector<Tensor>& weights);

/// Compares the facts with rank 0's. Collective. Throws AgreedError (kInput, comm/together.h) when one
/// differs, with the first that does, both values, the ranks and what to do.
void expect_agreement(Communicator& ranks, const std::vector<RankFact>& facts,
                      const std::string& advice =
                          "start all of them with the same program, configuration "
                          "and data");

/// Collective; `directory` exists on rank 0. Throws AgreedError (kInput) naming the ranks that do not
/// see what rank 0 writes there. Leaves the directory as it was.
void expect_shared(Communicator& ranks, const std::string& directory);

}  // namespace agoq

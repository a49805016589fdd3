// Finished runs side by side.
#pragma once

#include <string>
#include <vector>

#include "train/training_run.h"

namespace agoq {

struct NamedSummary {
  std::string name;  // the run directory
  RunSummary summary;
};

/// A column per run; from the second on, figures stand beside their ratio to the first run's.
std::string summary_table(const std::vector<NamedSummary>& runs);

}  // namespace agoq

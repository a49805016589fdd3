// The table of what each operation of the backend took.
#pragma once

#include <string>
#include <vector>

#include "backend/profiled_backend.h"

namespace agoq {

/// One line per operation, the longest first: calls, time, share of all, TFLOP/s and GB/s.
std::string operation_table(const std::vector<OperationProfile>& operations);

}  // namespace agoq

// agoq formats: the format table, with what each format costs and loses.
#pragma once

#include "cli/command.h"

namespace agoq {

/// Prints bits per element (scales included), relative L2 error and SQNR on 2^20 samples of N(0,1) and
/// Student-t4 for every code at its usual blocks and every named format; as JSON on request.
void run_formats(bool json);

Action declare_formats(Arguments&);

}  // namespace agoq

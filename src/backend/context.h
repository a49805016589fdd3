// Context: what every operation and layer is given first. There are no globals.
#pragma once

#include "core/memory.h"
#include "core/random.h"
#include "core/stream.h"

namespace agoq {

class Backend;

struct Context {
  Backend& backend;
  Stream stream;
  /// Scratch in stack order. Operations and layers open an Arena::Scope on it.
  Arena& workspace;
  /// Seed, step and micro-batch; purpose and tensor are filled in where a number is drawn.
  RandomKey random;
};

}  // namespace agoq

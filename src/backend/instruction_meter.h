// What a GPU's instruction bound is a time by: how many multiprocessors it has and how fast they ran
// while something was measured. A GPU at its power limit runs below its highest clock, so the clock is
// taken from the multiprocessors' own counters over the same launches.
#pragma once

#include "core/stream.h"

namespace agoq {

class InstructionMeter {
 public:
  virtual ~InstructionMeter() = default;

  virtual int multiprocessors() const = 0;
  virtual int capability() const = 0;  // 10 * major + minor

  /// Cycles per second of the median multiprocessor from the work queued before start to that queued
  /// before stop, which waits for it.
  virtual void start(const Stream& stream) = 0;
  virtual double stop(const Stream& stream) = 0;

  /// Between the two a profiler that was told to wait for it looks on (ncu --profile-from-start off).
  virtual void begin_profile() = 0;
  virtual void end_profile() = 0;
};

/// That of the GPU of cuda_backend(), and opened with it.
InstructionMeter& cuda_instruction_meter();

}  // namespace agoq

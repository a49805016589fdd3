// How fast ranks reduce gradients: QuanGrad's paths beside the library's, on the ranks at hand.
//
// Every rank draws its gradients, normal numbers, from its own key. A variant's result is compared with
// the FP32 sum over all ranks, part by part, before its time counts: a collective that loses data fails
// instead of looking fast. Times are device times from when all ranks are ready to when this rank's
// stream is done, the longest over the ranks; the quantisation of the local gradients is no part of
// them, since accumulation leaves them quantised.
//
//   wire bytes       what a rank sends: counted for exchanges; as a ring sends them, 2 (W - 1) / W n for
//                    the library's all-reduce of n bytes over W ranks and half of that for its
//                    reduce-scatter
//   bus bandwidth    wire bytes / time
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "comm/communicator.h"

namespace agoq {

enum class CommunicationVariant : std::uint8_t {
  kExchange,  // plain bytes to the next rank: the speed of the link
  kQuanGrad,  // all-reduce of e4m3/128/fp32
  kSharded,   // ZeRO-1: exchange, pieces into place, norm pass
  kFp32,      // the library's all-reduce
  kBf16,
  kNaiveFp8,           // one scale, sums rounded to FP8, on QuanGrad's exchange
  kFp32ReduceScatter,  // the library's
};
std::string_view name_of(CommunicationVariant variant);
/// What `variant` stands in for and is held against: kFp32 or kFp32ReduceScatter.
CommunicationVariant control_of(CommunicationVariant variant);

struct CommunicationTime {
  CommunicationVariant variant = CommunicationVariant::kExchange;
  std::int64_t elements = 0;
  double seconds = 0;  // median
  std::int64_t wire_bytes = 0;
  double relative_error = 0;  // of the result, in L2: the largest of any part
  double bus_bytes_per_second() const { return static_cast<double>(wire_bytes) / seconds; }
};

struct CommunicationBenchmarkOptions {
  int repetitions = 10;  // timed; each of several calls where these are short
  std::int64_t bucket_elements = std::int64_t{1} << 27;  // over all ranks' shards, as in training
  /// Gets each time as soon as it is known.
  std::function<void(const CommunicationTime&)> notice = {};
};

/// Elements of a row of the gradients that are reduced.
inline constexpr std::int64_t kBenchmarkWidth = 4096;

/// Throws Error (kInput) unless `elements` are a multiple of kBenchmarkWidth with a row for every one of
/// several ranks.
void expect_measurable(std::int64_t elements, int ranks);

/// All variants at one size that is measurable. Collective: every rank gets the same times. Throws Error
/// (kFailure) when a result is not the sum.
std::vector<CommunicationTime> measure_communication(Communicator& ranks, Backend& backend,
                                                     std::int64_t elements,
                                                     const CommunicationBenchmarkOptions& options);

}  // namespace agoq

// QuantizedReduction: sums of quantised tensors over the ranks (QuanGrad's all-reduce), in buckets.
//
//   sum = quantised(piece of rank 0 + piece of rank 1 + ...)     FP32, in rank order
//
// Layout. Of W ranks, rank r owns slot r of every tensor: its rows [r c, min((r + 1) c, rows)) with
// c = ceil(rows / W). A bucket is a list of ranges of slot rows: of each range, every slot's rows are
// reduced together. Blocks never cross rows, so the result does not depend on the buckets.
//
//   all_reduce   1  slot p of this rank's piece goes to rank p; the W - 1 pieces of the own slot that
//                   come are staged, the own one stays where it is
//                2  own slot = quantised sum of its W pieces
//                3  the own slot goes to every rank, into its place
//   scatter      1 only, and what comes takes the place of what went: slot s then holds the piece that
//                rank s has of the own slot
//
// Steps 1 and 3 run on one side stream, 2 on another, with two sets of staging: step 2 of a bucket runs
// beside step 1 of the next, and step 3 goes in one exchange with step 1 of the one after that (every
// exchange costs some tens of microseconds, whatever it carries). What the main stream had queued at a
// call comes before it; finish() makes the main stream wait for all.
//
// A tensor of which only some rows are not zero, the same on all ranks, is reduced by those: set_rows()
// puts a tensor of them in its place, of which the ranks own slots like of any other. The buckets stay
// as they are and hold less.
//
// Every rank makes the same calls in the same order. Nothing is allocated after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "comm/communicator.h"
#include "quant/quant_tensor.h"

namespace agoq {

/// Rows [first, last) of every rank's slot of a tensor.
struct SlotRows {
  std::size_t tensor = 0;
  std::int64_t first = 0;
  std::int64_t last = 0;

  bool operator==(const SlotRows&) const = default;
};
using Bucket = std::vector<SlotRows>;

/// Rows of a slot: ceil(rows / ranks). The last slots may have fewer, or none.
std::int64_t slot_rows(std::int64_t rows, int ranks);

/// Rows [first, last) that are rank `rank`'s own.
struct OwnRows {
  std::int64_t first = 0;
  std::int64_t last = 0;
};
OwnRows own_rows(std::int64_t rows, int ranks, int rank);

/// All slot rows of the tensors `order`, one after the other, in buckets of about `elements` elements
/// over all slots: as many rows as fit, at least one.
std::vector<Bucket> cut_into_buckets(std::span<const BlockGrid> grids,
                                     std::span<const std::size_t> order, int ranks,
                                     std::int64_t elements);

/// Rows [first, last) of every slot.
struct RowsOfSlots {
  std::int64_t first = 0;
  std::int64_t last = 0;
};
/// Adds the messages with which those rows (as far as slots have them) of every rank's slot of `tensor`
/// come to all, in place.
void add_gathering(const Communicator& ranks, const QuantTensor& tensor, const RowsOfSlots& rows,
                   std::vector<Message>& sends, std::vector<Message>& receives);

class QuantizedReduction {
 public:
  /// Of `tensors`, in `buckets`. What it needs it takes from `memory` now: staging for two buckets; on
  /// top of that, operations take their workspace there. With `memory` measuring, the calls measure.
  ///
  /// Tensors that are scattered have room for ranks x slot_rows(rows) rows: they were placed with so
  /// many, and are given here with their own number of rows.
  QuantizedReduction(Communicator& ranks, Backend& backend, std::vector<QuantTensor> tensors,
                     std::vector<Bucket> buckets, Arena& memory);

  std::size_t buckets() const { return buckets_.size(); }
  const Bucket& bucket(std::size_t index) const { return buckets_.at(index); }
  /// Of the two sets of staging.
  std::size_t staging_bytes() const { return 2 * staging_bytes_; }
  /// What this rank has sent since construction.
  std::size_t sent_bytes() const { return sent_bytes_; }

  /// Until the next call, `rows` is reduced in the place of tensor `tensor`: of the same format and row
  /// length, with at most as many rows. row_numbers: see Backend::add_pieces. Between finish() and the
  /// next bucket, the same number of rows on every rank; not for tensors that are scattered.
  void set_rows(std::size_t tensor, const QuantTensor& rows, const Tensor& row_numbers = {});

  /// Queues a bucket's all-reduce. counters: optional, int64 [tensors, kQuantCounters], added to for the
  /// own slot; see Backend::quantize. Stochastic rounding is keyed by main.random and the tensor's
  /// index.
  void all_reduce(const Context& main, std::size_t bucket, const Tensor& counters);
  /// The same by the naive sum of Backend::add_pieces_naively, under scales[tensor]; tensors of an exact
  /// format are added as above.
  void all_reduce_naively(const Context& main, std::size_t bucket, std::span<const float> scales);
  void scatter(const Context& main, std::size_t bucket);
  /// What is queued on the main stream from now on comes after all of the above.
  void finish(const Context& main);

  /// After scatter: the pieces of the own slot's rows of a tensor, in rank order.
  std::vector<QuantTensor> pieces(std::size_t tensor) const;

 private:
  /// Whether no slot has any of the bucket's rows, after set_rows().
  bool is_empty(const Bucket& bucket) const;
  /// Rows [first, last) of slot `slot`, cut off at the slot's and the tensor's end.
  QuantTensor rows_of_slot(const SlotRows& rows, int slot) const;
  /// The place of a piece of the own slot's rows in slot `slot`.
  QuantTensor place_in_slot(const SlotRows& rows, int slot) const;
  Context on(const Context& main, Stream stream) const;
  void order(Stream earlier, Stream later);
  /// The place in `staging` of every range's pieces, of every rank but the own.
  void lay_out(const Bucket& bucket, std::byte* staging);
  /// Step 1 of a bucket, then use(context, pieces, rows) for each range of it, on the computing stream.
  template <typename Use>
  void with_pieces(const Context& main, std::size_t bucket, Use use);
  /// Steps 1 and 2, the latter by sum(context, pieces, own one of them, tensor).
  template <typename Sum>
  void reduce(const Context& main, std::size_t bucket, Sum sum);
  /// Step 1 of a bucket, with step 3 of the bucket whose sum the exchanging stream comes after.
  void send_pieces(const Context& main, const Bucket& bucket);
  void add_sums(const Bucket& bucket);
  /// Step 3 of all buckets whose turn has not come.
  void add_all_sums();
  void exchange(const Context& main);

  Communicator& ranks_;
  Backend& backend_;
  std::vector<QuantTensor> tensors_;
  std::vector<Tensor> row_numbers_;  // of each tensor; most have none
  std::vector<std::int64_t> slot_rows_;
  std::vector<Bucket> buckets_;
  Arena& memory_;
  std::size_t staging_bytes_ = 0;  // of one set
  std::byte* staging_[2] = {nullptr, nullptr};
  int next_staging_ = 0;
  Stream exchanging_, computing_;
  // Buckets whose step 3 is not queued yet: the last one, which the exchanging stream does not come
  // after, and the one before it.
  std::optional<std::size_t> last_, before_last_;
  std::size_t sent_bytes_ = 0;
  // Kept from call to call: nothing is allocated inside a step.
  std::vector<Message> sends_, receives_;
  std::vector<QuantTensor> staged_;  // range by range, rank by rank
};

}  // namespace agoq

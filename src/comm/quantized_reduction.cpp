#include "comm/quantized_reduction.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace agoq {
namespace {

struct Plane {
  std::byte* QuantTensor::*memory;
  std::int64_t RowBytes::*row_bytes;
};
constexpr Plane kPlanes[] = {{&QuantTensor::codes, &RowBytes::codes},
                             {&QuantTensor::bits, &RowBytes::bits},
                             {&QuantTensor::scales, &RowBytes::scales},
                             {&QuantTensor::super, &RowBytes::super}};

// Each rank begins with its neighbour: not all with the same one.
int rank_after(const Communicator& ranks, int distance) {
  return (ranks.rank() + distance) % ranks.size();
}
int rank_before(const Communicator& ranks, int distance) {
  return (ranks.rank() + ranks.size() - distance) % ranks.size();
}

void add_messages(std::vector<Message>& messages, int peer, const QuantTensor& tensor) {
  const RowBytes row = row_bytes(tensor.format, tensor.grid);
  for (const Plane& plane : kPlanes) {
    const auto bytes = static_cast<std::size_t>(tensor.rows() * row.*plane.row_bytes);
    if (bytes > 0) messages.push_back({peer, tensor.*plane.memory, bytes});
  }
}

/// To planes of the same format and grid.
void copy_planes(const Context& context, const QuantTensor& source, const QuantTensor& target) {
  const RowBytes row = row_bytes(source.format, source.grid);
  for (const Plane& plane : kPlanes) {
    const Shape bytes{source.rows() * row.*plane.row_bytes};
    if (bytes.count() == 0) continue;
    context.backend.copy(context, {source.*plane.memory, ElementType::kUint8, bytes},
                         {target.*plane.memory, ElementType::kUint8, bytes});
  }
}

/// Those rows of slot `slot` of a tensor that is cut into slots of `slot_length` rows, cut off at the
/// slot's and at the tensor's end.
QuantTensor slice_of_slot(const QuantTensor& tensor, std::int64_t slot_length, int slot,
                          const RowsOfSlots& rows) {
  const auto place = [&](std::int64_t row) {
    return std::min(slot * slot_length + std::min(row, slot_length), tensor.rows());
  };
  return tensor.slice_rows(place(rows.first), place(rows.last));
}

}  // namespace

std::int64_t slot_rows(std::int64_t rows, int ranks) { return (rows + ranks - 1) / ranks; }

OwnRows own_rows(std::int64_t rows, int ranks, int rank) {
  const std::int64_t length = slot_rows(rows, ranks);
  return {std::min(rank * length, rows), std::min((rank + 1) * length, rows)};
}

std::vector<Bucket> cut_into_buckets(std::span<const BlockGrid> grids,
                                     std::span<const std::size_t> order, int ranks,
                                     std::int64_t elements) {
  check(ranks >= 1 && elements >= 1, "buckets of at least one element are cut for at least one rank");
  std::vector<Bucket> buckets(1);
  std::int64_t filled = 0;
  for (const std::size_t tensor : order) {
    const BlockGrid& grid = grids[tensor];
    const std::int64_t rows = slot_rows(grid.rows, ranks);
    const std::int64_t row_elements = std::max<std::int64_t>(ranks * grid.row_length, 1);
    for (std::int64_t first = 0; first < rows;) {
      std::int64_t fitting = (elements - filled) / row_elements;
      if (fitting < 1 && !buckets.back().empty()) {
        buckets.emplace_back();
        filled = 0;
        continue;
      }
      const std::int64_t taken = std::clamp<std::int64_t>(fitting, 1, rows - first);
      buckets.back().push_back({tensor, first, first + taken});
      first += taken;
      filled += taken * row_elements;
    }
  }
  if (buckets.back().empty()) buckets.pop_back();
  return buckets;
}

void add_gathering(const Communicator& ranks, const QuantTensor& tensor, const RowsOfSlots& rows,
                   std::vector<Message>& sends, std::vector<Message>& receives) {
  const std::int64_t slot_length = slot_rows(tensor.rows(), ranks.size());
  const QuantTensor own = slice_of_slot(tensor, slot_length, ranks.rank(), rows);
  for (int distance = 1; distance < ranks.size(); ++distance) {
    const int from = rank_before(ranks, distance);
    add_messages(sends, rank_after(ranks, distance), own);
    add_messages(receives, from, slice_of_slot(tensor, slot_length, from, rows));
  }
}

QuantizedReduction::QuantizedReduction(Communicator& ranks, Backend& backend,
                                       std::vector<QuantTensor> tensors, std::vector<Bucket> buckets,
                                       Arena& memory)
    : ranks_(ranks),
      backend_(backend),
      tensors_(std::move(tensors)),
      buckets_(std::move(buckets)),
      memory_(memory) {
  for (const QuantTensor& tensor : tensors_) {
    slot_rows_.push_back(slot_rows(tensor.rows(), ranks_.size()));
  }
  row_numbers_.resize(tensors_.size());
  const auto others = static_cast<std::size_t>(ranks_.size() - 1);
  std::size_t ranges = 0;
  for (const Bucket& bucket : buckets_) {
    std::size_t bytes = 0;
    for (const SlotRows& rows : bucket) {
      check(rows.tensor < tensors_.size() && 0 <= rows.first && rows.first <= rows.last &&
                rows.last <= slot_rows_[rows.tensor],
            "a bucket holds slot rows [{}, {}) of tensor {}, which is not one of the {} tensors or has "
            "fewer rows",
            rows.first, rows.last, rows.tensor, tensors_.size());
      BlockGrid grid = tensors_[rows.tensor].grid;
      grid.rows = rows.last - rows.first;
      bytes += others * storage_bytes(tensors_[rows.tensor].format, grid);
    }
    staging_bytes_ = std::max(staging_bytes_, bytes);
    ranges = std::max(ranges, bucket.size());
  }
  if (others == 0) return;
  for (std::byte*& staging : staging_) staging = memory_.take(staging_bytes_);
  // Of three buckets at most: one that begins or is gathered, and two whose sums have waited.
  sends_.reserve(3 * ranges * others * std::size(kPlanes));
  receives_.reserve(3 * ranges * others * std::size(kPlanes));
  staged_.reserve(ranges * (others + 1));
  if (memory_.is_measuring()) return;
  exchanging_ = backend_.side_stream(0);
  computing_ = backend_.side_stream(1);
}

void QuantizedReduction::set_rows(std::size_t tensor, const QuantTensor& rows,
                                  const Tensor& row_numbers) {
  check(!last_ && !before_last_, "rows were set while buckets are under way");
  QuantTensor& replaced = tensors_.at(tensor);
  check(rows.format == replaced.format && rows.width() == replaced.width() &&
            rows.grid.segments == replaced.grid.segments,
        "rows of {} [{}, {}] were set for a tensor of {} [{}, {}]", rows.format.to_string(), rows.rows(),
        rows.width(), replaced.format.to_string(), replaced.rows(), replaced.width());
  replaced = rows;
  row_numbers_[tensor] = row_numbers;
  slot_rows_[tensor] = slot_rows(rows.rows(), ranks_.size());
}

bool QuantizedReduction::is_empty(const Bucket& bucket) const {
  return std::all_of(bucket.begin(), bucket.end(),
                     [&](const SlotRows& rows) { return rows.first >= slot_rows_[rows.tensor]; });
}

QuantTensor QuantizedReduction::rows_of_slot(const SlotRows& rows, int slot) const {
  return slice_of_slot(tensors_[rows.tensor], slot_rows_[rows.tensor], slot, {rows.first, rows.last});
}

QuantTensor QuantizedReduction::place_in_slot(const SlotRows& rows, int slot) const {
  const QuantTensor own = rows_of_slot(rows, ranks_.rank());
  QuantTensor with_room = tensors_[rows.tensor];
  with_room.grid.rows = ranks_.size() * slot_rows_[rows.tensor];
  const std::int64_t begin = slot * slot_rows_[rows.tensor] + rows.first;
  QuantTensor place = with_room.slice_rows(begin, begin + own.rows());
  place.first_row = own.first_row;  // of the whole tensor these are the own slot's rows
  return place;
}

std::vector<QuantTensor> QuantizedReduction::pieces(std::size_t tensor) const {
  std::vector<QuantTensor> pieces;
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    pieces.push_back(place_in_slot({tensor, 0, slot_rows_.at(tensor)}, rank));
  }
  return pieces;
}

Context QuantizedReduction::on(const Context& main, Stream stream) const {
  return {backend_, stream, memory_, main.random};
}

void QuantizedReduction::order(Stream earlier, Stream later) {
  if (!memory_.is_measuring()) backend_.order(earlier, later);
}

void QuantizedReduction::lay_out(const Bucket& bucket, std::byte* staging) {
  staged_.clear();
  for (const SlotRows& rows : bucket) {
    const QuantTensor own = rows_of_slot(rows, ranks_.rank());
    for (int rank = 0; rank < ranks_.size(); ++rank) {
      if (rank == ranks_.rank()) {
        staged_.push_back(own);
        continue;
      }
      staged_.push_back(place(own.format, own.grid, staging));
      staged_.back().first_row = own.first_row;
      staging += storage_bytes(own.format, own.grid);
    }
  }
}

void QuantizedReduction::exchange(const Context& main) {
  ranks_.exchange(on(main, exchanging_), sends_, receives_);
  for (const Message& message : sends_) sent_bytes_ += message.bytes;
  sends_.clear();
  receives_.clear();
}

void QuantizedReduction::send_pieces(const Context& main, const Bucket& bucket) {
  lay_out(bucket, staging_[next_staging_]);
  next_staging_ = 1 - next_staging_;
  for (int distance = 1; distance < ranks_.size(); ++distance) {
    const int to = rank_after(ranks_, distance), from = rank_before(ranks_, distance);
    for (std::size_t range = 0; range < bucket.size(); ++range) {
      add_messages(sends_, to, rows_of_slot(bucket[range], to));
      add_messages(
          receives_, from,
          staged_[range * static_cast<std::size_t>(ranks_.size()) + static_cast<std::size_t>(from)]);
    }
  }
  if (before_last_) add_sums(buckets_[*before_last_]);
  before_last_ = last_;
  last_.reset();
  order(main.stream, exchanging_);
  exchange(main);
  // The sums of this bucket read what came. The next exchange fills the staging of the bucket before
  // this one, and sends its sums: it comes after those, which are queued, and not after this bucket's.
  order(exchanging_, computing_);
  order(computing_, exchanging_);
}

void QuantizedReduction::add_sums(const Bucket& bucket) {
  for (const SlotRows& rows : bucket) {
    add_gathering(ranks_, tensors_[rows.tensor], {rows.first, rows.last}, sends_, receives_);
  }
}

void QuantizedReduction::add_all_sums() {
  order(computing_, exchanging_);
  for (std::optional<std::size_t>* const bucket : {&before_last_, &last_}) {
    if (*bucket) add_sums(buckets_[**bucket]);
    bucket->reset();
  }
}

template <typename Use>
void QuantizedReduction::with_pieces(const Context& main, std::size_t bucket, Use use) {
  if (ranks_.size() == 1) return;
  const Bucket& ranges = buckets_.at(bucket);
  send_pieces(main, ranges);
  const Context computing = on(main, computing_);
  const auto ranks = static_cast<std::size_t>(ranks_.size());
  for (std::size_t range = 0; range < ranges.size(); ++range) {
    use(computing, std::span<const QuantTensor>(&staged_[range * ranks], ranks), ranges[range]);
  }
}

template <typename Sum>
void QuantizedReduction::reduce(const Context& main, std::size_t bucket, Sum sum) {
  if (is_empty(buckets_.at(bucket))) return;
  with_pieces(main, bucket,
              [&](const Context& context, std::span<const QuantTensor> pieces, const SlotRows& rows) {
                const QuantTensor& own = pieces[static_cast<std::size_t>(ranks_.rank())];
                if (own.rows() > 0) sum(context, pieces, own, rows.tensor);
              });
  last_ = bucket;
}

void QuantizedReduction::all_reduce(const Context& main, std::size_t bucket, const Tensor& counters) {
  reduce(main, bucket,
         [&](const Context& context, std::span<const QuantTensor> pieces, const QuantTensor& own,
             std::size_t tensor) {
           const auto row = static_cast<std::int64_t>(tensor);
           const Tensor& numbers = row_numbers_[tensor];
           backend_.add_pieces(
               context, pieces, own,
               main.random.with(RandomPurpose::kSumRounding, static_cast<std::uint32_t>(tensor)),
               counters ? counters.slice_rows(row, row + 1) : Tensor{},
               numbers ? numbers.slice_rows(own.first_row, own.first_row + own.rows()) : Tensor{});
         });
}

void QuantizedReduction::all_reduce_naively(const Context& main, std::size_t bucket,
                                            std::span<const float> scales) {
  reduce(main, bucket,
         [&](const Context& context, std::span<const QuantTensor> pieces, const QuantTensor& own,
             std::size_t tensor) {
           if (own.format.is_exact()) return backend_.add_pieces(context, pieces, own, main.random, {});
           backend_.add_pieces_naively(context, pieces, own, scales[tensor]);
         });
}

void QuantizedReduction::scatter(const Context& main, std::size_t bucket) {
  with_pieces(main, bucket,
              [&](const Context& context, std::span<const QuantTensor> pieces, const SlotRows& rows) {
                for (int rank = 0; rank < ranks_.size(); ++rank) {
                  if (rank == ranks_.rank()) continue;
                  copy_planes(context, pieces[static_cast<std::size_t>(rank)],
                              place_in_slot(rows, rank));
                }
              });
}

void QuantizedReduction::finish(const Context& main) {
  if (ranks_.size() == 1) return;
  add_all_sums();
  exchange(main);
  order(exchanging_, main.stream);
}

}  // namespace agoq

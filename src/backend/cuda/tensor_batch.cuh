// One launch for many tensors: a model has some twenty kinds of gradients a layer, most of them small,
// and a launch for each costs more than reading it.
//
// A block of threads is given one part of one tensor. Parts depend on the tensor alone, so that neither
// the launch nor the tensors beside it change a result.
#pragma once

#include <cstdint>
#include <functional>
#include <iterator>
#include <type_traits>
#include <utility>

#include "backend/cuda/launch.cuh"

namespace agoq::cuda {

// Of a kernel's parameters, of which those before CUDA 12.1 had this many at most.
inline constexpr std::size_t kBatchBytes = 4000;

/// What `Item` says of up to kMost tensors, and the blocks that are theirs.
template <typename Item, int kMost = static_cast<int>(kBatchBytes / (sizeof(Item) + 4))>
struct TensorBatch {
  static_assert(kMost > 0);
  Item items[kMost];
  std::uint32_t end[kMost];  // of the blocks of items[i]; they begin where those before it end
  int count;
};

/// A block's tensor, and its number among the blocks of it.
struct BatchPlace {
  int item;
  std::uint32_t block;
};

template <typename Item, int kMost>
__device__ __forceinline__ BatchPlace place_in(const TensorBatch<Item, kMost>& batch) {
  int before = 0, end = batch.count - 1;  // the first whose blocks end behind this one
  while (before < end) {
    const int middle = (before + end) / 2;
    if (batch.end[middle] <= blockIdx.x) {
      before = middle + 1;
    } else {
      end = middle;
    }
  }
  return {before, blockIdx.x - (before == 0 ? 0 : batch.end[before - 1])};
}

/// Collects tensors and launches where a batch is full, and at the end.
template <typename Batch>
class BatchedLaunches {
 public:
  using Item = std::remove_all_extents_t<decltype(Batch::items)>;
  using Launching = std::function<void(std::uint32_t blocks, const Batch&)>;

  explicit BatchedLaunches(Launching launching) : launching_(std::move(launching)) {}
  ~BatchedLaunches() { launch(); }
  BatchedLaunches(const BatchedLaunches&) = delete;
  BatchedLaunches& operator=(const BatchedLaunches&) = delete;

  void add(const Item& item, std::uint32_t blocks) {
    if (batch_.count == std::ssize(batch_.items)) launch();
    const std::uint32_t before = batch_.count == 0 ? 0 : batch_.end[batch_.count - 1];
    batch_.items[batch_.count] = item;
    batch_.end[batch_.count++] = before + blocks;
  }
  void launch() {
    if (batch_.count > 0) launching_(batch_.end[batch_.count - 1], batch_);
    batch_.count = 0;
  }

 private:
  Launching launching_;
  Batch batch_{};
};

}  // namespace agoq::cuda

// Several ranks' pieces of the same rows as a kernel's parameter: their planes' addresses.
#pragma once

#include <span>

#include "backend/cuda/group_codec.cuh"

namespace agoq::cuda {

inline constexpr int kMostPieces = 64;

/// Where the pieces' planes are; all else is alike.
template <int kMost = kMostPieces>
struct Planes {
  std::byte* codes[kMost];
  std::byte* bits[kMost];
  std::byte* scales[kMost];
  std::byte* super[kMost];
  int count;
};

/// Of at most kMost pieces.
template <int kMost = kMostPieces>
Planes<kMost> planes_of(std::span<const QuantTensor> pieces) {
  Planes<kMost> planes{};
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    planes.codes[p] = pieces[p].codes;
    planes.bits[p] = pieces[p].bits;
    planes.scales[p] = pieces[p].scales;
    planes.super[p] = pieces[p].super;
  }
  planes.count = static_cast<int>(pieces.size());
  return planes;
}

/// The view of the first piece, aligned where all are.
inline QuantView view_of_all(std::span<const QuantTensor> pieces) {
  QuantView view = view_of(pieces.front());
  for (const QuantTensor& piece : pieces) view.aligned = view.aligned && view_of(piece).aligned;
  return view;
}

}  // namespace agoq::cuda

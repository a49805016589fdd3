#include "train/run_arenas.h"

#include <string>
#include <utility>

namespace agoq {
namespace {

template <typename Make, std::size_t... kIndex>
std::array<Arena, kMemoryClasses> make_arenas(Make make, std::index_sequence<kIndex...>) {
  return {make(static_cast<MemoryClass>(kIndex))...};
}

template <typename Make>
std::array<Arena, kMemoryClasses> make_arenas(Make make) {
  return make_arenas(make, std::make_index_sequence<kMemoryClasses>());
}

}  // namespace

std::string_view name_of(MemoryClass memory) {
  switch (memory) {
    case MemoryClass::kWeights: return "weights";
    case MemoryClass::kMasters: return "master weights";
    case MemoryClass::kGradients: return "main gradients";
    case MemoryClass::kMoments: return "moments";
    case MemoryClass::kActivations: return "saved activations";
    case MemoryClass::kWorkspace: return "workspace";
    case MemoryClass::kTables: return "tables";
    case MemoryClass::kBatch: return "batch";
    case MemoryClass::kCommunication: return "communication";
  }
  return "?";
}

RunArenas RunArenas::measuring() {
  return RunArenas(
      make_arenas([](MemoryClass memory) { return Arena::measuring(std::string(name_of(memory))); }));
}

RunArenas::RunArenas(Allocator& allocator, const BytesPerClass& bytes)
    : arenas_(make_arenas([&](MemoryClass memory) {
        return Arena(std::string(name_of(memory)), allocator, bytes[static_cast<std::size_t>(memory)]);
      })) {}

BytesPerClass RunArenas::high_water() const {
  BytesPerClass bytes{};
  for (std::size_t c = 0; c < arenas_.size(); ++c) bytes[c] = arenas_[c].high_water();
  return bytes;
}

}  // namespace agoq

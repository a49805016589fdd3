// For tests: the reducer of a rank that is alone.
#pragma once

#include <memory>
#include <numeric>

#include "gradients/gradient_reducer.h"

namespace agoq {

class LoneReducer {
 public:
  explicit LoneReducer(MainGradients& gradients)
      : reducer(cpu_backend(), gradients, order_of(gradients), *rank_, {}, memory_) {}

 private:
  static std::vector<std::size_t> order_of(const MainGradients& gradients) {
    std::vector<std::size_t> order(gradients.parameters().size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    return order;
  }
  std::unique_ptr<Communicator> rank_ = single_rank();
  Arena memory_{"communication", host_allocator(), std::size_t{1} << 16};

 public:
  GradientReducer reducer;
};

inline double norm_of(MainGradients& gradients, const Context& context, double scale) {
  return LoneReducer(gradients).reducer.norm(context, scale);
}

}  // namespace agoq

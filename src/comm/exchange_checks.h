// What every transport checks of its operands, with the same messages.
#pragma once

#include <numeric>
#include <span>

#include "comm/communicator.h"
#include "core/error.h"

namespace agoq {

inline void expect_messages(const Communicator& group, std::span<const Message> sends,
                            std::span<const Message> receives) {
  for (const std::span<const Message> messages : {sends, receives}) {
    for (const Message& message : messages) {
      check(0 <= message.peer && message.peer < group.size() && message.peer != group.rank(),
            "exchange: a message goes to another of the {} ranks; rank {} gave one for rank {}",
            group.size(), group.rank(), message.peer);
    }
  }
}

inline void expect_summable(const char* operation, const Tensor& x) {
  check(x.type == ElementType::kFp32 || x.type == ElementType::kBf16 || x.type == ElementType::kFp64,
        "{}: fp32, bf16 or fp64 was expected; {} was given", operation, name_of(x.type));
}

inline void expect_parts(const Communicator& group, const Tensor& x,
                         std::span<const std::int64_t> counts) {
  expect_summable("reduce_scatter", x);
  const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  check(static_cast<int>(counts.size()) == group.size() && total == x.count(),
        "reduce_scatter: {} parts of {} elements together were expected; {} of {} were given",
        group.size(), x.count(), counts.size(), total);
}

}  // namespace agoq

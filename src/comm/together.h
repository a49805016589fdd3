// What all ranks do that may fail on some of them: then it fails on all, and one of them says so.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/error.h"

namespace agoq {

/// While it lives, ranks wait for each other as long as it takes: work on files may keep one for minutes
/// longer than another. Whether the others live is for RankWatch to see.
class Patience {
 public:
  explicit Patience(Communicator& ranks)
      : ranks_(ranks), before_(ranks.set_timeout(std::numeric_limits<double>::infinity())) {}
  ~Patience() { ranks_.set_timeout(before_); }
  Patience(const Patience&) = delete;
  Patience& operator=(const Patience&) = delete;

 private:
  Communicator& ranks_;
  double before_;
};

/// An Error that all ranks throw at the same place, with its text on rank 0 alone: the others have none,
/// and print none.
class AgreedError : public Error {
 public:
  using Error::Error;
};

/// Seconds that `rank` leaves to those before it where several may find the same failure at once and
/// cannot agree on who reports it: a launcher ends the others when one has, mpirun after a second.
inline double turn_seconds(int rank) { return 1.5 * std::min(rank, 4); }

/// Runs `work`, and waits for the other ranks without a deadline. When it throws Error on any rank,
/// every rank throws an AgreedError of the kind and with the text of the first that failed, and its
/// number unless all failed alike. Collective; `work` is not.
inline void together(Communicator& ranks, const std::function<void()>& work) {
  if (ranks.size() == 1) return work();
  std::string text;
  int kind = -1;
  try {
    work();
  } catch (const Error& error) {
    kind = static_cast<int>(error.kind());
    text = error.what();
  }
  const Patience patience(ranks);
  const std::vector<int> kinds = ranks.gather_values(kind);
  int first = -1, failed = 0;
  for (int r = ranks.size() - 1; r >= 0; --r) {
    if (kinds[static_cast<std::size_t>(r)] < 0) continue;
    first = r;
    ++failed;
  }
  if (failed == 0) return;
  const std::string of_first = ranks.gather_texts(text)[static_cast<std::size_t>(first)];
  std::string said;
  if (ranks.rank() == 0)
    said = failed == ranks.size() ? of_first : fmt::format("rank {}: {}", first, of_first);
  throw AgreedError(static_cast<ErrorKind>(kinds[static_cast<std::size_t>(first)]), said);
}

}  // namespace agoq

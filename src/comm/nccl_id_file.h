// NCCL's unique id from rank 0 to the others through a shared directory, for launchers without MPI.
//
// Every rank but 0 writes .nccl-join-R with its greeting (comm/greeting.h) and a number of its own; rank
// 0 waits for all of them and answers in .nccl-id with the greetings and the numbers of all and the id.
// A rank takes only an answer that holds its number, so files that an earlier launch left behind are
// never taken for this one's. Files are written aside and renamed: none is seen half written.
//
// Invariant: every version keeps greetings and numbers as they are in both files; what comes behind them
// is looked at by ranks of one version only.
#pragma once

#include <string>

#include "comm/greeting.h"
#include "comm/launch.h"
#include "comm/transports.h"

namespace agoq {

class NcclIdFile {
 public:
  /// Creates `directory` if it is absent. Throws Error (kInput) when it cannot be written to. `program`
  /// names version and commit.
  NcclIdFile(const std::string& directory, const Launch& launch, const std::string& program,
             double timeout_seconds);

  /// Rank 0: waits for the others and hands them `id`, which it returns. Throws Error (kFailure) naming
  /// the ranks that have not come within the timeout, and AgreedError (kInput, comm/together.h) where
  /// not all run the same program.
  NcclId publish(const NcclId& id) const;
  /// Other ranks: the id that rank 0 handed out. Throws Error (kFailure) when it does not in time, and
  /// AgreedError as publish() does.
  NcclId wait() const;

 private:
  std::string join_path(int rank) const;
  std::string id_path() const;

  std::string directory_;
  int rank_;
  int size_;
  Greeting greeting_;
  double timeout_seconds_;
};

}  // namespace agoq

// One line of progress: step, loss, speed, exposed communication of several ranks, and time left. On a
// terminal it is rewritten in place; elsewhere a line is printed every `log_every` steps. What a user
// has to know whatever is printed goes to stderr (print_notice), so that stdout holds results only.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace agoq {

/// Communication that no computation hides.
struct Exposed {
  double seconds = 0;
  double step_seconds = 0;  // of which they are a part
  /// "2.31 ms (1.2 %)"
  std::string text() const;
};

class Progress {
 public:
  Progress(std::string label, std::int64_t steps, std::int64_t log_every, bool enabled);
  /// Ends the line in place.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// tokens_per_second: of recent steps; seconds_left: at that speed; exposed: of this step, where there
  /// are several ranks.
  void show(std::int64_t step, double loss, double tokens_per_second, double seconds_left,
            const std::optional<Exposed>& exposed);
  /// A line of its own.
  void note(const std::string& text);
  /// Why stdout no longer takes what is printed (a closed pipe, a full disk); empty as long as it does.
  const std::string& failure() const { return failure_; }

 private:
  void print(const std::string& text);

  std::string label_;
  std::int64_t steps_;
  std::int64_t log_every_;
  bool enabled_;
  bool terminal_;
  bool line_open_ = false;
  std::string failure_;
};

/// Takes a line that the user has to know.
using Notice = std::function<void(const std::string&)>;
/// On stderr.
void print_notice(const std::string& text);

}  // namespace agoq

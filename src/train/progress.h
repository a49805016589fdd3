// One line of progress: step, loss, speed and time left. On a terminal it is rewritten in place;
// elsewhere a line is printed every `log_every` steps.
#pragma once

#include <cstdint>
#include <string>

namespace agoq {

class Progress {
 public:
  Progress(std::string label, std::int64_t steps, std::int64_t log_every, bool enabled);
  /// Ends the line in place.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// tokens_per_second: of recent steps; seconds_left: at that speed.
  void show(std::int64_t step, double loss, double tokens_per_second, double seconds_left);
  /// A line of its own.
  void note(const std::string& text);

 private:
  std::string label_;
  std::int64_t steps_;
  std::int64_t log_every_;
  bool enabled_;
  bool terminal_;
  bool line_open_ = false;
};

}  // namespace agoq

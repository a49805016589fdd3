#include "train/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

#include "core/quantity.h"

namespace agoq {
Progress::Progress(std::string label, std::int64_t steps, std::int64_t log_every, bool enabled)
    : label_(std::move(label)),
      steps_(steps),
      log_every_(log_every),
      enabled_(enabled),
      terminal_(isatty(STDOUT_FILENO) != 0) {}

Progress::~Progress() {
  if (line_open_) std::fputc('\n', stdout);
}

void Progress::show(std::int64_t step, double loss, double tokens_per_second, double seconds_left) {
  if (!enabled_) return;
  const bool due = step % log_every_ == 0 || step == steps_;
  if (!terminal_ && !due) return;
  fmt::print("{}{} step {}/{}  loss {:.4f}  {:.0f} tokens/s  {} left{}", terminal_ ? "\r" : "", label_,
             step, steps_, loss, tokens_per_second, format_duration(seconds_left),
             terminal_ ? "\x1b[K" : "\n");
  line_open_ = terminal_;
  std::fflush(stdout);
}

void Progress::note(const std::string& text) {
  if (!enabled_) return;
  fmt::print("{}{}\n", line_open_ ? "\n" : "", text);
  line_open_ = false;
  std::fflush(stdout);
}

void print_notice(const std::string& text) {
  // Not fmt::print, which throws where stderr is closed.
  const std::string line = text + "\n";
  std::fflush(stdout);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace agoq

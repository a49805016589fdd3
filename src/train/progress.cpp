#include "train/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "comm/launch.h"
#include "core/quantity.h"

namespace agoq {

std::string Exposed::text() const {
  return fmt::format("{:.2f} ms ({:.1f} %)", 1e3 * seconds, 100 * seconds / step_seconds);
}

Progress::Progress(std::string label, std::int64_t steps, std::int64_t log_every, bool enabled)
    : label_(std::move(label)),
      steps_(steps),
      log_every_(log_every),
      enabled_(enabled),
      terminal_(isatty(STDOUT_FILENO) != 0 && !launcher_forwards_output()) {}

Progress::~Progress() {
  if (line_open_) std::fputc('\n', stdout);
}

void Progress::show(std::int64_t step, double loss, double tokens_per_second, double seconds_left,
                    const std::optional<Exposed>& exposed) {
  if (!enabled_) return;
  const bool due = step % log_every_ == 0 || step == steps_;
  if (!terminal_ && !due) return;
  print(fmt::format("{}{} step {}/{}  loss {:.4f}  {:.0f} tokens/s{}  {} left{}", terminal_ ? "\r" : "",
                    label_, step, steps_, loss, tokens_per_second,
                    exposed ? "  exposed " + exposed->text() : "", format_duration(seconds_left),
                    terminal_ ? "\x1b[K" : "\n"));
  line_open_ = terminal_;
}

void Progress::note(const std::string& text) {
  if (!enabled_) return;
  print(fmt::format("{}{}\n", line_open_ ? "\n" : "", text));
  line_open_ = false;
}

void Progress::print(const std::string& text) {
  if (!failure_.empty()) return;
  // Flushed, so that the line is seen and a reader who is gone is noticed at once.
  const bool printed =
      std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  if (!printed) failure_ = std::strerror(errno);
}

void print_notice(const std::string& text) {
  // Not fmt::print, which throws where stderr is closed.
  const std::string line = text + "\n";
  std::fflush(stdout);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace agoq

// The one error mechanism. A failed check throws agoq::Error, whose text is one line: what was
// expected, what came, what to do. The program turns it into an exit status (see ErrorKind).
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace agoq {

enum class ErrorKind {
  kFailure,    // the run failed: exit status 1
  kInput,      // bad input or configuration: exit status 2
  kNotFinite,  // a loss or gradient is NaN or Inf: a run may skip the step, else exit status 1
  kDevice,     // an operation failed on the device, which may be lost for this process: exit status 1
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

/// Throws an Error of kind kInput: the user can mend it.
template <typename... Args>
[[noreturn]] void fail_input(fmt::format_string<Args...> text, Args&&... args) {
  throw Error(ErrorKind::kInput, fmt::format(text, std::forward<Args>(args)...));
}

/// Throws an Error of kind kFailure: something that should have worked did not.
template <typename... Args>
[[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) {
  throw Error(ErrorKind::kFailure, fmt::format(text, std::forward<Args>(args)...));
}

/// Throws an Error of kind kNotFinite with the formatted text unless `condition` holds.
template <typename... Args>
void check_finite(bool condition, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) throw Error(ErrorKind::kNotFinite, fmt::format(text, std::forward<Args>(args)...));
}

/// Throws an Error of kind kInput with the formatted text unless `condition` holds.
template <typename... Args>
void check_input(bool condition, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) fail_input(text, std::forward<Args>(args)...);
}

/// Throws an Error of kind kFailure with the formatted text unless `condition` holds.
template <typename... Args>
void check(bool condition, fmt::format_string<Args...> text, Args&&... args) {
  if (!condition) fail(text, std::forward<Args>(args)...);
}

}  // namespace agoq

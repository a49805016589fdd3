// The version of agoq, from the build system.
#pragma once

namespace agoq {

inline constexpr const char* kVersion = AGOQ_VERSION;

}  // namespace agoq

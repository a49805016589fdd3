// JSON from files that others wrote: parsed with the checks that the parser itself does not make.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace agoq {

/// Parses `text`; `source` names it in messages. Throws Error (kInput) for text that is not JSON, for a
/// key that stands twice in an object (the parser would keep the last), and for nesting of more than
/// `deepest` levels (destruction and printing of a value recurse).
nlohmann::json parse_strict_json(std::string_view text, const std::string& source, int deepest);

}  // namespace agoq

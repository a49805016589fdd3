// JSON to text, and back for what this program wrote itself.
//
// What fills or reads a nlohmann::json need not compile the library's printer and parser as well: they
// are most of what including it costs, and stand in one file. JSON that others wrote:
// checkpoint/strict_json.h.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace agoq {

/// `indent` columns a level, or all in one line if it is negative; no line end at the end. Throws
/// nlohmann::json::exception if a text in it is not UTF-8.
std::string to_text(const nlohmann::json& json, int indent = 2);
std::string to_text(const nlohmann::ordered_json& json, int indent = 2);

/// In one line that can stand in a message, whatever bytes are in it.
std::string printable_json(const nlohmann::json& json);

/// A discarded value (is_discarded()) for text that is not JSON.
nlohmann::ordered_json parse_json(std::string_view text);

}  // namespace agoq

#include "checkpoint/json_text.h"

#include <nlohmann/json.hpp>

#include "checkpoint/durable_file.h"

namespace agoq {

std::string to_text(const nlohmann::json& json, int indent) { return json.dump(indent); }
std::string to_text(const nlohmann::ordered_json& json, int indent) { return json.dump(indent); }

std::string printable_json(const nlohmann::json& json) {
  return printable(json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

nlohmann::ordered_json parse_json(std::string_view text) {
  return nlohmann::ordered_json::parse(text, nullptr, false);
}

}  // namespace agoq

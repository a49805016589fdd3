#include "checkpoint/strict_json.h"

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "checkpoint/durable_file.h"
#include "core/error.h"

namespace agoq {
namespace {

using Json = nlohmann::json;

class Guard {
 public:
  Guard(const std::string& source, int deepest) : source_(source), deepest_(deepest) {}

  bool operator()(int depth, Json::parse_event_t event, const Json& parsed) {
    switch (event) {
      case Json::parse_event_t::object_start:
      case Json::parse_event_t::array_start:
        check_input(depth < deepest_, "'{}': its JSON is nested more than {} levels deep", source_,
                    deepest_);
        if (event == Json::parse_event_t::object_start) keys_.emplace_back();
        break;
      case Json::parse_event_t::object_end: keys_.pop_back(); break;
      case Json::parse_event_t::key: {
        const auto& key = parsed.get_ref<const std::string&>();
        check_input(keys_.back().insert(key).second, "'{}': '{}' stands twice in its JSON", source_,
                    printable(key));
        break;
      }
      default: break;
    }
    return true;
  }

 private:
  const std::string& source_;
  int deepest_;
  std::vector<std::set<std::string>> keys_;
};

}  // namespace

Json parse_strict_json(std::string_view text, const std::string& source, int deepest) {
  Guard guard(source, deepest);
  try {
    return Json::parse(text, std::ref(guard));
  } catch (const Json::parse_error& error) {
    // The parser's own message may quote the file.
    fail_input("'{}': its JSON is broken at byte {}: copy the file again", source, error.byte);
  } catch (const Json::exception&) {
    fail_input("'{}': its JSON has a number out of range", source);
  }
}

}  // namespace agoq

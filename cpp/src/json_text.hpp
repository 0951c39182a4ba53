// JSON values as Python writes them into its messages.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace calib8::json_text {

using Json = nlohmann::ordered_json;

// The value of a JSON text; discarded where it is none, or of over 64 brackets in each other, which
// all that goes through a value would follow down the stack.
Json parse(std::string_view text);

std::string repr(const Json& value);  // 'text', 1.0, None, [1, 2]
std::string str(const Json& value);   // the same, but a text stands without quotes

}  // namespace calib8::json_text

// JSON values as Python writes them into its messages.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace calib8::json_text {

using Json = nlohmann::ordered_json;

std::string repr(const Json& value);  // 'text', 1.0, None, [1, 2]
std::string str(const Json& value);   // the same, but a text stands without quotes

}  // namespace calib8::json_text

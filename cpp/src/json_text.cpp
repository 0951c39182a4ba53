#include "json_text.hpp"

#include "calib8/text.hpp"
#include "number.hpp"

namespace calib8::json_text {
namespace {

std::string join_entries(const Json& value) {
  std::string out;
  for (const auto& [key, entry] : value.items()) {
    out += out.empty() ? "" : ", ";
    out += (value.is_object() ? text::repr(key) + ": " : "") + repr(entry);
  }
  return out;
}

constexpr int kMaxNesting = 64;

bool is_nested_too_deep(std::string_view text) {
  int depth = 0;
  bool quoted = false;
  for (std::size_t k = 0; k < text.size(); ++k) {
    const char c = text[k];
    if (c == '"') quoted = !quoted;
    if (quoted && c == '\\') ++k;
    if (quoted) continue;
    if ((c == '[' || c == '{') && ++depth > kMaxNesting) return true;
    if (c == ']' || c == '}') --depth;
  }
  return false;
}

}  // namespace

Json parse(std::string_view text) {
  if (is_nested_too_deep(text)) return Json(Json::value_t::discarded);
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

std::string repr(const Json& value) {
  if (value.is_string()) return text::repr(value.get<std::string>());
  if (value.is_number_float()) return number::repr(value.get<double>());
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_null()) return "None";
  if (value.is_array()) return "[" + join_entries(value) + "]";
  return value.is_object() ? "{" + join_entries(value) + "}" : value.dump();
}

std::string str(const Json& value) {
  return value.is_string() ? value.get<std::string>() : repr(value);
}

}  // namespace calib8::json_text

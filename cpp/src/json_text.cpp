#include "json_text.hpp"

#include "calib8/text.hpp"
#include "number.hpp"

namespace calib8::json_text {
namespace {

std::string joined(const Json& value) {
  std::string out;
  for (const auto& [key, entry] : value.items()) {
    out += out.empty() ? "" : ", ";
    out += (value.is_object() ? text::repr(key) + ": " : "") + repr(entry);
  }
  return out;
}

}  // namespace

std::string repr(const Json& value) {
  if (value.is_string()) return text::repr(value.get<std::string>());
  if (value.is_number_float()) return number::repr(value.get<double>());
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_null()) return "None";
  if (value.is_array()) return "[" + joined(value) + "]";
  return value.is_object() ? "{" + joined(value) + "}" : value.dump();
}

std::string str(const Json& value) {
  return value.is_string() ? value.get<std::string>() : repr(value);
}

}  // namespace calib8::json_text

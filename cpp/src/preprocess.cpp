#include "calib8/preprocess.hpp"

#include <algorithm>
#include <cmath>

#include "calib8/errors.hpp"
#include "calib8/text.hpp"
#include "json_text.hpp"
#include "names.hpp"
#include "number.hpp"

namespace calib8 {
namespace {

using json_text::Json;
using json_text::repr;
constexpr int kMaxSide = 16384;

int checked_side(const std::string& name, const Json& value) {
  const bool is_valid = value.is_number_integer() && value >= 1 && value <= kMaxSide;
  if (!is_valid) {
    throw ConfigError(name + " must be whole pixels, 1 to " + std::to_string(kMaxSide) + ", got " +
                      repr(value));
  }
  return value.get<int>();
}

Size size_from(const std::string& name, const Json& value) {
  if (!value.is_array() || value.size() != 2) {
    throw ConfigError(name + " must be (height, width), got " + repr(value));
  }
  return {checked_side(name, value[0]), checked_side(name, value[1])};
}

std::vector<double> numbers_from(const std::string& name, const Json& value) {
  const Json list = value.is_array() ? value : Json::array({value});
  std::vector<double> numbers;
  for (const Json& entry : list) {
    const bool is_finite = entry.is_number() && std::fabs(entry.get<double>()) <= 1e30;
    if (!is_finite) throw ConfigError(name + " must be finite numbers, got " + repr(value));
    numbers.push_back(entry.get<double>());
  }
  return numbers;
}

double number_from(const std::string& name, const Json& value) {
  const std::vector<double> numbers = numbers_from(name, value);
  if (value.is_array()) throw ConfigError(name + " must be one number, got " + repr(value));
  return numbers.front();
}

template <class Table>
auto name_from(const Table& table, const std::string& option, const Json& value) {
  const std::string name = value.is_string() ? value.get<std::string>() : std::string();
  return names::find(table, option, name, repr(value));
}

void check_channels(const Preprocess& preprocess, const std::string& name,
                    const std::vector<double>& values) {
  const std::size_t channel_count = static_cast<std::size_t>(preprocess.channels());
  if (values.size() == 1 || values.size() == channel_count) return;
  const std::string color =
      preprocess.color ? names::name_of(names::kColor, *preprocess.color) : "rgb";
  throw ConfigError(name + " must have one value or one per channel of " + color + ", got " +
                    std::to_string(values.size()) + " values; give 1" +
                    (channel_count > 1 ? " or " + std::to_string(channel_count) : ""));
}

void check_side(const std::string& name, int value) { checked_side(name, Json(value)); }

void set_field(Preprocess& preprocess, const std::string& field, const Json& value) {
  if (field == "size") {
    preprocess.size = size_from(field, value);
  } else if (field == "default_size") {
    preprocess.default_size = size_from(field, value);
  } else if (field == "resize") {
    preprocess.resize = name_from(names::kResize, field, value);
  } else if (field == "short_side") {
    preprocess.short_side = checked_side(field, value);
  } else if (field == "interpolation") {
    preprocess.interpolation = name_from(names::kInterpolation, field, value);
  } else if (field == "color") {
    preprocess.color = name_from(names::kColor, field, value);
  } else if (field == "scale") {
    preprocess.scale = number_from(field, value);
  } else if (field == "mean") {
    preprocess.mean = numbers_from(field, value);
  } else if (field == "std") {
    preprocess.std = numbers_from(field, value);
  } else if (field == "pad") {
    preprocess.pad = numbers_from(field, value);
  } else if (field == "anchor") {
    preprocess.anchor = name_from(names::kAnchor, field, value);
  } else if (field == "layout") {
    preprocess.layout = name_from(names::kLayout, field, value);
  }
}

constexpr std::array<std::string_view, 12> kFields{
    "size",  "default_size", "resize", "short_side", "interpolation", "color",
    "scale", "mean",         "std",    "pad",        "anchor",        "layout"};

void check_field(const std::string& field) {
  if (std::find(kFields.begin(), kFields.end(), field) != kFields.end()) return;
  std::string field_list;
  for (const std::string_view field_name : kFields) {
    field_list += (field_list.empty() ? "" : ", ") + std::string(field_name);
  }
  throw ConfigError(text::repr(field) + " is no preprocessing option; there are " + field_list);
}

Json size_json(const std::optional<Size>& size) {
  return size ? Json::array({size->height, size->width}) : Json();
}

template <class Table, class Value>
Json name_json(const Table& table, const std::optional<Value>& value) {
  return value ? Json(names::name_of(table, *value)) : Json();
}

}  // namespace

int Preprocess::channels() const { return color == Color::kGrey ? 1 : 3; }

int Preprocess::short_length() const {
  if (short_side) return *short_side;
  if (!size) {
    throw ConfigError("short_side follows from size, got neither; give one of them");
  }
  return (std::max(size->height, size->width) * 8 + 3) / 7;
}

void Preprocess::check() const {
  for (const auto& [name, given_size] : {std::pair("size", size), {"default_size", default_size}}) {
    if (!given_size) continue;
    check_side(name, given_size->height);
    check_side(name, given_size->width);
  }
  if (short_side) check_side("short_side", *short_side);
  numbers_from("scale", Json(scale));
  for (const auto& [name, values] : {std::pair("mean", &mean), {"std", &std}, {"pad", &pad}}) {
    numbers_from(name, Json(*values));
    check_channels(*this, name, *values);
  }
  const auto is_positive = [](double value) { return static_cast<float>(value) > 0; };
  if (!std::all_of(std.begin(), std.end(), is_positive) || !is_positive(scale)) {
    throw ConfigError("scale and std must be above 0, got scale=" + number::repr(scale) +
                      " std=" + repr(Json(std)) + "; std is what the scaled pixel is divided by");
  }
}

std::string Preprocess::to_json() const {
  Json json;
  json["size"] = size_json(size);
  json["default_size"] = size_json(default_size);
  json["resize"] = names::name_of(names::kResize, resize);
  json["short_side"] = short_side ? Json(*short_side) : Json();
  json["interpolation"] = names::name_of(names::kInterpolation, interpolation);
  json["color"] = name_json(names::kColor, color);
  json["scale"] = scale;
  json["mean"] = mean;
  json["std"] = std;
  json["pad"] = pad;
  json["anchor"] = names::name_of(names::kAnchor, anchor);
  json["layout"] = name_json(names::kLayout, layout);
  return json.dump();
}

Preprocess Preprocess::from_json(const std::string& json) {
  const Json data = json_text::parse(json);
  if (!data.is_object()) {
    throw ConfigError("preprocess must be a JSON object, got " +
                      std::string(data.is_discarded() ? "no JSON" : data.type_name()));
  }
  for (const auto& [field, value] : data.items()) check_field(field);
  Preprocess preprocess;
  for (const auto& [field, value] : data.items()) {
    if (!value.is_null()) set_field(preprocess, field, value);
  }
  preprocess.check();
  return preprocess;
}

}  // namespace calib8

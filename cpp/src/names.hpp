// The options' values by name, in one table each.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "calib8/errors.hpp"
#include "calib8/preprocess.hpp"

namespace calib8::names {

template <class Value, std::size_t N>
using Table = std::array<std::pair<std::string_view, Value>, N>;

inline constexpr Table<Resize, 4> kResize{{{"stretch", Resize::kStretch},
                                           {"letterbox", Resize::kLetterbox},
                                           {"short-side", Resize::kShortSide},
                                           {"fit-height", Resize::kFitHeight}}};
inline constexpr Table<Interpolation, 5> kInterpolation{{{"nearest", Interpolation::kNearest},
                                                         {"linear", Interpolation::kLinear},
                                                         {"cubic", Interpolation::kCubic},
                                                         {"area", Interpolation::kArea},
                                                         {"lanczos", Interpolation::kLanczos}}};
inline constexpr Table<Color, 3> kColor{
    {{"rgb", Color::kRgb}, {"bgr", Color::kBgr}, {"grey", Color::kGrey}}};
inline constexpr Table<Layout, 2> kLayout{{{"nchw", Layout::kNchw}, {"nhwc", Layout::kNhwc}}};
inline constexpr Table<Anchor, 2> kAnchor{
    {{"centre", Anchor::kCentre}, {"top-left", Anchor::kTopLeft}}};

template <class Value, std::size_t N>
std::string name_of(const Table<Value, N>& table, Value value) {
  for (const auto& [name, candidate] : table) {
    if (candidate == value) return std::string(name);
  }
  return {};
}

// Throws ConfigError on a name that is not in the table; `quoted_name` is how the message shows it.
template <class Value, std::size_t N>
Value find(const Table<Value, N>& table, const std::string& option, const std::string& name,
           const std::string& quoted_name) {
  std::string name_list;
  for (const auto& [candidate, value] : table) {
    if (candidate == name) return value;
    name_list += (name_list.empty() ? "" : ", ") + std::string(candidate);
  }
  throw ConfigError(option + " must be one of " + name_list + ", got " + quoted_name);
}

}  // namespace calib8::names

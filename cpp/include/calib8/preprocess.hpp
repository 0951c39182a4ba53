// Preprocessing of images: options, presets, and defaults derived from the model's input.
// The fields are those of deploy/feed/preprocess.py; the JSON is the same in both languages.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

struct Size {
  int height = 0;
  int width = 0;
  bool operator==(const Size& other) const {
    return height == other.height && width == other.width;
  }
};

// A dimension is a number, or a symbol, or (both empty) unknown.
struct Dim {
  Dim() = default;
  // of any integer, and implicit: a shape reads {"n", 3, 224, 224}
  template <class Number, class = std::enable_if_t<std::is_integral_v<Number>>>
  Dim(Number number) : size(static_cast<std::int64_t>(number)) {}
  Dim(std::string name) : symbol(std::move(name)) {}
  Dim(const char* name) : symbol(name) {}
  std::optional<std::int64_t> size;
  std::string symbol;
};

// Name, numpy dtype name and shape of a model's input.
struct TensorSpec {
  std::string name;
  std::string dtype = "float32";
  std::vector<Dim> shape;

  std::string describe() const;  // 'name' dtype [dims]
};

enum class Resize { kStretch, kLetterbox, kShortSide, kFitHeight };
enum class Interpolation { kNearest, kLinear, kCubic, kArea, kLanczos };
enum class Color { kRgb, kBgr, kGrey };
enum class Layout { kNchw, kNhwc };
enum class Anchor { kCentre, kTopLeft };

struct Preprocess {
  std::optional<Size> size;          // pixels; none: the model's own
  std::optional<Size> default_size;  // used if the model leaves its size open
  Resize resize = Resize::kStretch;
  std::optional<int> short_side;  // pixels; none: the longer side of `size` times 8/7
  Interpolation interpolation = Interpolation::kLinear;
  std::optional<Color> color;     // none: grey for one channel, rgb for three
  double scale = 1.0 / 255;       // multiplier of a pixel of 0..255
  std::vector<double> mean{0.0};  // in scaled units, one value or one per channel of `color`
  std::vector<double> std{1.0};
  std::vector<double> pad{0.0};  // the border in pixel units
  Anchor anchor = Anchor::kCentre;
  std::optional<Layout> layout;

  // Throws ConfigError: a value is invalid.
  void check() const;
  int channels() const;  // 1 or 3
  int short_length() const;

  std::string to_json() const;
  // Throws ConfigError: not JSON, an unknown field, or an invalid value.
  static Preprocess from_json(const std::string& json);
};

// The preset of this name: imagenet, yolo, ppocr-rec, ... Throws ConfigError: there is none.
const Preprocess& preset(const std::string& name);

// All presets, sorted by name.
const std::vector<std::pair<std::string, Preprocess>>& presets();

struct Resolved {
  Preprocess preprocess;  // size, color and layout all set
  std::vector<std::string> notes;
};

// The requested preprocessing, completed from the model's input. Throws FeedError: the input is not an image, or
// contradicts the request.
Resolved resolve(const std::optional<Preprocess>& requested, const TensorSpec& spec);

}  // namespace calib8
CALIB8_EXPORT_END

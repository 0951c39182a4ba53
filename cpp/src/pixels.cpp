#include "calib8/pixels.hpp"

#include <array>

#include "calib8/errors.hpp"
#include "geometry.hpp"

namespace calib8 {
namespace {

// One channel's arithmetic: y = ((x * scale) - mean) / std, each step rounded to float.
struct Channel {
  float scale;
  float mean;
  float std;
  float operator()(float pixel) const { return (pixel * scale - mean) / std; }
};

float pick(const std::vector<double>& values, std::size_t channel) {
  return static_cast<float>(values.size() == 1 ? values.front() : values[channel]);
}

void require_fit(const Pixels& pixels, const Preprocess& how) {
  if (!how.size || how.size->height < 1 || how.size->width < 1) {
    throw ConfigError(
        "a picture is fitted into a size of 1x1 at the least, got none; resolve() gives"
        " the model's own");
  }
  const bool whole =
      pixels.height > 0 && pixels.width > 0 && pixels.channels == how.channels() &&
      pixels.data.size() == static_cast<std::size_t>(pixels.height) * pixels.row_bytes();
  if (whole) return;
  throw FeedError(
      "a picture of " + std::to_string(how.channels()) + " channels in uint8 must be given, got " +
      std::to_string(pixels.data.size()) + " values for " + std::to_string(pixels.height) + "x" +
      std::to_string(pixels.width) + "x" + std::to_string(pixels.channels) + "; decode() gives it");
}

}  // namespace

Pixels::Pixels(int rows, int columns, int depth) : height(rows), width(columns), channels(depth) {
  if (rows < 1 || columns < 1 || (depth != 1 && depth != 3)) {
    throw FeedError("a picture must have sides of 1 or more and 1 or 3 channels, got " +
                    std::to_string(rows) + "x" + std::to_string(columns) + "x" +
                    std::to_string(depth));
  }
  data.resize(static_cast<std::size_t>(rows) * row_bytes());
}

std::vector<float> apply(const Pixels& pixels, const Preprocess& how) {
  require_fit(pixels, how);
  const geometry::Placed placed = geometry::fit(pixels, how);
  const auto height = static_cast<std::size_t>(how.size->height);
  const auto width = static_cast<std::size_t>(how.size->width);
  const auto channels = static_cast<std::size_t>(how.channels());
  const bool planes = how.layout != Layout::kNhwc;
  const std::size_t row_step = planes ? width : width * channels;
  const std::size_t pixel_step = planes ? 1 : channels;
  std::vector<float> out(channels * height * width);
  for (std::size_t c = 0; c < channels; ++c) {
    const Channel channel{static_cast<float>(how.scale), pick(how.mean, c), pick(how.std, c)};
    float* plane = out.data() + (planes ? c * height * width : c);
    const std::size_t source = how.color == Color::kRgb ? 2 - c : c;
    const float border = channel(pick(how.pad, c));
    for (std::size_t k = 0; k < height * width; ++k) plane[k * pixel_step] = border;
    for (int y = 0; y < placed.pixels.height; ++y) {
      const std::uint8_t* from = placed.pixels.row(y) + source;
      float* to = plane + static_cast<std::size_t>(placed.top + y) * row_step +
                  static_cast<std::size_t>(placed.left) * pixel_step;
      for (int x = 0; x < placed.pixels.width; ++x, from += channels, to += pixel_step) {
        *to = channel(static_cast<float>(*from));
      }
    }
  }
  return out;
}

}  // namespace calib8

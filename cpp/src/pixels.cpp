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

float value_for_channel(const std::vector<double>& values, std::size_t channel) {
  return static_cast<float>(values.size() == 1 ? values.front() : values[channel]);
}

void check_pixels(const Pixels& pixels, const Preprocess& preprocess) {
  if (!preprocess.size || preprocess.size->height < 1 || preprocess.size->width < 1) {
    throw ConfigError(
        "a picture is fitted into a size of 1x1 at the least, got none; resolve() gives"
        " the model's own");
  }
  preprocess.check();
  const bool is_complete =
      pixels.height > 0 && pixels.width > 0 && pixels.channels == preprocess.channels() &&
      pixels.data.size() == static_cast<std::size_t>(pixels.height) * pixels.row_bytes();
  if (is_complete) return;
  throw FeedError("a picture of " + std::to_string(preprocess.channels()) +
                  " channels in uint8 must be given, got " + std::to_string(pixels.data.size()) +
                  " values for " + std::to_string(pixels.height) + "x" +
                  std::to_string(pixels.width) + "x" + std::to_string(pixels.channels) +
                  "; decode() gives it");
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

std::vector<float> apply(const Pixels& pixels, const Preprocess& preprocess,
                         const std::string& title) {
  check_pixels(pixels, preprocess);
  const geometry::Placed placed = geometry::fit(pixels, preprocess, title);
  const auto height = static_cast<std::size_t>(preprocess.size->height);
  const auto width = static_cast<std::size_t>(preprocess.size->width);
  const auto channels = static_cast<std::size_t>(preprocess.channels());
  const bool is_nchw = preprocess.layout != Layout::kNhwc;
  const std::size_t row_step = is_nchw ? width : width * channels;
  const std::size_t pixel_step = is_nchw ? 1 : channels;
  std::vector<float> out(channels * height * width);
  for (std::size_t c = 0; c < channels; ++c) {
    const Channel channel{static_cast<float>(preprocess.scale),
                          value_for_channel(preprocess.mean, c),
                          value_for_channel(preprocess.std, c)};
    float* plane = out.data() + (is_nchw ? c * height * width : c);
    const std::size_t source_channel = preprocess.color == Color::kRgb ? 2 - c : c;
    const float border = channel(value_for_channel(preprocess.pad, c));
    for (std::size_t k = 0; k < height * width; ++k) plane[k * pixel_step] = border;
    for (int y = 0; y < placed.pixels.height; ++y) {
      const std::uint8_t* pixel = placed.pixels.row(y) + source_channel;
      float* target = plane + static_cast<std::size_t>(placed.top + y) * row_step +
                      static_cast<std::size_t>(placed.left) * pixel_step;
      for (int x = 0; x < placed.pixels.width; ++x, pixel += channels, target += pixel_step) {
        *target = channel(static_cast<float>(*pixel));
      }
    }
  }
  return out;
}

}  // namespace calib8

// From a decoded picture to a model's input: geometry in uint8, then float32 arithmetic.
//
// 1. resize and crop while still uint8;
// 2. y = ((float(pixel) * scale) - mean) / std: three separate float roundings, no fused
//    multiply-add; scale, mean and std are rounded to float first;
// 3. the border of a letterbox is the pad value taken through the same arithmetic;
// 4. channels in the requested order, then NCHW or NHWC.
//
// The same steps as deploy/feed/pixels.py, so that a batch is byte-equal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "calib8/export.hpp"
#include "calib8/preprocess.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

// A picture: uint8 [height, width, channels], row after row; three channels are BGR, one is grey.
struct Pixels {
  int height = 0;
  int width = 0;
  int channels = 0;
  std::vector<std::uint8_t> data;

  Pixels() = default;
  // Filled with 0. Throws FeedError: a side below 1, or channels other than 1 and 3.
  Pixels(int rows, int columns, int depth);

  std::size_t row_bytes() const {
    return static_cast<std::size_t>(width) * static_cast<std::size_t>(channels);
  }
  std::uint8_t* row(int y) { return data.data() + static_cast<std::size_t>(y) * row_bytes(); }
  const std::uint8_t* row(int y) const {
    return data.data() + static_cast<std::size_t>(y) * row_bytes();
  }
};

// uint8 [H, W, C] -> C * h * w floats. `preprocess` must be resolved.
// `title` names the picture in messages. Throws ConfigError: it has no size, or an invalid value; FeedError: other
// channels than `preprocess` states, too little data, or a picture below the crop.
std::vector<float> apply(const Pixels& pixels, const Preprocess& preprocess,
                         const std::string& title = "a picture");

// (h, w) with the short side made `length`, the long one scaled alike and rounded down.
Size short_side_size(Size size, int length);

// (h, w) of the largest picture of the same aspect inside `box`, rounded to the nearest.
Size letterbox_size(Size size, Size box);

}  // namespace calib8
CALIB8_EXPORT_END

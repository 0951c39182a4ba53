#include "geometry.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "calib8/errors.hpp"
#include "resize.hpp"

namespace calib8 {
namespace {

int scale_length(int length, int numerator, int denominator) {
  return static_cast<int>(static_cast<std::int64_t>(length) * numerator / denominator);
}

Pixels resize_pixels(const Pixels& pixels, Size size, const Preprocess& preprocess) {
  if (Size{pixels.height, pixels.width} == size) return pixels;
  const bool enlarges = size.height > pixels.height || size.width > pixels.width;
  const bool uses_linear = preprocess.interpolation == Interpolation::kArea && enlarges;
  return resize(pixels, size, uses_linear ? Interpolation::kLinear : preprocess.interpolation);
}

Pixels crop_centre(const Pixels& pixels, Size size) {
  Pixels out(size.height, size.width, pixels.channels);
  const auto half = [](int length) {  // as torchvision's: half a pixel becomes the even number
    return static_cast<int>(std::nearbyint(length / 2.0));
  };
  const int top = half(pixels.height - size.height);
  const int left = half(pixels.width - size.width);
  for (int y = 0; y < size.height; ++y) {
    std::copy_n(pixels.row(top + y) + left * pixels.channels, out.row_bytes(), out.row(y));
  }
  return out;
}

std::string size_text(Size size) {
  return std::to_string(size.height) + "x" + std::to_string(size.width);
}

void refuse_below_crop(Size resized, Size crop, Size source, int short_side,
                       const std::string& title) {
  if (resized.height >= crop.height && resized.width >= crop.width) return;
  throw FeedError(title + " of " + size_text(source) + " must reach the crop of " +
                  size_text(crop) + ", got " + size_text(resized) + " once its short side is " +
                  std::to_string(short_side) + "; give a larger --short-side");
}

}  // namespace

Size short_side_size(Size size, int length) {
  if (size.height <= size.width) {
    return {length, scale_length(size.width, length, size.height)};
  }
  return {scale_length(size.height, length, size.width), length};
}

Size letterbox_size(Size size, Size box) {
  const double ratio = std::min(static_cast<double>(box.height) / size.height,
                                static_cast<double>(box.width) / size.width);
  const auto scaled = [ratio](int length) {  // half a pixel becomes the even number
    return std::max(1, static_cast<int>(std::nearbyint(length * ratio)));
  };
  return {scaled(size.height), scaled(size.width)};
}

namespace geometry {

Placed fit(const Pixels& pixels, const Preprocess& preprocess, const std::string& title) {
  const Size target = preprocess.size.value();
  const Size source{pixels.height, pixels.width};
  switch (preprocess.resize) {
    case Resize::kShortSide: {
      const Size resized = short_side_size(source, preprocess.short_length());
      refuse_below_crop(resized, target, source, preprocess.short_length(), title);
      return {crop_centre(resize_pixels(pixels, resized, preprocess), target), 0, 0};
    }
    case Resize::kLetterbox: {
      const Size inner = letterbox_size(source, target);
      const bool is_centred = preprocess.anchor == Anchor::kCentre;
      return {resize_pixels(pixels, inner, preprocess),
              is_centred ? (target.height - inner.height) / 2 : 0,
              is_centred ? (target.width - inner.width) / 2 : 0};
    }
    case Resize::kFitHeight: {
      const auto product = static_cast<std::int64_t>(target.height) * source.width;
      const auto width =
          std::min<std::int64_t>(target.width, (product + source.height - 1) / source.height);
      return {resize_pixels(pixels, {target.height, static_cast<int>(width)}, preprocess), 0, 0};
    }
    case Resize::kStretch: break;
  }
  return {resize_pixels(pixels, target, preprocess), 0, 0};
}

}  // namespace geometry
}  // namespace calib8

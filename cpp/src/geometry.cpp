#include "geometry.hpp"

#include <algorithm>

#include "resize.hpp"

namespace calib8 {
namespace {

int scale_length(int length, int numerator, int denominator, bool rounds_to_nearest) {
  const auto product = static_cast<std::int64_t>(length) * numerator;
  const auto divisor = static_cast<std::int64_t>(denominator);
  return static_cast<int>(rounds_to_nearest ? (2 * product + divisor) / (2 * divisor)
                                            : product / divisor);
}

Pixels resize_pixels(const Pixels& pixels, Size size, const Preprocess& preprocess) {
  if (Size{pixels.height, pixels.width} == size) return pixels;
  const bool enlarges = size.height > pixels.height || size.width > pixels.width;
  const bool uses_linear = preprocess.interpolation == Interpolation::kArea && enlarges;
  return resize(pixels, size, uses_linear ? Interpolation::kLinear : preprocess.interpolation);
}

Pixels crop_centre(const Pixels& pixels, Size size) {
  Pixels out(size.height, size.width, pixels.channels);
  const int top = (pixels.height - size.height) / 2;
  const int left = (pixels.width - size.width) / 2;
  for (int y = 0; y < size.height; ++y) {
    std::copy_n(pixels.row(top + y) + left * pixels.channels, out.row_bytes(), out.row(y));
  }
  return out;
}

}  // namespace

Size short_side_size(Size size, int length) {
  if (size.height <= size.width) {
    return {length, scale_length(size.width, length, size.height, false)};
  }
  return {scale_length(size.height, length, size.width, false), length};
}

Size letterbox_size(Size size, Size box) {
  const auto width_product = static_cast<std::int64_t>(box.width) * size.height;
  const auto height_product = static_cast<std::int64_t>(box.height) * size.width;
  if (width_product <= height_product) {
    const int inner = scale_length(size.height, box.width, size.width, true);
    return {std::clamp(inner, 1, box.height), box.width};
  }
  return {box.height,
          std::clamp(scale_length(size.width, box.height, size.height, true), 1, box.width)};
}

namespace geometry {

Placed fit(const Pixels& pixels, const Preprocess& preprocess) {
  const Size target = preprocess.size.value();
  const Size source{pixels.height, pixels.width};
  switch (preprocess.resize) {
    case Resize::kShortSide:
      return {crop_centre(resize_pixels(pixels, short_side_size(source, preprocess.short_length()),
                                        preprocess),
                          target),
              0, 0};
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

#include "geometry.hpp"

#include <algorithm>

#include "resize.hpp"

namespace calib8 {
namespace {

int scaled(int length, int numerator, int denominator, bool nearest) {
  const auto product = static_cast<std::int64_t>(length) * numerator;
  const auto over = static_cast<std::int64_t>(denominator);
  return static_cast<int>(nearest ? (2 * product + over) / (2 * over) : product / over);
}

Pixels resized(const Pixels& pixels, Size size, const Preprocess& how) {
  if (Size{pixels.height, pixels.width} == size) return pixels;
  const bool enlarges = size.height > pixels.height || size.width > pixels.width;
  const bool linear = how.interpolation == Interpolation::kArea && enlarges;
  return resize(pixels, size, linear ? Interpolation::kLinear : how.interpolation);
}

Pixels cropped(const Pixels& pixels, Size size) {
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
    return {length, scaled(size.width, length, size.height, false)};
  }
  return {scaled(size.height, length, size.width, false), length};
}

Size letterbox_size(Size size, Size box) {
  const auto wide = static_cast<std::int64_t>(box.width) * size.height;
  const auto high = static_cast<std::int64_t>(box.height) * size.width;
  if (wide <= high) {
    const int inner = scaled(size.height, box.width, size.width, true);
    return {std::clamp(inner, 1, box.height), box.width};
  }
  return {box.height, std::clamp(scaled(size.width, box.height, size.height, true), 1, box.width)};
}

namespace geometry {

Placed fit(const Pixels& pixels, const Preprocess& how) {
  const Size out = how.size.value();
  const Size in{pixels.height, pixels.width};
  switch (how.resize) {
    case Resize::kShortSide:
      return {cropped(resized(pixels, short_side_size(in, how.short_length()), how), out), 0, 0};
    case Resize::kLetterbox: {
      const Size inner = letterbox_size(in, out);
      const bool centre = how.anchor == Anchor::kCentre;
      return {resized(pixels, inner, how), centre ? (out.height - inner.height) / 2 : 0,
              centre ? (out.width - inner.width) / 2 : 0};
    }
    case Resize::kFitHeight: {
      const auto product = static_cast<std::int64_t>(out.height) * in.width;
      const auto width = std::min<std::int64_t>(out.width, (product + in.height - 1) / in.height);
      return {resized(pixels, {out.height, static_cast<int>(width)}, how), 0, 0};
    }
    case Resize::kStretch: break;
  }
  return {resized(pixels, out, how), 0, 0};
}

}  // namespace geometry
}  // namespace calib8

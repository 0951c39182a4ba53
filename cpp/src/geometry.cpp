#include "geometry.hpp"

#include <algorithm>
#include <opencv2/imgproc.hpp>

#include "calib8/pixels.hpp"

namespace calib8 {
namespace {

int scaled(int length, int numerator, int denominator, bool nearest) {
  const auto product = static_cast<std::int64_t>(length) * numerator;
  const auto over = static_cast<std::int64_t>(denominator);
  return static_cast<int>(nearest ? (2 * product + over) / (2 * over) : product / over);
}

int flag(Interpolation interpolation) {
  switch (interpolation) {
    case Interpolation::kNearest: return cv::INTER_NEAREST;
    case Interpolation::kCubic: return cv::INTER_CUBIC;
    case Interpolation::kArea: return cv::INTER_AREA;
    case Interpolation::kLanczos: return cv::INTER_LANCZOS4;
    case Interpolation::kLinear: break;
  }
  return cv::INTER_LINEAR;
}

cv::Mat resized(const cv::Mat& pixels, Size size, const Preprocess& how) {
  if (Size{pixels.rows, pixels.cols} == size) return pixels;
  const bool enlarges = size.height > pixels.rows || size.width > pixels.cols;
  const bool linear = how.interpolation == Interpolation::kArea && enlarges;
  cv::Mat out;
  cv::resize(pixels, out, {size.width, size.height}, 0, 0,
             linear ? cv::INTER_LINEAR : flag(how.interpolation));
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

Placed fit(const cv::Mat& pixels, const Preprocess& how) {
  const Size out = how.size.value();
  const Size in{pixels.rows, pixels.cols};
  switch (how.resize) {
    case Resize::kShortSide: {
      const cv::Mat whole = resized(pixels, short_side_size(in, how.short_length()), how);
      const int top = (whole.rows - out.height) / 2;
      const int left = (whole.cols - out.width) / 2;
      return {whole({left, top, out.width, out.height}), 0, 0};
    }
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

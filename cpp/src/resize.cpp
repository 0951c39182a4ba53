#include "resize.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace calib8 {
namespace {

std::vector<int> nearest_indices(int from, int to) {
  const double scale = resizing::scale(from, to);
  std::vector<int> index(static_cast<std::size_t>(to));
  for (int k = 0; k < to; ++k) {
    index[static_cast<std::size_t>(k)] =
        std::min(static_cast<int>(std::floor(k * scale)), from - 1);
  }
  return index;
}

Pixels resize_nearest(const Pixels& from, Size size) {
  Pixels out(size.height, size.width, from.channels);
  const std::vector<int> columns = nearest_indices(from.width, size.width);
  const std::vector<int> rows = nearest_indices(from.height, size.height);
  for (int y = 0; y < size.height; ++y) {
    const std::uint8_t* source = from.row(rows[static_cast<std::size_t>(y)]);
    std::uint8_t* to = out.row(y);
    for (const int x : columns) to = std::copy_n(source + x * from.channels, from.channels, to);
  }
  return out;
}

// Linear to exactly half the size is the mean of four, which area computes.
bool is_exact_half(const Pixels& from, Size size) {
  return from.height == 2 * size.height && from.width == 2 * size.width;
}

}  // namespace

Pixels resize(const Pixels& from, Size size, Interpolation kind) {
  switch (kind) {
    case Interpolation::kNearest: return resize_nearest(from, size);
    case Interpolation::kArea: return resizing::area(from, size);
    case Interpolation::kLinear:
      if (is_exact_half(from, size)) return resizing::area(from, size);
      break;
    case Interpolation::kCubic:
    case Interpolation::kLanczos: break;
  }
  return resizing::filter(from, size, kind);
}

}  // namespace calib8

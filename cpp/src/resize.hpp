// Resizing of uint8 pictures, to the values of OpenCV's resize without IPP on x86, which Python
// uses: INTER_NEAREST, _LINEAR, _CUBIC, _AREA, _LANCZOS4. The same on every machine.
#pragma once

#include <cstdint>

#include "calib8/pixels.hpp"

namespace calib8 {

// `size` must not be larger than the picture in either side where the kind is area.
Pixels resize(const Pixels& from, Size size, Interpolation kind);

namespace resizing {

// How many pixels of the source one of the result spans.
inline double scale(int from, int to) { return 1.0 / (static_cast<double>(to) / from); }

// The nearest whole number, ties to even, kept in 0..255; for |value| < 2^22. Adding 1.5 * 2^23
// leaves a float no bits for a fraction; unlike std::lrint a compiler makes vector code of it.
inline std::uint8_t rounded(float value) {
  constexpr float kNoFraction = 12582912.0F;
  const float whole = (value + kNoFraction) - kNoFraction;
  return static_cast<std::uint8_t>(whole < 0.0F ? 0.0F : whole > 255.0F ? 255.0F : whole);
}

Pixels filter(const Pixels& from, Size size, Interpolation kind);
Pixels area(const Pixels& from, Size size);

}  // namespace resizing
}  // namespace calib8

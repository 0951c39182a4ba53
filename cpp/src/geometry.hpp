// Where a picture goes in the input.
#pragma once

#include "calib8/pixels.hpp"

namespace calib8::geometry {

struct Placed {
  Pixels pixels;
  int top = 0;
  int left = 0;
};

// uint8 picture -> uint8 picture at its place's size, and its corner in the input.
Placed fit(const Pixels& pixels, const Preprocess& preprocess);

}  // namespace calib8::geometry

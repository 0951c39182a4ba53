// Where a picture goes in the input.
#pragma once

#include <string>

#include "calib8/pixels.hpp"

namespace calib8::geometry {

struct Placed {
  Pixels pixels;
  int top = 0;
  int left = 0;
};

// uint8 picture -> uint8 picture at its place's size, and its corner in the input. `title` names the
// picture. Throws FeedError: it is smaller than the crop.
Placed fit(const Pixels& pixels, const Preprocess& preprocess, const std::string& title);

}  // namespace calib8::geometry

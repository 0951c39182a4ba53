// Where a picture goes in the input.
#pragma once

#include <opencv2/core/mat.hpp>

#include "calib8/preprocess.hpp"

namespace calib8::geometry {

struct Placed {
  cv::Mat pixels;
  int top = 0;
  int left = 0;
};

// uint8 picture -> uint8 picture at its place's size, and its corner in the input.
Placed fit(const cv::Mat& pixels, const Preprocess& how);

}  // namespace calib8::geometry

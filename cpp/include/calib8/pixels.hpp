// From a decoded picture to a model's input: geometry in uint8, then float32 arithmetic.
//
// 1. resize and crop while still uint8;
// 2. y = ((float(pixel) * scale) - mean) / std: three separate float roundings, no fused
//    multiply-add; scale, mean and std are rounded to float first;
// 3. the border of a letterbox is the pad value taken through the same arithmetic;
// 4. channels in the order asked for, then NCHW or NHWC.
//
// The same steps as deploy/feed/pixels.py, so that a batch is byte-equal.
#pragma once

#include <opencv2/core/mat.hpp>
#include <vector>

#include "calib8/preprocess.hpp"

namespace calib8 {

// uint8 [H, W, C] in OpenCV's channel order -> C * h * w floats. `how` must be resolved.
// Throws ConfigError: it has no size; FeedError: other channels or another type than it says.
std::vector<float> apply(const cv::Mat& pixels, const Preprocess& how);

// (h, w) with the short side made `length`, the long one scaled alike and rounded down.
Size short_side_size(Size size, int length);

// (h, w) of the largest picture of the same aspect inside `box`, rounded to the nearest.
Size letterbox_size(Size size, Size box);

}  // namespace calib8

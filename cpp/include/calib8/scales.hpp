// The clip range of one activation tensor and its scale on the int8 grid.
#pragma once

#include <string>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

// The clip range of one tensor, in real units; as calibrators/scales.py.
struct Scale {
  double lo = 0;  // clip range of an affine grid, lo <= hi
  double hi = 0;
  double amax = 0;          // threshold of a symmetric grid, >= 0
  double observed_min = 0;  // extremes of the data, unclipped
  double observed_max = 0;
  std::string method;

  // Throws CalibrationError unless all are finite, lo <= hi and amax >= 0.
  void check() const;

  // Real value of one step of the symmetric int8 grid: amax / 127, divided in double, rounded once.
  float symmetric() const;
};

}  // namespace calib8
CALIB8_EXPORT_END

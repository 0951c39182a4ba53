// MSE calibration: the clip range with the least squared error between x and its stored value.
//
// Symmetric: tries thresholds amax * r for a falling r. Affine: first lowers the end that lies further
// from 0, then the other, each with the best value of the other, twice in turn. The error comes
// from the histogram: a bin's values count at its centre. As calibrators/mse.py, for int8 and uint8.
#pragma once

#include "calib8/export.hpp"
#include "calib8/histogram.hpp"
#include "calib8/scales.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8::mse {

// Statistics of one tensor -> its clip range. Throws CalibrationError on an empty histogram.
Scale scale(const Histogram& histogram);

}  // namespace calib8::mse
CALIB8_EXPORT_END

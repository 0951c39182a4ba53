// MSE calibration: the clip range with the least squared error between x and its stored value.
//
// Symmetric: thresholds amax * r are tried for a falling r. Affine: first the end that lies further
// from 0 is lowered, then the other, each against the other's best, twice over. The error comes
// from the histogram: a bin's values stand at its centre. As calibrators/mse.py, for int8 and uint8.
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

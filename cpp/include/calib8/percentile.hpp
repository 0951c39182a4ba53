// Percentile calibration: clip the tails that hold less than a given share of the values; as
// in calibrators/percentile.py.
#pragma once

#include <cstdint>
#include <vector>

#include "calib8/export.hpp"
#include "calib8/histogram.hpp"
#include "calib8/scales.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8::percentiles {

constexpr double kPercent = 99.99;

// Throws CalibrationError unless 50 < percent <= 100.
void check(double percent);

// Statistics of one tensor -> the range that holds `percent` of its values. The symmetric threshold is the percentile of |x|; the affine range cuts each side at its own percentile.
// Throws CalibrationError on another percent or an empty histogram.
Scale scale(const Histogram& histogram, double percent = kPercent);

// The clip range at the quantile in the header of TensorRT's legacy table, without its regression.
Scale legacy(const Histogram& histogram);

// Counts -> position of the quantile `share` in 0..size, in bins, linear within a bin.
double quantile(const std::vector<std::int64_t>& counts, double share);

}  // namespace calib8::percentiles
CALIB8_EXPORT_END

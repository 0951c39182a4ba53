// Entropy calibration: the clip threshold with the least KL divergence, as TensorRT searches it.
//
// For every i from 128 to 2048 the first i bins of a 2048-bin histogram of |x| are kept:
//
//   h:  bin 0    1 ............ i-1 | i ............ 2047
//       (set 0)  kept               | outliers, added to P's bin i-1
//       |----- 128 levels of -------|
//       bin j belongs to level floor(j * 128 / i)
//
//   P = kept bins + outliers in the last one        what the data looks like, clipped
//   Q = each level's raw sum, spread evenly over    what 128 integers can represent of it
//       those of its bins that are not empty
//
// The smallest KL(P || Q) wins, the last i among equals; threshold T = (i + 0.5) * R / 2048.
// Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017; the details as in
// calibrators/entropy.py; the order of the sums is the same here.
#pragma once

#include <cstdint>
#include <vector>

#include "calib8/export.hpp"
#include "calib8/histogram.hpp"
#include "calib8/scales.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8::entropy {

constexpr int kBins = 2048;
constexpr int kLevels = 128;

// [2048] counts of |x| over [0, R] -> i in 128..2048, the number of bins kept.
// Throws CalibrationError on another size or a negative count.
int search(const std::vector<std::int64_t>& histogram);

// Bins kept -> clip threshold in real units.
double threshold(int i, double full_range);

// KL(P || Q) of keeping the first i bins of h ([2048] counts, h[0] == 0); inf where P > 0 = Q.
// Throws CalibrationError: another size, or i outside 128..2048.
double divergence(const std::vector<double>& h, int i);

// Statistics of one tensor -> its clip range.
Scale scale(const Histogram& histogram);

}  // namespace calib8::entropy
CALIB8_EXPORT_END

#include "calib8/scales.hpp"

#include <cmath>

#include "calib8/errors.hpp"
#include "number.hpp"

namespace calib8 {
namespace {

constexpr double kInt8Max = 127.0;

}  // namespace

void Scale::check() const {
  bool is_valid = lo <= hi && amax >= 0;
  for (const double value : {lo, hi, amax, observed_min, observed_max}) {
    is_valid = is_valid && std::isfinite(value);
  }
  if (!is_valid) {
    throw CalibrationError(
        "a scale needs finite lo <= hi and amax >= 0, got lo=" + number::repr(lo) +
        " hi=" + number::repr(hi) + " amax=" + number::repr(amax));
  }
}

float Scale::symmetric() const { return static_cast<float>(amax / kInt8Max); }

}  // namespace calib8

// The threshold searches by name; the names are those of calibrators/searches.py.
//
//   mse               the least squared error of the quantized values; the default
//   minmax            clips nothing
//   percentile        clips a share of the values
//   entropy           the least KL divergence, as TensorRT does
//   entropy-tensorrt  the same on TensorRT's own histogram, whose range starts with the first batch
//   legacy            TensorRT's legacy calibrator without its regression
//
// Python's `lp` is not available: its powers differ in the last bit from one libm to another.
#pragma once

#include <string>
#include <vector>

#include "calib8/export.hpp"
#include "calib8/histogram.hpp"
#include "calib8/percentile.hpp"
#include "calib8/scales.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

class Search {
 public:
  // `percent` is for "percentile" alone. Throws ConfigError: an unknown name; CalibrationError: a
  // percent that is not over 50 and at most 100.
  explicit Search(std::string name = "mse", double percent = percentiles::kPercent);

  static const std::vector<std::string>& names();

  // An empty histogram for the search; `first` is the first batch of the tensor.
  Histogram start(const float* first, std::size_t count) const;

  // Statistics of one tensor -> its clip range. Throws CalibrationError on an empty histogram, or one
  // with infinite values.
  Scale scale(const Histogram& histogram) const;

 private:
  std::string name_;
  double percent_;
};

}  // namespace calib8
CALIB8_EXPORT_END

// Streaming histogram of one tensor: fixed size, any order, exact merges.
//
// A value x of a tensor whose range is R falls into bin trunc(x * kBins / R), in float32; bin 0
// holds |x| < R / kBins and bins k and -k mirror each other. A later value beyond R doubles R until
// it fits and merges bins pairwise, outwards from 0, which is exact.
//
//   Histogram()      R is the smallest power of two that holds the data: a function of the set of
//                    values alone, whatever their order, batches or threads.
//   Histogram(base)  R starts at `base`, TensorRT's rule with the first batch's largest |x|.
//
// The counts equal those of calibrators/histogram.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

// Not thread-safe: one thread at a time changes a histogram; give each thread its own and merge() them.
class Histogram {
 public:
  static constexpr std::int64_t kBins = 4096;  // per side; twice TensorRT's 2048

  Histogram();
  // Throws CalibrationError unless base is finite and >= 0; 0 is the order-independent rule.
  explicit Histogram(double base);

  // Adds `count` values. Infinite values are counted in `infinite` and are in no bin.
  // Throws CalibrationError on a NaN.
  void observe(const float* values, std::size_t count);

  // Adds the values of `other`; exact, in any order. Throws CalibrationError on unequal bases.
  void merge(const Histogram& other);

  // Counts of |x| over [0, R] in `bins` bins. Throws CalibrationError unless `bins` divides kBins.
  std::vector<std::int64_t> magnitudes(std::int64_t bins) const;

  // [2 * kBins - 1] counts between edges(); the middle bin spans both sides of 0.
  std::vector<std::int64_t> signed_counts() const;

  // [2 * kBins] edges of those bins, in real units, ascending.
  std::vector<double> edges() const;

  // [2 * kBins + 1] signed counts, index kBins is bin 0.
  const std::vector<std::int64_t>& counts() const { return counts_; }
  double full_range() const {
    return full_range_;
  }                                            // R in real units; 0 while there are only zeros
  double minimum() const { return minimum_; }  // inf while empty
  double maximum() const { return maximum_; }  // -inf while empty
  double amax() const;                         // largest |x|; 0 while empty
  std::int64_t total() const { return total_; }
  std::int64_t infinite() const { return infinite_; }
  std::optional<double> base() const { return base_; }

 private:
  void widen_to(double target);

  std::optional<double> base_;
  std::vector<std::int64_t> counts_;
  double full_range_ = 0;
  double minimum_ = std::numeric_limits<double>::infinity();
  double maximum_ = -std::numeric_limits<double>::infinity();
  std::int64_t total_ = 0;
  std::int64_t infinite_ = 0;
};

// Smallest power of two >= amax. Throws CalibrationError unless that is finite.
double range_for(double amax);

}  // namespace calib8
CALIB8_EXPORT_END

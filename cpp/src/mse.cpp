#include "calib8/mse.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "pairwise.hpp"

namespace calib8::mse {
namespace {

constexpr double kInt8Steps = 254.0;  // width of the clip range in scales: -128 is not used
constexpr double kUint8Steps = 255.0;

using Ratios = std::array<double, 120>;

// 1.00, 0.99 ... 0.21, then 0.200, 0.195 ... 0.005.
Ratios ratios() {
  Ratios result{};
  for (std::size_t k = 0; k < result.size(); ++k) {
    const auto step = static_cast<double>(k);
    result[k] = (k < 80 ? 100.0 - step : 20.0 - (step - 80.0) * 0.5) / 100.0;
  }
  return result;
}

// Half to even, of numbers far below 2^51: in vectors on every CPU, which std::nearbyint is not.
inline double rounded(double x) {
  constexpr double kWhole = 0x1.8p52;  // doubles there are whole numbers
  return (x + kWhole) - kWhole;
}

// The bins that hold anything but the one around 0, whose values lose nothing to clipping.
struct Bins {
  std::vector<double> centres;
  std::vector<double> counts;

  void add(double centre, std::int64_t count) {
    if (count <= 0 || !(std::fabs(centre) > 0)) return;
    centres.push_back(centre);
    counts.push_back(static_cast<double>(count));
  }
};

struct Range {
  double low;
  double high;
};

// Summed squared error of storing the bins' centres over a range.
double error(const Bins& bins, Range range, double steps, std::vector<double>& terms) {
  double scale = (range.high - range.low) / steps;
  if (!(scale > 0)) scale = 1.0;
  const double* const centre = bins.centres.data();
  const double* const count = bins.counts.data();
  double* const term = terms.data();
  const std::size_t size = terms.size();
  for (std::size_t k = 0; k < size; ++k) {
    const double clipped = std::min(std::max(centre[k], range.low), range.high);
    const double difference = rounded(clipped / scale) * scale - centre[k];
    term[k] = difference * difference * count[k];
  }
  return pairwise::sum(terms);
}

// The first of the ranges with the least error.
template <typename RangeOf>
Range least_error_range(const Bins& bins, double steps, RangeOf range_of) {
  std::vector<double> terms(bins.centres.size());
  const Ratios candidates = ratios();
  Range best = range_of(candidates[0]);
  double smallest = error(bins, best, steps, terms);
  for (std::size_t k = 1; k < candidates.size(); ++k) {
    const Range range = range_of(candidates[k]);
    const double candidate_error = error(bins, range, steps, terms);
    if (candidate_error < smallest) {
      smallest = candidate_error;
      best = range;
    }
  }
  return best;
}

double symmetric(const Histogram& histogram) {
  const std::vector<std::int64_t> counts = histogram.magnitudes(Histogram::kBins);
  Bins bins;
  for (std::size_t k = 0; k < counts.size(); ++k) {
    bins.add((static_cast<double>(k) + 0.5) * histogram.full_range() /
                 static_cast<double>(Histogram::kBins),
             counts[k]);
  }
  const double amax = histogram.amax();
  if (bins.centres.empty()) return amax;
  return least_error_range(bins, kInt8Steps,
                           [&](double ratio) {
                             return Range{-(amax * ratio), amax * ratio};
                           })
      .high;
}

Range affine(const Histogram& histogram) {
  const std::vector<double> edges = histogram.edges();
  const std::vector<std::int64_t> counts = histogram.signed_counts();
  Bins bins;
  for (std::size_t k = 0; k < counts.size(); ++k) {
    bins.add((edges[k] + edges[k + 1]) / 2, counts[k]);
  }
  const double bottom = std::min(histogram.minimum(), 0.0);
  const double top = std::max(histogram.maximum(), 0.0);
  Range range{bottom, top};
  if (bins.centres.empty()) return range;
  const bool high_first = range.high >= -range.low;
  for (int turn = 0; turn < 4; ++turn) {
    const bool moves_high = (turn % 2 == 0) == high_first;
    range = least_error_range(bins, kUint8Steps, [&](double ratio) {
      return moves_high ? Range{range.low, top * ratio} : Range{bottom * ratio, range.high};
    });
  }
  return range;
}

}  // namespace

Scale scale(const Histogram& histogram) {
  const double amax = symmetric(histogram);
  const Range range = affine(histogram);
  Scale result{range.low, range.high, amax, histogram.minimum(), histogram.maximum(), "mse"};
  result.check();
  return result;
}

}  // namespace calib8::mse

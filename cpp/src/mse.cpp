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
  Ratios found{};
  for (std::size_t k = 0; k < found.size(); ++k) {
    const auto step = static_cast<double>(k);
    found[k] = (k < 80 ? 100.0 - step : 20.0 - (step - 80.0) * 0.5) / 100.0;
  }
  return found;
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
    const double lost = rounded(clipped / scale) * scale - centre[k];
    term[k] = lost * lost * count[k];
  }
  return pairwise::sum(terms);
}

// The first of the ranges with the least error.
template <typename RangeOf>
Range least(const Bins& bins, double steps, RangeOf range_of) {
  std::vector<double> terms(bins.centres.size());
  const Ratios tried = ratios();
  Range best = range_of(tried[0]);
  double smallest = error(bins, best, steps, terms);
  for (std::size_t k = 1; k < tried.size(); ++k) {
    const Range range = range_of(tried[k]);
    const double found = error(bins, range, steps, terms);
    if (found < smallest) {
      smallest = found;
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
  return least(bins, kInt8Steps,
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
  Range found{bottom, top};
  if (bins.centres.empty()) return found;
  const bool high_first = found.high >= -found.low;
  for (int turn = 0; turn < 4; ++turn) {
    const bool high = (turn % 2 == 0) == high_first;
    found = least(bins, kUint8Steps, [&](double ratio) {
      return high ? Range{found.low, top * ratio} : Range{bottom * ratio, found.high};
    });
  }
  return found;
}

}  // namespace

Scale scale(const Histogram& histogram) {
  const double amax = symmetric(histogram);
  const Range range = affine(histogram);
  Scale found{range.low, range.high, amax, histogram.minimum(), histogram.maximum(), "mse"};
  found.check();
  return found;
}

}  // namespace calib8::mse

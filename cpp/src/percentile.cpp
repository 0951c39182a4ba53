#include "calib8/percentile.hpp"

#include <algorithm>
#include <cstdio>

#include "calib8/errors.hpp"
#include "number.hpp"

namespace calib8::percentiles {
namespace {

constexpr double kLegacyQuantile = 0.999999;

// The value at a quantile of the signed values.
double value_at_quantile(const Histogram& histogram, double share) {
  const double position = quantile(histogram.signed_counts(), share);
  const std::vector<double> edges = histogram.edges();
  const auto below = static_cast<std::size_t>(position);
  if (below == edges.size() - 1) return edges[below];
  return (edges[below + 1] - edges[below]) * (position - static_cast<double>(below)) + edges[below];
}

std::string method_of(double percent) {
  char text[64];
  std::snprintf(text, sizeof text, "percentile-%g", percent);
  return text;
}

}  // namespace

double quantile(const std::vector<std::int64_t>& counts, double share) {
  std::vector<std::int64_t> sums(1, 0);
  sums.reserve(counts.size() + 1);
  for (const std::int64_t count : counts) sums.push_back(sums.back() + count);
  const double rank = share * static_cast<double>(sums.back());
  const auto first_reached = std::find_if(
      sums.begin(), sums.end(), [&](std::int64_t sum) { return static_cast<double>(sum) >= rank; });
  if (first_reached == sums.begin()) return 0.0;
  const auto sum_before = static_cast<double>(first_reached[-1]);
  const auto bin_count = static_cast<double>(first_reached[0] - first_reached[-1]);
  return static_cast<double>(first_reached - sums.begin() - 1) + (rank - sum_before) / bin_count;
}

void check(double percent) {
  if (!(percent > 50 && percent <= 100)) {
    throw CalibrationError("a percentile must be over 50 and at most 100, got " +
                           number::repr(percent));
  }
}

Scale scale(const Histogram& histogram, double percent) {
  check(percent);
  const double share = percent / 100;
  const double amax = quantile(histogram.magnitudes(Histogram::kBins), share) *
                      histogram.full_range() / static_cast<double>(Histogram::kBins);
  const double minimum = histogram.minimum();
  const double maximum = histogram.maximum();
  const double low = minimum < 0
                         ? std::max(minimum, std::min(value_at_quantile(histogram, 1 - share), 0.0))
                         : minimum;
  const double high =
      maximum > 0 ? std::min(maximum, std::max(value_at_quantile(histogram, share), 0.0)) : maximum;
  Scale result{
      std::min(low, maximum),  // values that share one bin: its quantiles may lie beyond them
      std::max(high, minimum), std::min(amax, histogram.amax()), minimum, maximum,
      method_of(percent)};
  result.check();
  return result;
}

Scale legacy(const Histogram& histogram) {
  Scale result = scale(histogram, kLegacyQuantile * 100);
  result.method = "legacy";
  return result;
}

}  // namespace calib8::percentiles

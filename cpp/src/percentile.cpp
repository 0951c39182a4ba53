#include "calib8/percentile.hpp"

#include <algorithm>
#include <cstdio>

#include "calib8/errors.hpp"
#include "number.hpp"

namespace calib8::percentiles {
namespace {

constexpr double kLegacyQuantile = 0.999999;

// The value at a quantile of the signed values.
double edge(const Histogram& histogram, double share) {
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
  const auto reached = std::find_if(
      sums.begin(), sums.end(), [&](std::int64_t sum) { return static_cast<double>(sum) >= rank; });
  if (reached == sums.begin()) return 0.0;
  const auto before = static_cast<double>(reached[-1]);
  const auto inside = static_cast<double>(reached[0] - reached[-1]);
  return static_cast<double>(reached - sums.begin() - 1) + (rank - before) / inside;
}

void check(double percent) {
  if (!(percent > 50 && percent <= 100)) {
    throw CalibrationError("a percentile must be over 50 and at most 100, got " +
                           number::repr(percent));
  }
}

Scale scale(const Histogram& histogram, double percent) {
  check(percent);
  const double keep = percent / 100;
  const double amax = quantile(histogram.magnitudes(Histogram::kBins), keep) *
                      histogram.full_range() / static_cast<double>(Histogram::kBins);
  const double least = histogram.minimum();
  const double most = histogram.maximum();
  const double low = least < 0 ? std::max(least, std::min(edge(histogram, 1 - keep), 0.0)) : least;
  const double high = most > 0 ? std::min(most, std::max(edge(histogram, keep), 0.0)) : most;
  Scale found{std::min(low, most),  // values that share one bin: its quantiles may lie beyond them
              std::max(high, least), std::min(amax, histogram.amax()), least, most,
              method_of(percent)};
  found.check();
  return found;
}

Scale legacy(const Histogram& histogram) {
  Scale found = scale(histogram, kLegacyQuantile * 100);
  found.method = "legacy";
  return found;
}

}  // namespace calib8::percentiles

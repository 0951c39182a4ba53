#include "calib8/entropy.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "calib8/errors.hpp"
#include "pairwise.hpp"

namespace calib8::entropy {
namespace {

// Each level's sum spread evenly over those of its bins that are not empty.
std::vector<double> spread(const std::vector<double>& h, std::size_t i) {
  std::vector<double> sums(kLevels, 0.0);
  std::vector<double> occupied(kLevels, 0.0);
  for (std::size_t j = 0; j < i; ++j) {
    sums[j * kLevels / i] += h[j];
    occupied[j * kLevels / i] += h[j] > 0 ? 1.0 : 0.0;
  }
  std::vector<double> q(i, 0.0);
  for (std::size_t j = 0; j < i; ++j) {
    const std::size_t level = j * kLevels / i;
    if (h[j] > 0) q[j] = sums[level] / std::max(occupied[level], 1.0);
  }
  return q;
}

}  // namespace

double divergence(const std::vector<double>& h, int kept) {
  if (h.size() != kBins || kept < kLevels || kept > kBins) {
    throw CalibrationError("a divergence is of " + std::to_string(kLevels) + " to " +
                           std::to_string(kBins) + " bins kept of " + std::to_string(kBins) +
                           ", got " + std::to_string(kept) + " of " + std::to_string(h.size()));
  }
  const auto i = static_cast<std::size_t>(kept);
  const auto split = h.begin() + kept;
  std::vector<double> p(h.begin(), split);
  p.back() += std::accumulate(split, h.end(), 0.0);  // whole numbers: exact in any order
  const std::vector<double> q = spread(h, i);
  const double p_sum = pairwise::sum(p);
  const double q_sum = pairwise::sum(q);
  if (!(q_sum > 0)) return std::numeric_limits<double>::infinity();
  std::vector<double> terms;
  terms.reserve(i);
  for (std::size_t j = 0; j < i; ++j) {
    if (!(p[j] > 0)) continue;
    if (!(q[j] > 0)) return std::numeric_limits<double>::infinity();
    const double pj = p[j] / p_sum;
    terms.push_back(pj * std::log(pj / (q[j] / q_sum)));
  }
  return pairwise::sum(terms);
}

int search(const std::vector<std::int64_t>& histogram) {
  const auto negative = [](std::int64_t count) { return count < 0; };
  if (histogram.size() != kBins || std::any_of(histogram.begin(), histogram.end(), negative)) {
    throw CalibrationError("the entropy search needs " + std::to_string(kBins) +
                           " counts >= 0, got " + std::to_string(histogram.size()) +
                           " or a negative one; fold the histogram first");
  }
  std::vector<double> h(histogram.begin(), histogram.end());
  h[0] = 0;
  if (std::all_of(h.begin(), h.end(), [](double count) { return !(count > 0); })) return kBins;
  double best = std::numeric_limits<double>::infinity();
  int winner = kBins;
  for (int i = kLevels; i <= kBins; ++i) {
    const double kl = divergence(h, i);
    if (kl <= best) {
      best = kl;
      winner = i;
    }
  }
  return winner;
}

double threshold(int i, double full_range) { return (i + 0.5) * full_range / kBins; }

Scale scale(const Histogram& histogram) {
  const double amax = threshold(search(histogram.magnitudes(kBins)), histogram.full_range());
  Scale found{std::max(histogram.minimum(), -amax),
              std::min(histogram.maximum(), amax),
              amax,
              histogram.minimum(),
              histogram.maximum(),
              histogram.base() ? "entropy-tensorrt" : "entropy"};
  found.check();
  return found;
}

}  // namespace calib8::entropy

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
std::vector<double> spread_levels(const std::vector<double>& h, std::size_t i) {
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

constexpr double kTolerance = 1e-9;  // prefix-sum divergences are this close to the summed ones

double xlogx(double x) { return x > 0 ? x * std::log(x) : 0.0; }

// Sums of the first k values, [n + 1].
template <typename Of>
std::vector<double> prefix_sums(const std::vector<double>& h, Of of) {
  std::vector<double> sums(1, 0.0);
  sums.reserve(h.size() + 1);
  for (const double count : h) sums.push_back(sums.back() + of(count));
  return sums;
}

// KL of every i in 128..2048 at once, from prefix sums: [1921]. With s, n the sum and the occupied
// bins of a level, S the kept and A all counts,
// A * KL = sum h ln h - sum s ln(s / n) + last-bin correction + A ln(S / A).
std::vector<double> divergences(const std::vector<double>& h) {
  const auto sums = prefix_sums(h, [](double count) { return count; });
  const auto occupied = prefix_sums(h, [](double count) { return count > 0 ? 1.0 : 0.0; });
  const auto logs = prefix_sums(h, xlogx);
  const double total = sums.back();
  std::vector<double> result;
  result.reserve(kBins - kLevels + 1);
  for (std::size_t i = kLevels; i <= kBins; ++i) {
    const double last_bin = h[i - 1];
    const double outliers = total - sums[i];
    if (!(sums[i] > 0) || (!(last_bin > 0) && outliers > 0)) {
      result.push_back(std::numeric_limits<double>::infinity());
      continue;
    }
    double cross = 0;
    double log_mean = 0;  // of the last level that holds anything; it holds the last bin
    std::size_t start = 0;
    for (std::size_t level = 1; level <= kLevels; ++level) {  // bins j, start <= j < end
      const std::size_t end = (level * i + kLevels - 1) / kLevels;
      const double sum = sums[end] - sums[start];
      if (sum > 0) {
        log_mean = std::log(sum / (occupied[end] - occupied[start]));
        cross += sum * log_mean;
      }
      start = end;
    }
    result.push_back((logs[i] - xlogx(last_bin) + xlogx(last_bin + outliers) - cross -
                      outliers * log_mean + total * std::log(sums[i] / total)) /
                     total);
  }
  return result;
}

}  // namespace

double divergence(const std::vector<double>& h, int kept_bins) {
  if (h.size() != kBins || kept_bins < kLevels || kept_bins > kBins) {
    throw CalibrationError("a divergence is of " + std::to_string(kLevels) + " to " +
                           std::to_string(kBins) + " bins kept of " + std::to_string(kBins) +
                           ", got " + std::to_string(kept_bins) + " of " +
                           std::to_string(h.size()));
  }
  const auto i = static_cast<std::size_t>(kept_bins);
  const auto split = h.begin() + kept_bins;
  std::vector<double> p(h.begin(), split);
  p.back() += std::accumulate(split, h.end(), 0.0);  // whole numbers: exact in any order
  const std::vector<double> q = spread_levels(h, i);
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
  const std::vector<double> approximate = divergences(h);
  const double max_candidate =
      *std::min_element(approximate.begin(), approximate.end()) + kTolerance;
  double best = std::numeric_limits<double>::infinity();
  int winner = kBins;
  for (int i = kLevels; i <= kBins; ++i) {
    if (!(approximate[static_cast<std::size_t>(i - kLevels)] <= max_candidate)) continue;
    const double kl = divergence(h, i);  // summed term by term, so that equal ones compare equal
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
  Scale result{std::max(histogram.minimum(), -amax),
               std::min(histogram.maximum(), amax),
               amax,
               histogram.minimum(),
               histogram.maximum(),
               histogram.base() ? "entropy-tensorrt" : "entropy"};
  result.check();
  return result;
}

}  // namespace calib8::entropy

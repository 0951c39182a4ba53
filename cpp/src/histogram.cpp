#include "calib8/histogram.hpp"

#include <algorithm>
#include <cmath>

#include "calib8/errors.hpp"
#include "number.hpp"

namespace calib8 {
namespace {

using Counts = std::vector<std::int64_t>;
constexpr std::int64_t kBins = Histogram::kBins;
constexpr auto kCells = static_cast<std::size_t>(2 * kBins + 1);

constexpr std::size_t kChunk = std::size_t{1} << 17U;  // values binned at a time
constexpr double kSmallestRange = 0x1p-100;  // below this kBins / R would overflow float32

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index + kBins); }

// The histogram of the doubled range: index k goes to trunc(k / 2).
Counts halve(const Counts& counts) {
  Counts merged(kCells, 0);
  for (std::int64_t k = -kBins; k <= kBins; ++k) merged[at(k / 2)] += counts[at(k)];
  return merged;
}

struct Extremes {
  float low = std::numeric_limits<float>::infinity();
  float high = -std::numeric_limits<float>::infinity();
  std::int64_t infinite = 0;
  std::int64_t nan = 0;
};

Extremes extremes(const float* values, std::size_t count) {
  Extremes found;
  for (std::size_t k = 0; k < count; ++k) {
    const float x = values[k];
    if (std::isfinite(x)) {
      found.low = std::min(found.low, x);
      found.high = std::max(found.high, x);
    } else {
      (std::isnan(x) ? found.nan : found.infinite) += 1;
    }
  }
  return found;
}

// |x| == R is counted in the last bin inside the range.
void close(Counts& counts) {
  counts[at(-kBins + 1)] += counts[at(-kBins)];
  counts[at(kBins - 1)] += counts[at(kBins)];
  counts[at(-kBins)] = counts[at(kBins)] = 0;
}

std::string shown(const std::optional<double>& base) {
  return base ? number::repr(*base) : "None";
}

}  // namespace

double range_for(double amax) {
  int exponent = 0;
  const double mantissa = std::frexp(std::max(amax, kSmallestRange), &exponent);
  return std::ldexp(1.0, mantissa == 0.5 ? exponent - 1 : exponent);
}

Histogram::Histogram() : counts_(kCells, 0) {}

Histogram::Histogram(double base) : counts_(kCells, 0) {
  if (!(std::isfinite(base) && base >= 0)) {
    throw CalibrationError("a histogram's base range must be finite and >= 0, got " +
                           number::repr(base));
  }
  if (base > 0) base_ = std::max(base, kSmallestRange);
}

double Histogram::amax() const {
  return total_ > 0 ? std::max(std::fabs(minimum_), std::fabs(maximum_)) : 0.0;
}

void Histogram::observe(const float* values, std::size_t count) {
  for (; count > kChunk; values += kChunk, count -= kChunk) observe_chunk(values, kChunk);
  observe_chunk(values, count);
}

void Histogram::observe_chunk(const float* values, std::size_t count) {
  const Extremes found = extremes(values, count);
  if (found.nan > 0) {
    throw CalibrationError("values must be numbers, got " + std::to_string(found.nan) + " NaN");
  }
  infinite_ += found.infinite;
  const auto finite = static_cast<std::int64_t>(count) - found.infinite;
  if (finite == 0) return;
  const double low = found.low;
  const double high = found.high;
  widen(std::max(std::fabs(low), std::fabs(high)));
  minimum_ = std::min(minimum_, low);
  maximum_ = std::max(maximum_, high);
  total_ += finite;
  if (full_range_ <= 0) {
    counts_[at(0)] += finite;
    return;
  }
  const auto scale = static_cast<float>(static_cast<double>(kBins) / full_range_);
  for (std::size_t k = 0; k < count; ++k) {
    if (!std::isfinite(values[k])) continue;
    counts_[at(static_cast<std::int64_t>(values[k] * scale))] += 1;  // the cast truncates
  }
  if (base_) close(counts_);
}

void Histogram::merge(const Histogram& other) {
  if (base_ != other.base_) {
    throw CalibrationError("histograms merge only with equal bases, got " + shown(base_) +
                           " and " + shown(other.base_));
  }
  widen_to(other.full_range_);
  Counts counts = other.counts_;
  for (double range = other.full_range_; range > 0 && range < full_range_; range *= 2) {
    counts = halve(counts);
  }
  for (std::size_t k = 0; k < kCells; ++k) counts_[k] += counts[k];
  minimum_ = std::min(minimum_, other.minimum_);
  maximum_ = std::max(maximum_, other.maximum_);
  total_ += other.total_;
  infinite_ += other.infinite_;
}

std::vector<std::int64_t> Histogram::magnitudes(std::int64_t bins) const {
  if (bins < 1 || kBins % bins != 0) {
    throw CalibrationError("a histogram folds into bins that divide " + std::to_string(kBins) +
                           ", got " + std::to_string(bins));
  }
  Counts counts = counts_;
  close(counts);
  Counts folded(static_cast<std::size_t>(bins), 0);
  const std::int64_t width = kBins / bins;
  for (std::int64_t k = -kBins + 1; k < kBins; ++k) {
    folded[static_cast<std::size_t>((k < 0 ? -k : k) / width)] += counts[at(k)];
  }
  return folded;
}

void Histogram::widen(double amax) {
  if (amax <= full_range_) return;
  double target = range_for(amax);
  if (base_) {
    target = full_range_ > 0 ? full_range_ : *base_;
    while (target < amax) target *= 2;
  }
  widen_to(target);
}

void Histogram::widen_to(double target) {
  if (full_range_ <= 0) full_range_ = target;
  while (full_range_ < target) {
    counts_ = halve(counts_);
    full_range_ *= 2;
  }
}

}  // namespace calib8

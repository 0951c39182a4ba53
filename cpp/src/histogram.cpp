#include "calib8/histogram.hpp"

#include <algorithm>
#include <cmath>

#include "calib8/errors.hpp"
#include "kernel/count.h"
#include "number.hpp"

namespace calib8 {
namespace {

using Counts = std::vector<std::int64_t>;
constexpr std::int64_t kBins = Histogram::kBins;
constexpr auto kCells = static_cast<std::size_t>(2 * kBins + 1);

static_assert(Histogram::kBins == CALIB8_BINS && kCells == CALIB8_CELLS);

std::size_t cell_of(std::int64_t index) { return static_cast<std::size_t>(index + kBins); }

// This thread's tables, zero between two calls of the kernel.
void* thread_scratch() {
  thread_local std::vector<std::uint64_t> tables(CALIB8_SCRATCH / sizeof(std::uint64_t), 0);
  return tables.data();
}

std::string format_base(const std::optional<double>& base) {
  return base ? number::repr(*base) : "None";
}

}  // namespace

double range_for(double amax) {
  if (!std::isfinite(amax)) {
    throw CalibrationError("a range is of a finite number, got " + number::repr(amax));
  }
  return calib8_range_for(amax);
}

Histogram::Histogram() : counts_(kCells, 0) {}

Histogram::Histogram(double base) : counts_(kCells, 0) {
  if (!(std::isfinite(base) && base >= 0)) {
    throw CalibrationError("a histogram's base range must be finite and >= 0, got " +
                           number::repr(base));
  }
  if (base > 0) base_ = std::max(base, CALIB8_SMALLEST_RANGE);
}

double Histogram::amax() const {
  return total_ > 0 ? std::max(std::fabs(minimum_), std::fabs(maximum_)) : 0.0;
}

void Histogram::observe(const float* values, std::size_t count) {
  static const int fastest = calib8_kernel_ways() - 1;
  calib8_histogram_state state{
      base_.value_or(0.0), full_range_, minimum_, maximum_, 0.0, total_, infinite_};
  const std::int64_t nan_count =
      calib8_observe(fastest, &state, counts_.data(), values, count, thread_scratch());
  full_range_ = state.full_range;
  minimum_ = state.minimum;
  maximum_ = state.maximum;
  total_ = state.total;
  infinite_ = state.infinite;
  if (nan_count > 0) {
    throw CalibrationError("values must be numbers, got " + std::to_string(nan_count) + " NaN");
  }
}

void Histogram::merge(const Histogram& other) {
  if (base_ != other.base_) {
    throw CalibrationError("histograms merge only with equal bases, got " + format_base(base_) +
                           " and " + format_base(other.base_));
  }
  widen_to(other.full_range_);
  Counts counts = other.counts_;
  for (double range = other.full_range_; range > 0 && range < full_range_; range *= 2) {
    calib8_halve(counts.data());
  }
  for (std::size_t k = 0; k < kCells; ++k) counts_[k] += counts[k];
  minimum_ = std::min(minimum_, other.minimum_);
  maximum_ = std::max(maximum_, other.maximum_);
  total_ += other.total_;
  infinite_ += other.infinite_;
}

std::vector<std::int64_t> Histogram::signed_counts() const {
  Counts counts = counts_;
  calib8_close(counts.data());
  return {counts.begin() + 1, counts.end() - 1};
}

std::vector<double> Histogram::edges() const {
  const double width = full_range_ / static_cast<double>(kBins);
  std::vector<double> edges;
  edges.reserve(2 * static_cast<std::size_t>(kBins));
  for (std::int64_t k = -kBins; k <= kBins; ++k) {
    if (k != 0) edges.push_back(static_cast<double>(k) * width);
  }
  return edges;
}

std::vector<std::int64_t> Histogram::magnitudes(std::int64_t bins) const {
  if (bins < 1 || kBins % bins != 0) {
    throw CalibrationError("a histogram folds into bins that divide " + std::to_string(kBins) +
                           ", got " + std::to_string(bins));
  }
  Counts counts = counts_;
  calib8_close(counts.data());
  Counts folded(static_cast<std::size_t>(bins), 0);
  const std::int64_t width = kBins / bins;
  for (std::int64_t k = -kBins + 1; k < kBins; ++k) {
    folded[static_cast<std::size_t>((k < 0 ? -k : k) / width)] += counts[cell_of(k)];
  }
  return folded;
}

void Histogram::widen_to(double target) {
  if (full_range_ <= 0) full_range_ = target;
  while (full_range_ < target) {
    calib8_halve(counts_.data());
    full_range_ *= 2;
  }
}

}  // namespace calib8

#include <algorithm>
#include <cmath>
#include <random>

#include "calib8/entropy.hpp"
#include "calib8/errors.hpp"
#include "catch.hpp"

using namespace calib8;

namespace {

std::vector<std::int64_t> normal_histogram(double size) {
  std::mt19937 random(5);
  std::normal_distribution<double> normal(0, size);
  std::vector<std::int64_t> counts(entropy::kBins, 0);
  for (int k = 0; k < 50000; ++k) {
    counts[static_cast<std::size_t>(std::min(2047.0, std::fabs(normal(random))))] += 1;
  }
  return counts;
}

}  // namespace

TEST_CASE("the search finds the least divergence, the last among equals") {
  const std::vector<std::int64_t> counts = normal_histogram(300);
  std::vector<double> h(counts.begin(), counts.end());
  h[0] = 0;
  const int found = entropy::search(counts);
  const double least = entropy::divergence(h, found);
  for (int i = entropy::kLevels; i <= entropy::kBins; ++i) {
    const double kl = entropy::divergence(h, i);
    CHECK((i > found ? kl > least : kl >= least));
  }
}

TEST_CASE("a constant and a sparse tensor keep the whole range") {
  std::vector<std::int64_t> constant(entropy::kBins, 0);
  constant[2047] = 1000;
  CHECK(entropy::search(constant) == 2048);
  std::vector<std::int64_t> strides(entropy::kBins, 0);
  strides[512] = strides[1024] = strides[2047] = 8400;
  CHECK(entropy::search(strides) == 2048);
  CHECK(entropy::search(std::vector<std::int64_t>(entropy::kBins, 0)) == 2048);
}

TEST_CASE("KL is infinite where the clipped tail falls into an empty bin") {
  std::vector<double> h(entropy::kBins, 1.0);
  h[0] = 0;
  h[199] = 0;
  CHECK(std::isinf(entropy::divergence(h, 200)));
  CHECK(std::isfinite(entropy::divergence(h, 199)));
}

TEST_CASE("thresholds and scales") {
  CHECK(entropy::threshold(2040, 1.0) == Approx(0.996338));
  Histogram histogram(1.0);
  std::vector<float> values(2048);
  for (std::size_t k = 0; k < values.size(); ++k) values[k] = static_cast<float>(k + 1) / 2048.0F;
  histogram.observe(values.data(), values.size());
  const Scale scale = entropy::scale(histogram);
  CHECK(scale.method == "entropy-tensorrt");
  CHECK(scale.observed_max == 1.0);
  CHECK(scale.symmetric() == static_cast<float>(scale.amax / 127));
  Histogram independent;
  CHECK_THROWS_AS(entropy::scale(independent), CalibrationError);
  independent.observe(values.data(), values.size());
  CHECK(entropy::scale(independent).method == "entropy");
}

TEST_CASE("a histogram of another size is refused") {
  CHECK_THROWS_AS(entropy::search({1, 2, 3}), CalibrationError);
  std::vector<std::int64_t> negative(entropy::kBins, 0);
  negative[3] = -1;
  CHECK_THROWS_AS(entropy::search(negative), CalibrationError);
}

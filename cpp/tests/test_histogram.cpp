#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "calib8/errors.hpp"
#include "calib8/histogram.hpp"
#include "catch.hpp"

using calib8::Histogram;

namespace {

std::vector<float> noise(std::size_t count, unsigned seed, float size) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, size);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

Histogram of(const std::vector<float>& values) {
  Histogram histogram;
  histogram.observe(values.data(), values.size());
  return histogram;
}

}  // namespace

TEST_CASE("counts do not depend on order, batches or merges") {
  std::vector<float> values = noise(300000, 1, 3.0F);
  const Histogram whole = of(values);
  CHECK(whole.total() == 300000);
  CHECK(std::accumulate(whole.counts().begin(), whole.counts().end(), std::int64_t{0}) == 300000);
  Histogram parts;
  for (std::size_t at = 0; at < values.size(); at += 7001) {
    parts.observe(values.data() + at, std::min<std::size_t>(7001, values.size() - at));
  }
  CHECK(parts.counts() == whole.counts());
  std::sort(values.begin(), values.end(), [](float a, float b) { return a > b; });
  CHECK(of(values).counts() == whole.counts());
  Histogram merged = of({values.begin(), values.begin() + 1000});
  merged.merge(of({values.begin() + 1000, values.end()}));
  CHECK(merged.counts() == whole.counts());
  CHECK(merged.full_range() == whole.full_range());
}

TEST_CASE("the range is a power of two, or doubles from TensorRT's base") {
  CHECK(of({0.75F}).full_range() == 1.0);
  CHECK(of({1.0F}).full_range() == 1.0);
  CHECK(of({1.5F, -3.0F}).full_range() == 4.0);
  Histogram faithful(0.75);
  const std::vector<float> first{0.75F, -0.1F};
  faithful.observe(first.data(), first.size());
  CHECK(faithful.full_range() == 0.75);
  CHECK(faithful.magnitudes(2048)[2047] == 1);
  const float later = 2.0F;
  faithful.observe(&later, 1);
  CHECK(faithful.full_range() == 3.0);
  CHECK(faithful.magnitudes(2048)[511] == 1);
  CHECK(faithful.amax() == 2.0);
}

TEST_CASE("zeros, infinities and NaN") {
  Histogram histogram = of({0.0F, 0.0F});
  CHECK(histogram.full_range() == 0.0);
  CHECK(histogram.magnitudes(2048)[0] == 2);
  const float infinite[] = {INFINITY, -INFINITY, 1.0F};
  histogram.observe(infinite, 3);
  CHECK(histogram.infinite() == 2);
  CHECK(histogram.total() == 3);
  CHECK(histogram.maximum() == 1.0);
  const float nan = NAN;
  CHECK_THROWS_AS(histogram.observe(&nan, 1), calib8::CalibrationError);
  CHECK_THROWS_AS(Histogram(-1.0), calib8::CalibrationError);
  CHECK_THROWS_AS(Histogram(INFINITY), calib8::CalibrationError);
  Histogram based(2.0);
  CHECK_THROWS_AS(based.merge(histogram), calib8::CalibrationError);
  CHECK(of({1e-38F}).full_range() > 0);
  CHECK(of({std::numeric_limits<float>::max()}).total() == 1);
  CHECK(of({}).amax() == 0.0);
}

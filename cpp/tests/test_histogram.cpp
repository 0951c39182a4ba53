#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "calib8/errors.hpp"
#include "calib8/histogram.hpp"
#include "catch.hpp"
#include "kernel/count.h"

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
  const Histogram complete = of(values);
  CHECK(complete.total() == 300000);
  CHECK(std::accumulate(complete.counts().begin(), complete.counts().end(), std::int64_t{0}) ==
        300000);
  Histogram pieces;
  for (std::size_t offset = 0; offset < values.size(); offset += 7001) {
    pieces.observe(values.data() + offset, std::min<std::size_t>(7001, values.size() - offset));
  }
  CHECK(pieces.counts() == complete.counts());
  std::sort(values.begin(), values.end(), [](float a, float b) { return a > b; });
  CHECK(of(values).counts() == complete.counts());
  Histogram merged = of({values.begin(), values.begin() + 1000});
  merged.merge(of({values.begin() + 1000, values.end()}));
  CHECK(merged.counts() == complete.counts());
  CHECK(merged.full_range() == complete.full_range());
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

TEST_CASE("every way of the kernel counts the same") {
  std::vector<float> values = noise((std::size_t{1} << 17U) + 4099, 3, 2.0F);
  for (std::size_t k = 0; k < values.size(); k += 3) values[k] = 0.0F;
  values[70000] = 900.0F;  // the range grows within a chunk
  for (const std::size_t size : {std::size_t{1}, std::size_t{17}, std::size_t{2048},
                                 std::size_t{2049}, std::size_t{8195}, values.size()}) {
    const Histogram expected = of({values.begin(), values.begin() + static_cast<long>(size)});
    for (int method = 0; method < calib8_kernel_ways(); ++method) {
      CAPTURE(size, calib8_kernel_way(method));
      std::vector<std::int64_t> counts(CALIB8_CELLS, 0);
      std::vector<std::uint64_t> scratch(CALIB8_SCRATCH / 8, 0);
      calib8_histogram_state state{0, 0, INFINITY, -INFINITY, 0, 0, 0};
      const std::vector<float> exact(values.begin(), values.begin() + static_cast<long>(size));
      CHECK(calib8_observe(method, &state, counts.data(), exact.data(), size, scratch.data()) == 0);
      CHECK(counts == expected.counts());
      CHECK(state.total == expected.total());
      CHECK(state.full_range == expected.full_range());
      CHECK(scratch == std::vector<std::uint64_t>(scratch.size(), 0));
    }
  }
  CHECK(calib8_kernel_way(-1) == nullptr);
}

TEST_CASE("several histograms in one call are those of a call each") {
  const std::vector<std::vector<float>> values = {noise(5000, 4, 2.0F), {}, noise(3, 5, 1.0F)};
  std::vector<std::vector<std::int64_t>> counts(3, std::vector<std::int64_t>(CALIB8_CELLS, 0));
  std::vector<std::uint64_t> scratch(CALIB8_SCRATCH / 8, 0);
  const calib8_histogram_state empty{0, 0, INFINITY, -INFINITY, 0, 0, 0};
  std::vector<calib8_histogram_state> state(3, empty);
  std::vector<calib8_histogram_state*> states;
  std::vector<std::int64_t*> tables;
  std::vector<const float*> from;
  std::vector<std::size_t> sizes;
  for (std::size_t k = 0; k < 3; ++k) {
    states.push_back(&state[k]);
    tables.push_back(counts[k].data());
    from.push_back(values[k].data());
    sizes.push_back(values[k].size());
  }
  std::size_t done = 0;
  const auto call = [&] {
    return calib8_observe_each(0, 3, states.data(), tables.data(), from.data(), sizes.data(),
                               scratch.data(), &done);
  };
  CHECK(call() == 0);
  CHECK(done == 3);
  for (std::size_t k = 0; k < 3; ++k) {
    const Histogram expected = of(values[k]);
    CHECK(counts[k] == expected.counts());
    CHECK(state[k].total == expected.total());
  }
  const std::vector<float> odd = {1.0F, NAN, NAN};
  from[2] = odd.data();
  CHECK(call() == 2);
  CHECK(done == 2);
}

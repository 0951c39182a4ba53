#include <algorithm>
#include <cmath>
#include <random>

#include "calib8/errors.hpp"
#include "calib8/searches.hpp"
#include "catch.hpp"

using calib8::Histogram;
using calib8::Search;

namespace {

Histogram of(const std::vector<float>& values) {
  Histogram histogram;
  histogram.observe(values.data(), values.size());
  return histogram;
}

}  // namespace

TEST_CASE("every search has a name, and gives its scale") {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> values(20000);
  for (float& value : values) value = normal(random);
  values[0] = 100.0F;
  const Histogram seen = of(values);
  for (const std::string& name : Search::names()) {
    const calib8::Scale scale = Search(name).scale(seen);
    CAPTURE(name);
    CHECK(scale.observed_max == 100.0);
    CHECK(scale.amax > 2.0);
    CHECK(scale.hi <= 100.0);
    CHECK(scale.method.rfind(name == "entropy-tensorrt" ? "entropy" : name, 0) == 0);
  }
  CHECK(Search("minmax").scale(seen).amax == 100.0);
  CHECK(Search().scale(seen).amax < 100.0);
  CHECK(Search("percentile", 100).scale(seen).amax == 100.0);
  CHECK(Search("percentile", 99.0).scale(seen).amax < 3.0);
}

TEST_CASE("zeros have a range of 0, and nothing has none") {
  const Histogram zeros = of({0.0F, -0.0F});
  for (const std::string& name : Search::names()) {
    CHECK(Search(name).scale(zeros).amax == 0.0);
    CHECK_THROWS_AS(Search(name).scale(Histogram()), calib8::CalibrationError);
  }
}

TEST_CASE("infinite values are refused, as by Python") {
  const Histogram overflowed = of({1.0F, INFINITY, -INFINITY});
  for (const std::string& name : Search::names()) {
    CHECK_THROWS_WITH(Search(name).scale(overflowed),
                      "a search needs finite values, got 1 and 2 infinite ones");
  }
}

TEST_CASE("the range of TensorRT's own search starts with the first batch") {
  const float first[] = {0.75F, -0.5F};
  CHECK(Search("entropy-tensorrt").start(first, 2).base() == 0.75);
  CHECK_FALSE(Search("entropy").start(first, 2).base());
}

TEST_CASE("unknown searches and shares are refused") {
  CHECK_THROWS_AS(Search("kl"), calib8::ConfigError);
  CHECK_THROWS_AS(Search("percentile", 50), calib8::CalibrationError);
  CHECK_THROWS_AS(Search("percentile", 100.5), calib8::CalibrationError);
}

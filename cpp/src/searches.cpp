#include "calib8/searches.hpp"

#include <algorithm>

#include "calib8/entropy.hpp"
#include "calib8/errors.hpp"
#include "calib8/mse.hpp"

namespace calib8 {
namespace {

Scale minmax(const Histogram& histogram) {
  Scale result{histogram.minimum(), histogram.maximum(), histogram.amax(),
               histogram.minimum(), histogram.maximum(), "minmax"};
  result.check();
  return result;
}

std::string join_names(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

const std::vector<std::string>& Search::names() {
  static const std::vector<std::string> kNames{"mse",     "minmax",           "percentile",
                                               "entropy", "entropy-tensorrt", "legacy"};
  return kNames;
}

Search::Search(std::string name, double percent) : name_(std::move(name)), percent_(percent) {
  if (std::find(names().begin(), names().end(), name_) == names().end()) {
    throw ConfigError("a search is one of " + join_names(names()) + ", got '" + name_ + "'");
  }
  if (name_ == "percentile") percentiles::check(percent_);
}

Histogram Search::start(const float* first, std::size_t count) const {
  if (name_ != "entropy-tensorrt") return {};
  Histogram probe;
  probe.observe(first, count);
  return Histogram(probe.amax());
}

Scale Search::scale(const Histogram& histogram) const {
  if (histogram.infinite() > 0 || histogram.total() == 0) {
    throw CalibrationError("a search needs finite values, got " +
                           std::to_string(histogram.total()) + " and " +
                           std::to_string(histogram.infinite()) + " infinite ones");
  }
  if (name_ == "minmax") return minmax(histogram);
  if (name_ == "percentile") return percentiles::scale(histogram, percent_);
  if (name_ == "mse") return mse::scale(histogram);
  if (name_ == "legacy") return percentiles::legacy(histogram);
  return entropy::scale(histogram);
}

}  // namespace calib8

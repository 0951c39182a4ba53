// What was asked, completed from the model's input.
#include <algorithm>
#include <sstream>

#include "calib8/errors.hpp"
#include "calib8/preprocess.hpp"
#include "calib8/text.hpp"
#include "names.hpp"

namespace calib8 {
namespace {

constexpr std::int64_t kLongest = 1 << 30;  // beyond what any check lets pass

bool one_or_three(const Dim& dim) { return dim.size == 1 || dim.size == 3; }

Layout layout_of(const std::vector<Dim>& shape) {
  return one_or_three(shape[3]) && !one_or_three(shape[1]) ? Layout::kNhwc : Layout::kNchw;
}

std::string shown(const Size& size) {
  return std::to_string(size.height) + "x" + std::to_string(size.width);
}

std::string upper(Layout layout) { return layout == Layout::kNchw ? "NCHW" : "NHWC"; }

Size resolve_size(const Preprocess& how, const Dim& height, const Dim& width,
                  const TensorSpec& spec) {
  const auto own = [&](const Dim& dim, int Size::*side) -> int {
    if (how.size) return (*how.size).*side;
    if (dim.size) return static_cast<int>(std::clamp<std::int64_t>(*dim.size, 0, kLongest));
    if (how.default_size) return (*how.default_size).*side;
    throw FeedError("the input " + spec.describe() +
                    " leaves its size open; give a size, such as 224x224");
  };
  const Size size{own(height, &Size::height), own(width, &Size::width)};
  const bool fits = height.size.value_or(size.height) == size.height &&
                    width.size.value_or(size.width) == size.width;
  if (!fits) {
    throw FeedError("the size must fit the input " + spec.describe() +
                    ", which accepts no other, got " + shown(size) +
                    "; leave the size out to use the model's own, or, if the model is fully" +
                    " convolutional, declare the sides of its inputs and outputs open (dim_param)");
  }
  return size;
}

void check_crop(const Preprocess& how) {
  const int crop = std::max(how.size->height, how.size->width);
  if (how.resize != Resize::kShortSide || how.short_length() >= crop) return;
  throw ConfigError("short_side must reach the crop of " + shown(*how.size) + ", got " +
                    std::to_string(*how.short_side) + "; give " + std::to_string(crop) +
                    " or more");
}

std::string listed(const std::vector<double>& values, int digits) {
  std::ostringstream out;
  out.precision(digits);
  for (std::size_t at = 0; at < values.size(); ++at) out << (at ? "," : "") << values[at];
  return out.str();
}

// A mean of pixels as they are where scaled ones are fed: all would be alike.
void check_mean(const Preprocess& how) {
  const double top = 255 * how.scale;
  const double most = *std::max_element(how.mean.begin(), how.mean.end());
  if (most <= top * (1 + 1e-6)) return;
  std::vector<double> own = how.mean;
  for (double& value : own) value *= how.scale;
  throw ConfigError("mean is taken from scaled pixels, which go from 0 to " + listed({top}, 4) +
                    ", got " + listed(how.mean, 6) + "; give scale 1 if it is a mean of raw" +
                    " pixels, or the mean of scaled ones, such as " + listed(own, 4));
}

void check_color(const Preprocess& how, const Dim& channels, const TensorSpec& spec) {
  if (channels.size.value_or(how.channels()) == how.channels()) return;
  throw FeedError(names::of(names::kColor, *how.color) + " images have " +
                  std::to_string(how.channels()) + " channels, the input is " + spec.describe() +
                  " with " + std::to_string(*channels.size) + " in " + upper(*how.layout) +
                  "; give another color or layout, or feed arrays from an .npy file");
}

}  // namespace

std::string TensorSpec::describe() const {
  std::string dims;
  for (const Dim& dim : shape) {
    dims += dims.empty() ? "" : ", ";
    dims += dim.size ? std::to_string(*dim.size) : dim.symbol.empty() ? "?" : dim.symbol;
  }
  return text::repr(name) + " " + dtype + " [" + dims + "]";
}

Resolved resolve(const std::optional<Preprocess>& asked, const TensorSpec& spec) {
  if (spec.shape.size() != 4) {
    throw FeedError("images need an input of 4 dimensions, got " + spec.describe() +
                    "; feed this model arrays from an .npy or .npz file");
  }
  Preprocess how = asked.value_or(Preprocess{});
  how.layout = how.layout.value_or(layout_of(spec.shape));
  const bool nchw = how.layout == Layout::kNchw;
  const Dim& channels = spec.shape[nchw ? 1 : 3];
  how.color = how.color.value_or(channels.size == 1 ? Color::kGrey : Color::kRgb);
  check_color(how, channels, spec);
  how.size = resolve_size(how, spec.shape[nchw ? 2 : 1], spec.shape[nchw ? 3 : 2], spec);
  try {
    how.check();
  } catch (const ConfigError& error) {
    throw FeedError(std::string(error.what()) + " (the input is " + spec.describe() + ")");
  }
  check_crop(how);
  check_mean(how);
  if (asked) return {how, {}};
  return {how,
          {"no preprocessing was given: " + names::of(names::kColor, *how.color) +
           " images stretched to " + shown(*how.size) + ", pixels / 255 (preset 'unit')"}};
}

}  // namespace calib8

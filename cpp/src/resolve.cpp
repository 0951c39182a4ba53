// The requested preprocessing, completed from the model's input.
#include <algorithm>
#include <sstream>

#include "calib8/errors.hpp"
#include "calib8/preprocess.hpp"
#include "calib8/text.hpp"
#include "names.hpp"

namespace calib8 {
namespace {

constexpr std::int64_t kMaxLength = 1 << 30;  // beyond what any check lets pass

bool is_channel_count(const Dim& dim) { return dim.size == 1 || dim.size == 3; }

Layout layout_of(const std::vector<Dim>& shape) {
  return is_channel_count(shape[3]) && !is_channel_count(shape[1]) ? Layout::kNhwc : Layout::kNchw;
}

std::string format_size(const Size& size) {
  return std::to_string(size.height) + "x" + std::to_string(size.width);
}

std::string layout_name(Layout layout) { return layout == Layout::kNchw ? "NCHW" : "NHWC"; }

Size resolve_size(const Preprocess& preprocess, const Dim& height, const Dim& width,
                  const TensorSpec& spec) {
  const auto side_length = [&](const Dim& dim, int Size::*side) -> int {
    if (preprocess.size) return (*preprocess.size).*side;
    if (dim.size) return static_cast<int>(std::clamp<std::int64_t>(*dim.size, 0, kMaxLength));
    if (preprocess.default_size) return (*preprocess.default_size).*side;
    throw FeedError("the input " + spec.describe() +
                    " leaves its size open; give a size, such as 224x224");
  };
  const Size size{side_length(height, &Size::height), side_length(width, &Size::width)};
  const bool fits_input = height.size.value_or(size.height) == size.height &&
                          width.size.value_or(size.width) == size.width;
  if (!fits_input) {
    throw FeedError("the size must fit the input " + spec.describe() +
                    ", which accepts no other, got " + format_size(size) +
                    "; leave the size out to use the model's own, or, if the model is fully" +
                    " convolutional, declare the sides of its inputs and outputs open (dim_param)");
  }
  return size;
}

std::string format_list(const std::vector<double>& values, int digits) {
  std::ostringstream out;
  out.precision(digits);
  for (std::size_t index = 0; index < values.size(); ++index)
    out << (index ? "," : "") << values[index];
  return out.str();
}

// A mean of pixels as they are where scaled ones are fed: all would be alike.
void check_mean(const Preprocess& preprocess) {
  const double max_pixel = 255 * preprocess.scale;
  const double max_mean = *std::max_element(preprocess.mean.begin(), preprocess.mean.end());
  if (max_mean <= max_pixel * (1 + 1e-6)) return;
  std::vector<double> scaled_mean = preprocess.mean;
  for (double& value : scaled_mean) value *= preprocess.scale;
  throw ConfigError("mean is taken from scaled pixels, which go from 0 to " +
                    format_list({max_pixel}, 4) + ", got " + format_list(preprocess.mean, 6) +
                    "; give scale 1 if it is a mean of raw" +
                    " pixels, or the mean of scaled ones, such as " + format_list(scaled_mean, 4));
}

void check_color(const Preprocess& preprocess, const Dim& channels, const TensorSpec& spec) {
  if (channels.size.value_or(preprocess.channels()) == preprocess.channels()) return;
  throw FeedError(names::name_of(names::kColor, *preprocess.color) + " images have " +
                  std::to_string(preprocess.channels()) + " channels, the input is " +
                  spec.describe() + " with " + std::to_string(*channels.size) + " in " +
                  layout_name(*preprocess.layout) +
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

Resolved resolve(const std::optional<Preprocess>& requested, const TensorSpec& spec) {
  if (spec.shape.size() != 4) {
    throw FeedError("images need an input of 4 dimensions, got " + spec.describe() +
                    "; feed this model arrays from an .npy or .npz file");
  }
  Preprocess preprocess = requested.value_or(Preprocess{});
  preprocess.layout = preprocess.layout.value_or(layout_of(spec.shape));
  const bool nchw = preprocess.layout == Layout::kNchw;
  const Dim& channels = spec.shape[nchw ? 1 : 3];
  preprocess.color = preprocess.color.value_or(channels.size == 1 ? Color::kGrey : Color::kRgb);
  check_color(preprocess, channels, spec);
  preprocess.size =
      resolve_size(preprocess, spec.shape[nchw ? 2 : 1], spec.shape[nchw ? 3 : 2], spec);
  try {
    preprocess.check();
  } catch (const ConfigError& error) {
    throw FeedError(std::string(error.what()) + " (the input is " + spec.describe() + ")");
  }
  check_mean(preprocess);
  if (requested) return {preprocess, {}};
  return {
      preprocess,
      {"no preprocessing was given: " + names::name_of(names::kColor, *preprocess.color) +
       " images stretched to " + format_size(*preprocess.size) + ", pixels / 255 (preset 'unit')"}};
}

}  // namespace calib8

// The preprocessing that well-known families of models were trained with; deploy/feed/preprocess.py.
#include <algorithm>

#include "calib8/errors.hpp"
#include "calib8/preprocess.hpp"
#include "calib8/text.hpp"

namespace calib8 {
namespace {

using Named = std::pair<std::string, Preprocess>;

Preprocess crop() {
  Preprocess how;
  how.default_size = Size{224, 224};
  how.resize = Resize::kShortSide;
  how.interpolation = Interpolation::kArea;
  how.color = Color::kRgb;
  how.scale = 1.0;
  return how;
}

Preprocess imagenet_units(Preprocess how) {
  how.scale = 1.0 / 255;
  how.mean = {0.485, 0.456, 0.406};
  how.std = {0.229, 0.224, 0.225};
  return how;
}

// PaddleOCR reads with OpenCV and keeps BGR; it pads text lines with 0 after the arithmetic,
// which is pixel 127.5.
Preprocess text_line(int width) {
  Preprocess how;
  how.default_size = Size{48, width};
  how.resize = Resize::kFitHeight;
  how.color = Color::kBgr;
  how.mean = how.std = {0.5};
  how.pad = {127.5};
  return how;
}

Preprocess centred(double mean, double std, Interpolation interpolation) {
  Preprocess how = crop();
  how.mean = {mean};
  how.std = {std};
  how.interpolation = interpolation;
  return how;
}

Preprocess grey_half() {
  Preprocess how;
  how.color = Color::kGrey;
  how.mean = how.std = {0.5};
  return how;
}

Preprocess picodet() {
  Preprocess how = imagenet_units({});
  how.color = Color::kRgb;
  how.default_size = Size{640, 640};
  how.interpolation = Interpolation::kCubic;
  return how;
}

Preprocess ppocr_det() {
  Preprocess how = imagenet_units({});
  how.color = Color::kBgr;
  how.default_size = Size{736, 736};
  how.resize = Resize::kLetterbox;
  how.anchor = Anchor::kTopLeft;
  return how;
}

Preprocess yolo() {
  Preprocess how;
  how.default_size = Size{640, 640};
  how.resize = Resize::kLetterbox;
  how.color = Color::kRgb;
  how.pad = {114.0};
  return how;
}

Preprocess raw() {
  Preprocess how;
  how.scale = 1.0;
  return how;
}

std::vector<Named> table() {
  const Preprocess tf = centred(127.5, 127.5, Interpolation::kArea);
  return {{"efficientnet-lite", centred(127.0, 128.0, Interpolation::kCubic)},
          {"grey-half", grey_half()},
          {"imagenet", imagenet_units(crop())},
          {"imagenet-tf", tf},
          {"minus-one-to-one", tf},
          {"picodet", picodet()},
          {"ppocr-cls", text_line(192)},
          {"ppocr-det", ppocr_det()},
          {"ppocr-rec", text_line(320)},
          {"raw", raw()},
          {"unit", {}},
          {"yolo", yolo()}};
}

}  // namespace

const std::vector<Named>& presets() {
  static const std::vector<Named> kPresets = table();
  return kPresets;
}

const Preprocess& preset(const std::string& name) {
  const auto named = [&name](const Named& entry) { return entry.first == name; };
  const auto found = std::find_if(presets().begin(), presets().end(), named);
  if (found != presets().end()) return found->second;
  std::string all;
  for (const Named& entry : presets()) all += (all.empty() ? "" : ", ") + entry.first;
  throw ConfigError(text::repr(name) + " is no preset; there are " + all);
}

}  // namespace calib8

// The preprocessing that well-known families of models were trained with; deploy/feed/preprocess.py.
#include <algorithm>

#include "calib8/errors.hpp"
#include "calib8/preprocess.hpp"
#include "calib8/text.hpp"

namespace calib8 {
namespace {

using NamedPreprocess = std::pair<std::string, Preprocess>;

Preprocess crop() {
  Preprocess preprocess;
  preprocess.default_size = Size{224, 224};
  preprocess.resize = Resize::kShortSide;
  preprocess.interpolation = Interpolation::kArea;
  preprocess.color = Color::kRgb;
  preprocess.scale = 1.0;
  return preprocess;
}

Preprocess imagenet_units(Preprocess preprocess) {
  preprocess.scale = 1.0 / 255;
  preprocess.mean = {0.485, 0.456, 0.406};
  preprocess.std = {0.229, 0.224, 0.225};
  return preprocess;
}

// PaddleOCR reads with OpenCV and keeps BGR; it pads text lines with 0 after the arithmetic,
// which is pixel 127.5.
Preprocess text_line(int width) {
  Preprocess preprocess;
  preprocess.default_size = Size{48, width};
  preprocess.resize = Resize::kFitHeight;
  preprocess.color = Color::kBgr;
  preprocess.mean = preprocess.std = {0.5};
  preprocess.pad = {127.5};
  return preprocess;
}

Preprocess centred(double mean, double std, Interpolation interpolation) {
  Preprocess preprocess = crop();
  preprocess.mean = {mean};
  preprocess.std = {std};
  preprocess.interpolation = interpolation;
  return preprocess;
}

Preprocess grey_half() {
  Preprocess preprocess;
  preprocess.color = Color::kGrey;
  preprocess.mean = preprocess.std = {0.5};
  return preprocess;
}

Preprocess picodet() {
  Preprocess preprocess = imagenet_units({});
  preprocess.color = Color::kRgb;
  preprocess.default_size = Size{640, 640};
  preprocess.interpolation = Interpolation::kCubic;
  return preprocess;
}

Preprocess ppocr_det() {
  Preprocess preprocess = imagenet_units({});
  preprocess.color = Color::kBgr;
  preprocess.default_size = Size{736, 736};
  preprocess.resize = Resize::kLetterbox;
  preprocess.anchor = Anchor::kTopLeft;
  return preprocess;
}

Preprocess yolo() {
  Preprocess preprocess;
  preprocess.default_size = Size{640, 640};
  preprocess.resize = Resize::kLetterbox;
  preprocess.color = Color::kRgb;
  preprocess.pad = {114.0};
  return preprocess;
}

Preprocess raw() {
  Preprocess preprocess;
  preprocess.scale = 1.0;
  return preprocess;
}

std::vector<NamedPreprocess> make_presets() {
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

const std::vector<NamedPreprocess>& presets() {
  static const std::vector<NamedPreprocess> kPresets = make_presets();
  return kPresets;
}

const Preprocess& preset(const std::string& name) {
  const auto has_name = [&name](const NamedPreprocess& entry) { return entry.first == name; };
  const auto found = std::find_if(presets().begin(), presets().end(), has_name);
  if (found != presets().end()) return found->second;
  std::string name_list;
  for (const NamedPreprocess& entry : presets())
    name_list += (name_list.empty() ? "" : ", ") + entry.first;
  throw ConfigError(text::repr(name) + " is no preset; there are " + name_list);
}

}  // namespace calib8

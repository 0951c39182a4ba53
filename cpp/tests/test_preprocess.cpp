#include <algorithm>
#include <nlohmann/json.hpp>

#include "calib8/errors.hpp"
#include "calib8/pixels.hpp"
#include "calib8/preprocess.hpp"
#include "catch.hpp"

using namespace calib8;

namespace {

TensorSpec spec(std::vector<Dim> shape) { return {"image", "float32", std::move(shape)}; }

Preprocess ready(Size size) {
  Preprocess preprocess;
  preprocess.size = size;
  preprocess.color = Color::kRgb;
  preprocess.layout = Layout::kNchw;
  return preprocess;
}

}  // namespace

TEST_CASE("the arithmetic is three separate float roundings, channels in their order") {
  Preprocess preprocess = ready({1, 2});
  preprocess.mean = {0.485, 0.456, 0.406};
  preprocess.std = {0.229, 0.224, 0.225};
  Pixels pixels(1, 2, 3);
  pixels.data = {1, 2, 3, 101, 102, 103};
  const std::vector<float> planes = apply(pixels, preprocess);
  const auto value = [&preprocess](int pixel, std::size_t channel) {
    volatile float y = static_cast<float>(pixel) * static_cast<float>(1.0 / 255);
    y = y - static_cast<float>(preprocess.mean[channel]);
    return y / static_cast<float>(preprocess.std[channel]);
  };
  CHECK(planes == std::vector<float>{value(3, 0), value(103, 0), value(2, 1), value(102, 1),
                                     value(1, 2), value(101, 2)});
  preprocess.layout = Layout::kNhwc;
  preprocess.color = Color::kBgr;
  CHECK(apply(pixels, preprocess)[3] == value(101, 0));
}

TEST_CASE("letterbox pads through the same arithmetic") {
  Preprocess preprocess = ready({8, 8});
  preprocess.resize = Resize::kLetterbox;
  preprocess.scale = 1.0;
  preprocess.pad = {114.0};
  Pixels wide(4, 8, 3);
  std::fill(wide.data.begin(), wide.data.end(), std::uint8_t{9});
  const std::vector<float> centred = apply(wide, preprocess);
  CHECK(centred[0] == 114.0F);
  CHECK(centred[2 * 8] == 9.0F);
  CHECK(centred[6 * 8] == 114.0F);
  preprocess.anchor = Anchor::kTopLeft;
  CHECK(apply(wide, preprocess)[0] == 9.0F);
}

TEST_CASE("preprocessing that would read beyond its numbers or the picture is refused") {
  Preprocess small_crop = ready({8, 8});
  small_crop.resize = Resize::kShortSide;
  small_crop.short_side = 4;
  CHECK_THROWS_AS(apply(Pixels(16, 16, 3), small_crop), FeedError);
  small_crop.size = Size{4, 6};
  CHECK_NOTHROW(apply(Pixels(16, 24, 3), small_crop));
  Preprocess few_means = ready({8, 8});
  few_means.mean = {0.5, 0.5};
  CHECK_THROWS_AS(apply(Pixels(16, 16, 3), few_means), ConfigError);
}

TEST_CASE("sizes of letterbox and short side") {
  CHECK(letterbox_size({40, 80}, {32, 32}) == Size{16, 32});
  CHECK(letterbox_size({1, 5000}, {32, 32}) == Size{1, 32});
  CHECK(letterbox_size({900, 1024}, {640, 640}) == Size{562, 640});
  CHECK(short_side_size({300, 500}, 256) == Size{256, 426});
  CHECK(short_side_size({500, 300}, 256) == Size{426, 256});
}

TEST_CASE("presets survive JSON and resolve against a model") {
  for (const auto& [name, preprocess] : presets()) {
    INFO(name);
    CHECK(Preprocess::from_json(preprocess.to_json()).to_json() == preprocess.to_json());
    const Resolved resolved = resolve(preprocess, spec({"n", preprocess.channels(), 64, 96}));
    CHECK(resolved.preprocess.size == Size{64, 96});
    CHECK(resolved.notes.empty());
  }
  CHECK(resolve(preset("imagenet"), spec({1, 3, "h", "w"})).preprocess.size == Size{224, 224});
  CHECK(resolve({}, spec({1, 28, 28, 1})).preprocess.layout == Layout::kNhwc);
  CHECK_THROWS_AS(preset("imagnet"), ConfigError);
}

TEST_CASE("wrong options are told by name and rule") {
  const auto refused = [](const std::string& json, const std::string& words) {
    INFO(json);
    CHECK_THROWS_WITH(Preprocess::from_json(json), Catch::Contains(words));
  };
  refused("[]", "must be a JSON object");
  refused("{", "must be a JSON object");
  refused(R"({"men": 1})", "'men' is no preprocessing option");
  refused(R"({"resize": "squeeze"})", "resize must be one of stretch, letterbox");
  refused(R"({"size": [0, 1]})", "size must be whole pixels, 1 to 16384, got 0");
  refused(R"({"std": 0})", "above 0");
  refused(R"({"mean": [1, 2]})", "mean must have one value or one per channel of rgb, got 2");
  refused(R"({"mean": "x"})", "mean must be finite numbers, got 'x'");
}

TEST_CASE("options that contradict the model are told") {
  const auto refused = [](const std::optional<Preprocess>& preprocess, std::vector<Dim> shape,
                          const std::string& words) {
    CHECK_THROWS_WITH(resolve(preprocess, spec(std::move(shape))), Catch::Contains(words));
  };
  refused({}, {1, 16}, "need an input of 4 dimensions");
  refused({}, {1, 4, 8, 8}, "rgb images have 3 channels");
  refused({}, {1, 3, "h", "w"}, "leaves its size open");
  refused(ready({32, 32}), {1, 3, 64, 64},
          "size must fit the input 'image' float32 [1, 3, 64, 64]");
  Preprocess unscaled = preset("unit");
  unscaled.mean = {127.5};
  refused(unscaled, {1, 3, 8, 8}, "from 0 to 1, got 127.5; give scale 1 if");
  refused(unscaled, {1, 3, 8, 8}, "such as 0.5");
  unscaled.mean = {1, 0, -1};
  CHECK_NOTHROW(resolve(unscaled, spec({1, 3, 8, 8})));
}

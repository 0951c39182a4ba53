// What stands in decode.cpp's place where calib8 is built without OpenCV (CALIB8_IMAGES=OFF).
#include "calib8/errors.hpp"
#include "calib8/images.hpp"

namespace calib8::images {

Pixels decode(std::string_view /*data*/, const std::string& /*name*/, bool /*grey*/, bool /*deep*/,
              int /*max_pixels*/) {
  (void)decoder_version();
  return {};
}

std::string decoder_version() {
  throw ConfigError(
      "images are read by OpenCV, which this calib8 was built without; install it (Debian:"
      " libopencv-dev) and build calib8 with -DCALIB8_IMAGES=ON, or feed arrays (.npy) or a"
      " function that gives samples");
}

}  // namespace calib8::images

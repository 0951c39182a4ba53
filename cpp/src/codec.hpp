// What makes pixels of a whole file: OpenCV, or libjpeg-turbo, libpng and libwebp (CALIB8_CODECS).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "calib8/pixels.hpp"

namespace calib8::codec {

struct Decoded {
  Pixels pixels;                  // empty where it is no picture
  std::vector<std::string> said;  // by the decoder, a line each
};

// The file's bytes are whole as far as decode.cpp sees it. A WebP is no animation.
// JPEG, PNG and WebP are not turned as their EXIF block says.
Decoded decode(std::string_view data, bool grey);

// The decoders' names and versions.
std::string version();

}  // namespace calib8::codec

// What makes pixels of a whole file: OpenCV, or libjpeg-turbo, libpng and libwebp (CALIB8_CODECS).
#pragma once

#include <string>
#include <string_view>

#include "calib8/pixels.hpp"

namespace calib8::codec {

// Pixels; or without any, why: a fault of the file, or a whole sentence about it behind its name.
struct Decoded {
  Pixels pixels;
  std::string fault = "damaged or of an unknown kind";
  std::string sentence;
};

// The file's bytes are whole as far as decode.cpp sees it.
Decoded decode(std::string_view data, bool grey);

// The decoders' names and versions.
std::string version();

}  // namespace calib8::codec

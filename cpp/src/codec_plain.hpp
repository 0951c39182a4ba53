// The three decoders of CALIB8_CODECS=plain. Each gives the pixels that OpenCV makes of the file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "codec.hpp"

namespace calib8::codec::plain {

Decoded jpeg(std::string_view data, bool grey);
Decoded png(std::string_view data, bool grey);
Decoded webp(std::string_view data, bool grey);

std::string jpeg_version();
std::string png_version();
std::string webp_version();

// 0.299 R + 0.587 G + 0.114 B in 15 bits, as OpenCV's cvtColor has it.
std::uint8_t grey_of(int blue, int green, int red);

}  // namespace calib8::codec::plain

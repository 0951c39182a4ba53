#include <webp/decode.h>

#include <utility>

#include "codec_plain.hpp"

namespace calib8::codec::plain {
namespace {

const std::uint8_t* bytes(std::string_view data) {
  return reinterpret_cast<const std::uint8_t*>(data.data());
}

Pixels grey_pixels(const Pixels& color) {
  Pixels out(color.height, color.width, 1);
  const std::uint8_t* from = color.data.data();
  for (std::uint8_t& value : out.data) {
    value = grey_of(from[0], from[1], from[2]);
    from += 3;
  }
  return out;
}

}  // namespace

Decoded webp(std::string_view data, bool grey) {
  Decoded made;
  WebPBitstreamFeatures found;
  if (WebPGetFeatures(bytes(data), data.size(), &found) != VP8_STATUS_OK) return made;
  Pixels pixels(found.height, found.width, 3);
  if (WebPDecodeBGRInto(bytes(data), data.size(), pixels.data.data(), pixels.data.size(),
                        static_cast<int>(pixels.row_bytes())) == nullptr) {
    return made;
  }
  made.pixels = grey ? grey_pixels(pixels) : std::move(pixels);
  return made;
}

std::string webp_version() {
  const int version = WebPGetDecoderVersion();
  return "libwebp " + std::to_string(version >> 16) + "." + std::to_string(version >> 8 & 255) +
         "." + std::to_string(version & 255);
}

}  // namespace calib8::codec::plain

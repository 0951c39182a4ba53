#include <webp/decode.h>

#include "codec_plain.hpp"
#include "exif.hpp"

namespace calib8::codec::plain {
namespace {

const std::uint8_t* bytes(std::string_view data) {
  return reinterpret_cast<const std::uint8_t*>(data.data());
}

// The body of the first chunk of this name in the file.
std::string_view chunk(std::string_view data, std::string_view name) {
  constexpr std::size_t kHeader = 8;
  for (std::size_t at = 12; at + kHeader <= data.size();) {
    std::size_t length = 0;
    for (std::size_t k = 4; k-- > 0;) {
      length = length << 8U | static_cast<unsigned char>(data[at + 4 + k]);
    }
    if (data.substr(at, 4) == name) return data.substr(at + kHeader, length);
    at += kHeader + length + length % 2;
  }
  return {};
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
  if (found.has_animation != 0) {
    made.fault =
        "an animated WebP, which this build does not read; convert it, or build calib8 with"
        " CALIB8_CODECS=opencv";
    return made;
  }
  const auto width = static_cast<std::uint64_t>(found.width);
  if (too_large(width, static_cast<std::uint64_t>(found.height), made)) return made;
  Pixels pixels(found.height, found.width, 3);
  if (WebPDecodeBGRInto(bytes(data), data.size(), pixels.data.data(), pixels.data.size(),
                        static_cast<int>(pixels.row_bytes())) == nullptr) {
    return made;
  }
  if (grey) pixels = grey_pixels(pixels);
  made.pixels = exif::turned(std::move(pixels), exif::orientation(chunk(data, "EXIF")));
  return made;
}

std::string webp_version() {
  const int version = WebPGetDecoderVersion();
  return "libwebp " + std::to_string(version >> 16) + "." + std::to_string(version >> 8 & 255) +
         "." + std::to_string(version & 255);
}

}  // namespace calib8::codec::plain

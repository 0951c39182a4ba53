// Which of the decoders reads a file, by its first bytes.
#include "codec_plain.hpp"

#include "bytes.hpp"

namespace calib8::codec {
namespace {

using std::string_view_literals::operator""sv;

bool starts(std::string_view data, std::string_view sign) {
  return data.substr(0, sign.size()) == sign;
}

// Whether OpenCV has a decoder for it: BMP, TIFF, GIF, PNM, JPEG 2000, AVIF.
bool is_other_kind(std::string_view data) {
  for (const std::string_view sign : {"BM"sv, "II*\0"sv, "MM\0*"sv, "II+\0"sv, "MM\0+"sv, "GIF8"sv,
                                      "\0\0\0\x0cjP  "sv, "\xff\x4f\xff\x51"sv}) {
    if (starts(data, sign)) return true;
  }
  const bool is_pnm = data.size() > 1 && data[0] == 'P' && data[1] >= '1' && data[1] <= '6';
  return is_pnm || bytes::piece(data, 4, 4) == "ftyp"sv;
}

}  // namespace

Decoded decode(std::string_view data, bool grey) {
  if (starts(data, "\xff\xd8"sv)) return plain::jpeg(data, grey);
  if (starts(data, "\x89PNG\r\n\x1a\n"sv)) return plain::png(data, grey);
  const bool is_webp = starts(data, "RIFF"sv) && bytes::piece(data, 8, 4) == "WEBP"sv;
  if (is_webp) return plain::webp(data, grey);
  if (!is_other_kind(data)) return {};
  return {{},
          {"this build reads JPEG, PNG and WebP alone; convert the picture, or build calib8 with"
           " CALIB8_CODECS=opencv"}};
}

std::string version() {
  return plain::jpeg_version() + ", " + plain::png_version() + ", " + plain::webp_version();
}

namespace plain {

std::uint8_t grey_of(int blue, int green, int red) {
  return static_cast<std::uint8_t>((blue * 3735 + green * 19235 + red * 9798 + (1 << 14)) >> 15);
}

}  // namespace plain
}  // namespace calib8::codec

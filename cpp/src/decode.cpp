// One picture's bytes to pixels.
#include <algorithm>
#include <array>
#include <cstdint>

#include "calib8/errors.hpp"
#include "calib8/images.hpp"
#include "calib8/text.hpp"
#include "codec.hpp"
#include "exif.hpp"
#include "headers.hpp"
#include "jpeg.hpp"
#include "webp.hpp"

namespace calib8::images {
namespace {

using std::string_view_literals::operator""sv;

constexpr std::string_view kPng = "\x89PNG\r\n\x1a\n"sv;
constexpr std::string_view kJpeg = "\xff\xd8"sv;
constexpr std::int64_t kLargestPicture = std::int64_t{1} << 28U;  // pixels: 768 MB when decoded

std::uint32_t big_endian(std::string_view bytes) {
  std::uint32_t value = 0;
  for (const char c : bytes.substr(0, 4)) value = (value << 8U) | static_cast<unsigned char>(c);
  return value;
}

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t n = 0; n < 256; ++n) {
    std::uint32_t c = n;
    for (int k = 0; k < 8; ++k) c = (c & 1U) != 0 ? 0xEDB88320U ^ (c >> 1U) : c >> 1U;
    table[n] = c;
  }
  return table;
}

// The CRC of a PNG chunk (ISO 3309).
std::uint32_t crc32(std::string_view bytes) {
  static constexpr std::array<std::uint32_t, 256> kTable = crc_table();
  std::uint32_t c = 0xFFFFFFFFU;
  for (const char byte : bytes) {
    c = kTable[(c ^ static_cast<unsigned char>(byte)) & 0xFFU] ^ (c >> 8U);
  }
  return ~c;
}

// What is wrong with the chunks of a PNG; checked here since libpng prints to stderr.
std::string png_fault(std::string_view data) {
  data.remove_prefix(kPng.size());
  while (data.size() >= 12) {
    const std::size_t length = big_endian(data);
    if (length > data.size() - 12) return "cut short";
    const std::string_view body = data.substr(4, length + 4);
    if (crc32(body) != big_endian(data.substr(length + 8))) {
      return "damaged: a checksum does not fit";
    }
    if (body.substr(0, 4) == "IEND") return {};
    data.remove_prefix(length + 12);
  }
  return "cut short";
}

std::string fault(std::string_view data) {
  if (data.substr(0, kPng.size()) == kPng) return png_fault(data);
  if (data.substr(0, kJpeg.size()) == kJpeg) return jpeg::fault(data);
  return {};
}

// A picture on its canvas, black where it does not reach; empty where it does not fit on it.
Pixels placed(const Pixels& pixels, const webp::First& first) {
  if (first.left > first.canvas_width - pixels.width) return {};
  if (first.top > first.canvas_height - pixels.height) return {};
  Pixels canvas(first.canvas_height, first.canvas_width, pixels.channels);
  for (int y = 0; y < pixels.height; ++y) {
    std::copy_n(pixels.row(y), pixels.row_bytes(),
                canvas.row(first.top + y) + first.left * pixels.channels);
  }
  return canvas;
}

// Of an animation the first picture; turned here, since OpenCV does either from 4.11 on only.
codec::Decoded decode_webp(std::string_view data, bool grey) {
  const auto first = webp::first_picture(data);
  codec::Decoded made = codec::decode(first ? std::string_view(first->still) : data, grey);
  if (first && !made.pixels.data.empty()) made.pixels = placed(made.pixels, *first);
  if (!made.pixels.data.empty()) {
    made.pixels = exif::turned(std::move(made.pixels), webp::orientation(data));
  }
  return made;
}

// What libjpeg says of pixels; of a profile, a revision or a colour transform it says other things.
bool is_damage(const std::string& words) {
  const auto has = [&](const char* part) { return words.find(part) != std::string::npos; };
  const std::size_t corrupt = words.find("Corrupt JPEG data");
  const bool profile = corrupt != std::string::npos &&
                       words.compare(corrupt + 17, 9, ": bad ICC") == 0;
  return (corrupt != std::string::npos && !profile) || has("Premature end of JPEG") ||
         has("Inconsistent progression");
}

void check_size(std::string_view data, const std::string& name) {
  const auto found = headers::sides(data);
  const bool empty = !found || found->height <= 0;
  if (empty || found->width <= kLargestPicture / found->height) return;
  throw FeedError("image " + text::shown(name) + " must have at most 268,435,456 pixels, got " +
                  std::to_string(found->width) + "x" + std::to_string(found->height) +
                  "; give a smaller copy of it");
}

[[noreturn]] void refuse(std::string_view data, const std::string& name, const std::string& why) {
  throw FeedError("image " + text::shown(name) + " cannot be decoded (" +
                  std::to_string(data.size()) + " bytes, " + why + ")");
}

}  // namespace

Pixels decode(std::string_view data, const std::string& name, bool grey) {
  check_size(data, name);
  const std::string found = fault(data);
  if (!found.empty()) refuse(data, name, found);
  const bool is_webp = data.substr(0, 4) == "RIFF";
  codec::Decoded made = is_webp ? decode_webp(data, grey) : codec::decode(data, grey);
  for (const std::string& words : made.said) {
    if (!is_damage(words)) continue;
    throw FeedError("image " + text::shown(name) + " is damaged (" + std::to_string(data.size()) +
                    " bytes), its decoder says: " + words);
  }
  if (!made.pixels.data.empty()) return std::move(made.pixels);
  refuse(data, name, "damaged or of an unknown kind" +
                         (made.said.empty() ? "" : ": " + made.said.back()));
}

std::string decoder_version() { return codec::version(); }

}  // namespace calib8::images

// One picture's bytes to pixels.
#include <array>
#include <cstdint>

#include "calib8/errors.hpp"
#include "calib8/images.hpp"
#include "calib8/text.hpp"
#include "codec.hpp"

namespace calib8::images {
namespace {

using std::string_view_literals::operator""sv;

constexpr std::string_view kPng = "\x89PNG\r\n\x1a\n"sv;
constexpr std::string_view kJpeg = "\xff\xd8"sv;

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

// A JPEG ends with its end marker; older OpenCV fills what is missing with grey and says nothing.
std::string jpeg_fault(std::string_view data) {
  const std::size_t end = data.rfind("\xff\xd9"sv);
  const std::size_t scan = data.rfind("\xff\xda"sv);
  const bool whole = end != std::string_view::npos && scan != std::string_view::npos && end > scan;
  return whole ? std::string() : "cut short";
}

std::string fault(std::string_view data) {
  if (data.substr(0, kPng.size()) == kPng) return png_fault(data);
  if (data.substr(0, kJpeg.size()) == kJpeg) return jpeg_fault(data);
  return {};
}

}  // namespace

Pixels decode(std::string_view data, const std::string& name, bool grey) {
  const std::string size = std::to_string(data.size()) + " bytes";
  std::string found = fault(data);
  if (found.empty()) {
    codec::Decoded made = codec::decode(data, grey);
    if (!made.pixels.data.empty()) return std::move(made.pixels);
    if (!made.sentence.empty()) {
      throw FeedError("image " + text::shown(name) + " " + made.sentence);
    }
    found = made.fault;
  }
  throw FeedError("image " + text::shown(name) + " cannot be decoded (" + size + ", " + found +
                  ")");
}

std::string decoder_version() { return codec::version(); }

}  // namespace calib8::images

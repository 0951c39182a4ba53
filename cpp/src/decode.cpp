// One picture's bytes to pixels.
#include <array>
#include <cstdint>
#include <limits>
#include <new>
#include <opencv2/core/utility.hpp>
#include <opencv2/core/utils/logger.hpp>
#include <opencv2/imgcodecs.hpp>

#include "calib8/errors.hpp"
#include "calib8/images.hpp"
#include "calib8/text.hpp"
#include "headers.hpp"
#include "jpeg.hpp"
#include "overheard.hpp"
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

// One thread, no messages of OpenCV on stderr, and no IPP: its cubic resize rounds otherwise on
// every 30th pixel, so that the pixels would depend on how OpenCV was built.
void settle_opencv() {
  static const bool kOnce = [] {
    cv::setNumThreads(1);
    cv::utils::logging::setLogLevel(cv::utils::logging::LOG_LEVEL_SILENT);
    return true;
  }();
  static_cast<void>(kOnce);
  cv::ipp::setUseIPP(false);  // a setting of the calling thread only
}

cv::Mat imdecode(std::string_view data, int flags) {
  if (data.size() > static_cast<std::size_t>(std::numeric_limits<int>::max())) return {};
  // OpenCV takes no const matrix header; imdecode only reads.
  auto* bytes = const_cast<char*>(data.data());
  const cv::Mat raw(1, static_cast<int>(data.size()), CV_8UC1, bytes);
  try {
    return cv::imdecode(raw, flags);
  } catch (const cv::Exception&) {
    return {};
  } catch (const std::bad_alloc&) {
    return {};
  }
}

// A picture as its EXIF orientation says that it is looked at.
cv::Mat upright(const cv::Mat& pixels, int orientation) {
  cv::Mat turned = pixels;
  if (orientation >= 5) cv::transpose(pixels, turned);
  constexpr std::array<int, 9> kFlips{2, 2, 1, -1, 0, 2, 1, -1, 0};  // OpenCV's codes; 2: none
  const int flip = kFlips[static_cast<std::size_t>(orientation)];
  cv::Mat out = turned;
  if (flip != 2) cv::flip(turned, out, flip);
  return out;
}

// OpenCV below 4.11 leaves the orientation of a WebP as it is, and refuses animations.
cv::Mat decode_webp(std::string_view data, int flags) {
  const auto first = webp::first_picture(data);
  cv::Mat pixels =
      imdecode(first ? std::string_view(first->still) : data, flags | cv::IMREAD_IGNORE_ORIENTATION);
  if (first && !pixels.empty()) {
    const cv::Rect place(first->left, first->top, pixels.cols, pixels.rows);
    const cv::Size size(first->canvas_width, first->canvas_height);
    if ((place & cv::Rect({}, size)) != place) return {};
    cv::Mat canvas = cv::Mat::zeros(size, pixels.type());
    pixels.copyTo(canvas(place));
    pixels = canvas;
  }
  return pixels.empty() ? pixels : upright(pixels, webp::orientation(data));
}

struct Decoded {
  cv::Mat pixels;                 // empty where it is no picture
  std::vector<std::string> said;  // by the decoder
};

Decoded decoded(std::string_view data, bool grey) {
  const int flags = grey ? cv::IMREAD_GRAYSCALE : cv::IMREAD_COLOR;
  const bool is_webp = data.substr(0, 4) == "RIFF";
  const Overheard ear;
  cv::Mat pixels = is_webp ? decode_webp(data, flags) : imdecode(data, flags);
  return {pixels, ear.lines()};
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

cv::Mat decode(std::string_view data, const std::string& name, bool grey) {
  settle_opencv();
  check_size(data, name);
  const std::string found = fault(data);
  if (!found.empty()) refuse(data, name, found);
  const Decoded picture = decoded(data, grey);
  for (const std::string& words : picture.said) {
    if (!is_damage(words)) continue;
    throw FeedError("image " + text::shown(name) + " is damaged (" + std::to_string(data.size()) +
                    " bytes), its decoder says: " + words);
  }
  if (!picture.pixels.empty()) return picture.pixels;
  refuse(data, name, "damaged or of an unknown kind" +
                         (picture.said.empty() ? "" : ": " + picture.said.back()));
}

}  // namespace calib8::images

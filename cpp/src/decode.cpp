// One picture's bytes to pixels.
#include <algorithm>
#include <cstdint>

#include "calib8/errors.hpp"
#include "calib8/images.hpp"
#include "calib8/text.hpp"
#include "codec.hpp"
#include "exif.hpp"
#include "headers.hpp"
#include "jpeg.hpp"
#include "png_chunks.hpp"
#include "webp.hpp"

namespace calib8::images {
namespace {

using std::string_view_literals::operator""sv;

constexpr std::string_view kJpeg = "\xff\xd8"sv;
constexpr std::int64_t kLargestPicture = std::int64_t{1} << 28U;  // pixels: 768 MB when decoded

std::string fault(std::string_view data) {
  if (data.substr(0, png_chunks::kSign.size()) == png_chunks::kSign) return png_chunks::fault(data);
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

// Of an animated WebP the first picture, which OpenCV gives from 4.11 on only. Turned here, since
// OpenCV does not with a WebP before 4.11, nor with a JPEG whose EXIF block has XMP before it.
codec::Decoded decoded(std::string_view data, bool grey) {
  const auto first = webp::first_picture(data);
  codec::Decoded made = codec::decode(first ? std::string_view(first->still) : data, grey);
  if (first && !made.pixels.data.empty()) made.pixels = placed(made.pixels, *first);
  if (!made.pixels.data.empty()) {
    made.pixels = exif::turned(std::move(made.pixels), exif::told(data));
  }
  return made;
}

// What libjpeg says of pixels; of a profile, a revision or a colour transform it says other things.
bool is_damage(const std::string& words) {
  const auto has = [&](const char* part) { return words.find(part) != std::string::npos; };
  const std::size_t corrupt = words.find("Corrupt JPEG data");
  const bool profile =
      corrupt != std::string::npos && words.compare(corrupt + 17, 9, ": bad ICC") == 0;
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
  codec::Decoded made = decoded(data, grey);
  for (const std::string& words : made.said) {
    if (!is_damage(words)) continue;
    throw FeedError("image " + text::shown(name) + " is damaged (" + std::to_string(data.size()) +
                    " bytes), its decoder says: " + words);
  }
  if (!made.pixels.data.empty()) return std::move(made.pixels);
  refuse(data, name,
         "damaged or of an unknown format" + (made.said.empty() ? "" : ": " + made.said.back()));
}

std::string decoder_version() { return codec::version(); }

}  // namespace calib8::images

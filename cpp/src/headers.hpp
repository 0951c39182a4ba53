// Size and damage of an image by its header, before any pixel is decoded; deploy/feed/headers.py, which
// has the same rules and says why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace calib8::headers {

// Sides in pixels, as the header states them: as many as 2^32 each.
struct ImageSize {
  std::uint64_t width = 0;
  std::uint64_t height = 0;

  // Saturates where the product overflows.
  std::uint64_t pixels() const;
};

// Nothing where the format is unknown or the header is cut short: then the decoder reports it.
std::optional<ImageSize> read_size(std::string_view data);

// The offset of 2 bytes of a TIFF that declare an alpha which the colours are not multiplied by.
// libtiff multiplies them by it; with zeros there it drops the channel. Nothing in other files.
std::optional<std::size_t> tiff_alpha_offset(std::string_view data);

// The value of white in a PNM that OpenCV decodes without scaling it; nothing in other files.
std::optional<std::uint64_t> unscaled_white(std::string_view data);

// Why a JPEG is damaged although libjpeg decodes it without a warning; empty where nothing is found, or
// the file is no JPEG.
std::string jpeg_damage(std::string_view data);

}  // namespace calib8::headers

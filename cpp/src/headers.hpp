// Size and damage of an image by its header, before any pixel is decoded; deploy/feed/headers.py, which
// has the same rules and says why.
#pragma once

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

// Why a JPEG is damaged although libjpeg decodes it without a warning; empty where nothing is found, or
// the file is no JPEG.
std::string jpeg_damage(std::string_view data);

}  // namespace calib8::headers

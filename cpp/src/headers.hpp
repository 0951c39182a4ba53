// How large a picture says it is, read from its first bytes: known before anything is decoded.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace calib8::headers {

struct Sides {
  std::int64_t width = 0;
  std::int64_t height = 0;
};

// Of PNG, JPEG, WebP, BMP, TIFF, GIF, PNM, JPEG 2000 and AVIF; nothing where the header does not
// tell. As deploy/feed/headers.py.
std::optional<Sides> sides(std::string_view data);

}  // namespace calib8::headers

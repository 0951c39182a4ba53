// What a WebP says beside its pixels, for decoders that take a plain one only: which way up it is,
// and the first picture of an animation.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace calib8::webp {

// The first picture of an animation, on a canvas that is black where it does not reach.
struct First {
  std::string still;  // a WebP of that picture alone
  int left = 0;
  int top = 0;
  int canvas_width = 0;
  int canvas_height = 0;
};

// Nothing where the file is no animation, or not a whole one.
std::optional<First> first_picture(std::string_view data);

// Its EXIF block, where its first chunk says that there is one.
std::optional<std::string_view> exif_block(std::string_view data);

}  // namespace calib8::webp

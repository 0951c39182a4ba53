// How a picture is to be turned, as its EXIF block tells (CIPA DC-008, tag 274).
#pragma once

#include <optional>
#include <string_view>

#include "calib8/pixels.hpp"

namespace calib8::exif {

// Whether files of this kind are looked into: JPEG, PNG and WebP.
bool reads(std::string_view file);

// What a file tells, as OpenCV 5 reads it; nothing where it does not, or is of another kind.
std::optional<int> told(std::string_view file);

// The picture as it is to be looked at: 1 to 8; as it stands for anything else.
Pixels turned(Pixels pixels, std::optional<int> told);

}  // namespace calib8::exif

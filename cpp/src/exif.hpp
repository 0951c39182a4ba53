// How a picture is to be turned, as its EXIF block tells (CIPA DC-008, tag 274).
#pragma once

#include <optional>
#include <string_view>

#include "calib8/pixels.hpp"

namespace calib8::exif {

// What a TIFF block ("II*\0..." or "MM\0*...") tells, as OpenCV reads it; nothing where it does not.
std::optional<int> orientation(std::string_view block);

// The picture as it is to be looked at: 1 to 8; as it stands for anything else.
Pixels turned(Pixels pixels, std::optional<int> told);

}  // namespace calib8::exif

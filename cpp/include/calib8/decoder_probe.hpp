// What the decoder makes of pictures, so that another library, or version, that gives the same pixels
// is known to be the same decoder; deploy/feed/pixels.py.
#pragma once

#include <string>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

// {"decoding", "library", and a digest of what a small picture of each form becomes} as JSON.
std::string probe_decoder();

}  // namespace calib8
CALIB8_EXPORT_END

// Digests of what the image decoder makes of small test pictures: another library or version with the
// same digests counts as the same decoder; deploy/feed/pixels.py.
#pragma once

#include <string>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

// {"decoding", "library", and one digest for the small test picture of each format} as JSON.
std::string probe_decoder();

}  // namespace calib8
CALIB8_EXPORT_END

// What libjpeg decodes without a word of complaint although the JPEG is no whole one.
#pragma once

#include <string>
#include <string_view>

namespace calib8::jpeg {

// Why a JPEG is no whole one although it may decode; empty where nothing is seen, or the file is no
// JPEG. The same rules as deploy/feed/headers.py, which says why.
std::string fault(std::string_view data);

}  // namespace calib8::jpeg

// The structure of a JPEG: its segments, and what libjpeg decodes without a word of complaint.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace calib8::jpeg {

struct Segment {
  unsigned char marker = 0;
  std::size_t at = 0;     // where it stands
  std::string_view body;  // one that is cut short is shorter than it says
};

// Every segment up to the first scan's, given last.
std::vector<Segment> segments(std::string_view data);

// Why a JPEG is no whole one although it may decode; empty where nothing is seen.
// The same rules as deploy/feed/headers.py, which says why.
std::string fault(std::string_view data);

}  // namespace calib8::jpeg

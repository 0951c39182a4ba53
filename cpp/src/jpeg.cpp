#include "jpeg.hpp"

#include <algorithm>
#include <array>
#include <vector>

namespace calib8::jpeg {
namespace {

using std::string_view_literals::operator""sv;

constexpr std::size_t kHoleBytes = 64;
constexpr std::size_t kFirstScan = 20;  // bytes that any file has before its first scan
constexpr unsigned char kStartOfScan = 0xDA;
constexpr unsigned char kEnd = 0xD9;
constexpr unsigned char kTables = 0xC4;

struct Segment {
  unsigned char marker = 0;
  std::size_t at = 0;     // where it stands
  std::string_view body;  // one that is cut short is shorter than it says
};

unsigned char at(std::string_view bytes, std::size_t place) {
  return static_cast<unsigned char>(bytes[place]);
}

// Markers without a length.
bool bare(unsigned char marker) { return marker == 0x01 || (marker >= 0xD0 && marker <= 0xD8); }

// Every segment up to the first scan's, given last.
std::vector<Segment> segments(std::string_view data) {
  std::vector<Segment> found;
  for (std::size_t place = 2; place + 4 <= data.size();) {
    const unsigned char marker = at(data, place + 1);
    if (at(data, place) != 0xFF || marker == 0xFF || marker == 0x00) {
      ++place;  // padding, or bytes that are no marker
      continue;
    }
    if (bare(marker)) {
      place += 2;
      continue;
    }
    const std::size_t length = at(data, place + 2) * std::size_t{256} + at(data, place + 3);
    found.push_back({marker, place, data.substr(place + 4, std::max<std::size_t>(length, 2) - 2)});
    if (marker == kStartOfScan || marker == kEnd) break;
    place += 2 + length;
  }
  return found;
}

std::string_view hole() {
  static constexpr std::array<char, kHoleBytes> kZeros{};
  return {kZeros.data(), kZeros.size()};
}

// Of every table of AC coefficients in a segment: the symbol of the code of zeros, by its number.
void take_first_symbols(std::string_view body, std::array<unsigned char, 16>& first) {
  for (std::size_t place = 0; place + 17 < body.size();) {
    if (at(body, place) >> 4U == 1) first[at(body, place) & 15U] = at(body, place + 17);
    std::size_t symbols = 0;
    for (std::size_t k = 1; k <= 16; ++k) symbols += at(body, place + k);
    place += 17 + symbols;
  }
}

// Whether one of the scan's components has a code of zeros that is a coefficient.
bool zeros_are_values(std::string_view scan, const std::array<unsigned char, 16>& first) {
  const std::size_t components = std::min<std::size_t>(at(scan, 0), (scan.size() - 1) / 2);
  for (std::size_t k = 0; k < components; ++k) {
    if (first[at(scan, 2 + 2 * k) & 15U] != 0) return true;  // 0 ends a block
  }
  return false;
}

// Whether zeros lie where they decode to coefficients in some block of every group of blocks.
// Only of a file with one scan, of all components: a flat component alone may well be zeros.
bool holed(std::string_view data) {
  std::array<unsigned char, 16> first{};
  bool sequential = false;
  for (const Segment& segment : segments(data)) {
    sequential = sequential || segment.marker == 0xC0 || segment.marker == 0xC1;
    if (segment.marker == kTables) take_first_symbols(segment.body, first);
    if (segment.marker != kStartOfScan || segment.body.empty()) continue;
    const std::size_t begin = segment.at + 2;
    const std::size_t end = data.find("\xff\xd9"sv, segment.at);
    const std::string_view coded = data.substr(begin, end - begin);
    return sequential && zeros_are_values(segment.body, first) &&
           coded.find(hole()) != std::string_view::npos &&
           coded.find("\xff\xda"sv) == std::string_view::npos;
  }
  return false;
}

}  // namespace

std::string fault(std::string_view data) {
  if (data.substr(0, 2) != "\xff\xd8"sv) return {};
  const std::size_t scan = data.rfind("\xff\xda"sv);
  const std::size_t end = data.rfind("\xff\xd9"sv);
  if (scan == std::string_view::npos || end == std::string_view::npos || end < scan) {
    return "cut short";  // some OpenCVs fill what is missing with grey, unsaid
  }
  if (data.find(hole(), kFirstScan) != std::string_view::npos && holed(data)) {
    return "damaged: a hole of zeros in its coded data";
  }
  return {};
}

}  // namespace calib8::jpeg

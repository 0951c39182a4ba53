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
  std::size_t begin = 0;  // offset of its marker
  std::string_view body;  // one that is cut short is shorter than it says
};

unsigned char byte_at(std::string_view bytes, std::size_t index) {
  return static_cast<unsigned char>(bytes[index]);
}

// Markers without a length.
bool has_no_length(unsigned char marker) {
  return marker == 0x01 || (marker >= 0xD0 && marker <= 0xD8);
}

// Every segment up to the first scan's, given last.
std::vector<Segment> segments(std::string_view data) {
  std::vector<Segment> result;
  for (std::size_t position = 2; position + 4 <= data.size();) {
    const unsigned char marker = byte_at(data, position + 1);
    if (byte_at(data, position) != 0xFF || marker == 0xFF || marker == 0x00) {
      ++position;  // padding, or bytes that are no marker
      continue;
    }
    if (has_no_length(marker)) {
      position += 2;
      continue;
    }
    const std::size_t length =
        byte_at(data, position + 2) * std::size_t{256} + byte_at(data, position + 3);
    result.push_back(
        {marker, position, data.substr(position + 4, std::max<std::size_t>(length, 2) - 2)});
    if (marker == kStartOfScan || marker == kEnd) break;
    position += 2 + length;
  }
  return result;
}

std::string_view hole_bytes() {
  static constexpr std::array<char, kHoleBytes> kZeros{};
  return {kZeros.data(), kZeros.size()};
}

// Of every table of AC coefficients in a segment: the symbol of the code of zeros, by its number.
void read_first_symbols(std::string_view body, std::array<unsigned char, 16>& first) {
  for (std::size_t position = 0; position + 17 < body.size();) {
    if (byte_at(body, position) >> 4U == 1)
      first[byte_at(body, position) & 15U] = byte_at(body, position + 17);
    std::size_t symbols = 0;
    for (std::size_t k = 1; k <= 16; ++k) symbols += byte_at(body, position + k);
    position += 17 + symbols;
  }
}

// Whether one of the scan's components has a code of zeros that is a coefficient.
bool zeros_are_values(std::string_view scan, const std::array<unsigned char, 16>& first) {
  const std::size_t components = std::min<std::size_t>(byte_at(scan, 0), (scan.size() - 1) / 2);
  for (std::size_t k = 0; k < components; ++k) {
    if (first[byte_at(scan, 2 + 2 * k) & 15U] != 0) return true;  // 0 ends a block
  }
  return false;
}

// Whether zeros lie where they decode to coefficients in some block of every group of blocks.
// Only of a file with one scan, of all components: a flat component alone may well be zeros.
bool has_hole(std::string_view data) {
  std::array<unsigned char, 16> first{};
  bool sequential = false;
  for (const Segment& segment : segments(data)) {
    sequential = sequential || segment.marker == 0xC0 || segment.marker == 0xC1;
    if (segment.marker == kTables) read_first_symbols(segment.body, first);
    if (segment.marker != kStartOfScan || segment.body.empty()) continue;
    const std::size_t begin = segment.begin + 2;
    const std::size_t end = data.find("\xff\xd9"sv, segment.begin);
    const std::string_view coded = data.substr(begin, end - begin);
    return sequential && zeros_are_values(segment.body, first) &&
           coded.find(hole_bytes()) != std::string_view::npos &&
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
  if (data.find(hole_bytes(), kFirstScan) != std::string_view::npos && has_hole(data)) {
    return "damaged: a hole of zeros in its coded data";
  }
  return {};
}

}  // namespace calib8::jpeg

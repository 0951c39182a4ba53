#include "headers.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "scan.hpp"

namespace calib8::headers {
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

// An unsigned number of `count` bytes. Throws std::out_of_range: the data end before it.
std::uint64_t number_at(std::string_view data, std::size_t offset, std::size_t count,
                        bool big_endian) {
  if (offset > data.size() || count > data.size() - offset) throw std::out_of_range("header");
  std::uint64_t number = 0;
  for (std::size_t k = 0; k < count; ++k) {
    const std::size_t place = big_endian ? k : count - 1 - k;
    number = number << 8U | byte_at(data, offset + place);
  }
  return number;
}

bool is_start_of_frame(unsigned char marker) {
  const bool is_table = marker == kTables || marker == 0xC8 || marker == 0xCC;
  return marker >= 0xC0 && marker <= 0xCF && !is_table;
}

std::optional<ImageSize> read_jpeg_size(std::string_view data) {
  for (const Segment& segment : segments(data)) {
    if (!is_start_of_frame(segment.marker)) continue;
    return ImageSize{number_at(segment.body, 3, 2, true), number_at(segment.body, 1, 2, true)};
  }
  return std::nullopt;
}

std::optional<ImageSize> read_png_size(std::string_view data) {
  return ImageSize{number_at(data, 16, 4, true), number_at(data, 20, 4, true)};
}

std::optional<ImageSize> read_bmp_size(std::string_view data) {
  if (number_at(data, 14, 4, false) == 12) {
    return ImageSize{number_at(data, 18, 2, false), number_at(data, 20, 2, false)};
  }
  // a negative height stores the rows from the top
  const auto side_at = [&](std::size_t offset) {
    const auto side = static_cast<std::int32_t>(number_at(data, offset, 4, false));
    return static_cast<std::uint64_t>(std::abs(std::int64_t{side}));
  };
  return ImageSize{side_at(18), side_at(22)};
}

std::optional<ImageSize> read_webp_size(std::string_view data) {
  if (data.substr(8, 4) != "WEBP"sv) return std::nullopt;
  const std::string_view kind = data.substr(12, 4);
  if (kind == "VP8 "sv) {
    return ImageSize{number_at(data, 26, 2, false) & 0x3FFFU,
                     number_at(data, 28, 2, false) & 0x3FFFU};
  }
  if (kind == "VP8L"sv) {
    const std::uint64_t bits = number_at(data, 21, 4, false);
    return ImageSize{(bits & 0x3FFFU) + 1, (bits >> 14U & 0x3FFFU) + 1};
  }
  if (kind == "VP8X"sv) {
    return ImageSize{number_at(data, 24, 3, false) + 1, number_at(data, 27, 3, false) + 1};
  }
  return std::nullopt;
}

// The first directory of a TIFF or BigTIFF.
//
//   entry of a TIFF     tag 2, type 2, number of values 4, value or offset 4 bytes
//   entry of a BigTIFF  tag 2, type 2, number of values 8, value or offset 8 bytes
struct TiffDirectory {
  explicit TiffDirectory(std::string_view data) : big_endian(data.front() == 'M') {
    const bool is_big_tiff = number_at(data, 2, 2, big_endian) == 43;
    const std::size_t count_bytes = is_big_tiff ? 8 : 2;
    word_bytes = is_big_tiff ? 8 : 4;
    const std::uint64_t begin = number_at(data, word_bytes, word_bytes, big_endian);
    entry_count = std::min(number_at(data, begin, count_bytes, big_endian), kMaxTags);
    first_entry = begin + count_bytes;
  }

  std::uint64_t entry(std::uint64_t k) const { return first_entry + k * (4 + 2 * word_bytes); }

  static constexpr std::uint64_t kMaxTags = 4096;
  bool big_endian;
  std::size_t word_bytes = 0;
  std::uint64_t entry_count = 0;
  std::uint64_t first_entry = 0;  // its offset
};

std::optional<ImageSize> read_tiff_size(std::string_view data) {
  constexpr std::uint64_t kWidthTag = 256;
  constexpr std::uint64_t kHeightTag = 257;
  const TiffDirectory directory(data);
  const bool big_endian = directory.big_endian;
  std::optional<std::uint64_t> width;
  std::optional<std::uint64_t> height;
  for (std::uint64_t k = 0; k < directory.entry_count; ++k) {
    const std::uint64_t entry = directory.entry(k);
    const std::uint64_t tag = number_at(data, entry, 2, big_endian);
    if (tag != kWidthTag && tag != kHeightTag) continue;
    const std::uint64_t type = number_at(data, entry + 2, 2, big_endian);
    std::size_t value_bytes = 4;
    if (type == 3) value_bytes = 2;
    if (type == 16) value_bytes = 8;
    const std::uint64_t value =
        number_at(data, entry + 4 + directory.word_bytes, value_bytes, big_endian);
    std::optional<std::uint64_t>& side = tag == kWidthTag ? width : height;
    if (!side) side = value;
  }
  if (!width || !height) return std::nullopt;
  return ImageSize{*width, *height};
}

std::optional<std::size_t> find_tiff_alpha(std::string_view data) {
  constexpr std::uint64_t kExtraTag = 338;
  constexpr std::uint64_t kUnassociatedAlpha = 2;
  const TiffDirectory directory(data);
  const std::size_t word_bytes = directory.word_bytes;
  for (std::uint64_t k = 0; k < directory.entry_count; ++k) {
    const std::uint64_t entry = directory.entry(k);
    if (number_at(data, entry, 2, directory.big_endian) != kExtraTag) continue;
    const std::uint64_t count = number_at(data, entry + 4, word_bytes, directory.big_endian);
    std::uint64_t offset = entry + 4 + word_bytes;
    if (2 * count > word_bytes) offset = number_at(data, offset, word_bytes, directory.big_endian);
    if (number_at(data, offset, 2, directory.big_endian) == kUnassociatedAlpha) return offset;
  }
  return std::nullopt;
}

// A side of a PNM, behind white space and comments; `position` is moved behind it.
std::optional<std::uint64_t> read_pnm_side(std::string_view header, std::size_t& position) {
  while (position < header.size() && !scan::is_digit(header[position])) {
    if (header[position] == '#') {
      position = header.find('\n', position);
      if (position == std::string_view::npos) return std::nullopt;
    } else if (!scan::is_white_space(header[position])) {
      return std::nullopt;
    }
    ++position;
  }
  std::uint64_t side = 0;
  const std::size_t first_digit = position;
  while (position < header.size() && scan::is_digit(header[position])) {
    if (position - first_digit == 9) return std::nullopt;
    side = side * 10 + static_cast<std::uint64_t>(header[position++] - '0');
  }
  const bool is_followed = position < header.size() && scan::is_white_space(header[position]);
  if (position == first_digit || !is_followed) return std::nullopt;
  return side;
}

// `position` is moved behind the size.
std::optional<ImageSize> read_pnm_size_at(std::string_view data, std::size_t& position) {
  constexpr std::size_t kMaxHeader = 4096;
  const std::string_view header = data.substr(0, kMaxHeader);
  position = 2;
  if (header.size() < 4 || scan::is_digit(header[position])) return std::nullopt;
  const std::optional<std::uint64_t> width = read_pnm_side(header, position);
  if (!width) return std::nullopt;
  const std::optional<std::uint64_t> height = read_pnm_side(header, position);
  if (!height) return std::nullopt;
  return ImageSize{*width, *height};
}

std::optional<ImageSize> read_pnm_size(std::string_view data) {
  std::size_t position = 0;
  return read_pnm_size_at(data, position);
}

using SizeReader = std::optional<ImageSize> (*)(std::string_view);

SizeReader find_size_reader(std::string_view data) {
  static constexpr std::array<std::pair<std::string_view, SizeReader>, 6> kReaders{{
      {"\xff\xd8"sv, read_jpeg_size},
      {"\x89PNG"sv, read_png_size},
      {"BM"sv, read_bmp_size},
      {"RIFF"sv, read_webp_size},
      {"II"sv, read_tiff_size},
      {"MM"sv, read_tiff_size},
  }};
  for (const auto& [magic, reader] : kReaders) {
    if (data.substr(0, magic.size()) == magic) return reader;
  }
  const bool is_pnm = data.size() > 1 && data[0] == 'P' && data[1] >= '1' && data[1] <= '6';
  return is_pnm ? read_pnm_size : nullptr;
}

}  // namespace

std::uint64_t ImageSize::pixels() const {
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  if (height != 0 && width > kMax / height) return kMax;
  return width * height;
}

std::optional<std::size_t> tiff_alpha_offset(std::string_view data) {
  if (data.substr(0, 2) != "II"sv && data.substr(0, 2) != "MM"sv) return std::nullopt;
  try {
    return find_tiff_alpha(data);
  } catch (const std::out_of_range&) {  // cut short: the decoder will report it
    return std::nullopt;
  }
}

std::optional<std::uint64_t> unscaled_white(std::string_view data) {
  const std::string_view magic = data.substr(0, 2);
  const bool is_text = magic == "P2"sv || magic == "P3"sv;
  if (!is_text && magic != "P5"sv && magic != "P6"sv) return std::nullopt;
  std::size_t position = 0;
  if (!read_pnm_size_at(data, position)) return std::nullopt;
  const std::optional<std::uint64_t> white = read_pnm_side(data, position);
  if (!white || *white == 0 || *white == 255 || *white == 65535) return std::nullopt;
  if (is_text && *white < 255) return std::nullopt;  // OpenCV scales these
  return white;
}

std::optional<ImageSize> read_size(std::string_view data) {
  const SizeReader reader = find_size_reader(data);
  if (reader == nullptr) return std::nullopt;
  try {
    return reader(data);
  } catch (const std::out_of_range&) {  // cut short: the decoder will report it
    return std::nullopt;
  }
}

std::string jpeg_damage(std::string_view data) {
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

}  // namespace calib8::headers

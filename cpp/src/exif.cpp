#include "exif.hpp"

#include <algorithm>
#include <utility>

#include "bytes.hpp"
#include "jpeg.hpp"
#include "png_chunks.hpp"
#include "webp.hpp"

namespace calib8::exif {
namespace {

constexpr std::size_t kOrientation = 274;
constexpr unsigned char kSegment = 0xE1;
constexpr std::string_view kSign{"Exif\0\0", 6};  // before the block in a segment
constexpr std::size_t kEntry = 12;                // bytes: tag, type, count, value or its place

Pixels transposed(const Pixels& from) {
  Pixels out(from.width, from.height, from.channels);
  for (int y = 0; y < out.height; ++y) {
    std::uint8_t* to = out.row(y);
    for (int x = 0; x < out.width; ++x) {
      to = std::copy_n(from.row(x) + y * from.channels, from.channels, to);
    }
  }
  return out;
}

void mirror_rows(Pixels& pixels) {
  for (int y = 0; y < pixels.height / 2; ++y) {
    std::uint8_t* row = pixels.row(y);
    std::swap_ranges(row, row + pixels.row_bytes(), pixels.row(pixels.height - 1 - y));
  }
}

void mirror_columns(Pixels& pixels) {
  for (int y = 0; y < pixels.height; ++y) {
    std::uint8_t* left = pixels.row(y);
    std::uint8_t* right = left + pixels.row_bytes() - pixels.channels;
    for (; left < right; left += pixels.channels, right -= pixels.channels) {
      std::swap_ranges(left, left + pixels.channels, right);
    }
  }
}

// A TIFF block, its numbers in the byte order that its first two bytes tell.
class Block {
 public:
  explicit Block(std::string_view data) : data_(data), little_(data.substr(0, 2) == "II") {}

  // Throws CutShort.
  std::size_t number(std::size_t at, std::size_t size) const {
    return little_ ? bytes::little(data_, at, size) : bytes::big(data_, at, size);
  }

  // Throws CutShort where so many bytes are not there.
  void require(std::size_t at, std::size_t size) const {
    if (at > data_.size() || size > data_.size() - at) throw bytes::CutShort();
  }

  // The same of fractions, 8 bytes each, at the place that a field tells.
  void require_ratios(std::size_t entry, std::size_t count) const {
    require(number(entry + 8, 4), 8 * count);
  }

 private:
  std::string_view data_;
  bool little_;
};

// Reads the fields that OpenCV reads: at the first that lies outside, it stops. Throws CutShort.
void look_into(const Block& block, std::size_t entry, std::size_t tag) {
  switch (tag) {
    case 270:      // description
    case 271:      // make
    case 272:      // model
    case 305:      // software
    case 306:      // date
    case 33432: {  // copyright
      const std::size_t length = block.number(entry + 4, 4);
      // up to four bytes stand in the field; OpenCV looks at the start of the block
      return block.require(length > 4 ? block.number(entry + 8, 4) : 8, length);
    }
    case 282:  // resolution across
    case 283:  // and down
      return block.require_ratios(entry, 1);
    case 318: return block.require_ratios(entry, 2);  // white point
    case 529: return block.require_ratios(entry, 3);  // weights of the colours
    case 319:                                         // the colours
    case 532:                                         // black and white
      return block.require_ratios(entry, 6);
    case 296:  // unit of the resolution
    case 531:  // place of the colours
      return block.require(entry + 8, 2);
    default: return;
  }
}

std::optional<int> orientation_in(const Block& block) {
  if (block.number(2, 2) != 42) return std::nullopt;
  const std::size_t directory = block.number(4, 4);
  const std::size_t count = block.number(directory, 2);
  for (std::size_t k = 0; k < count; ++k) {
    const std::size_t entry = directory + 2 + k * kEntry;
    const std::size_t tag = block.number(entry, 2);
    if (tag == kOrientation) return static_cast<int>(block.number(entry + 8, 2));
    look_into(block, entry, tag);
  }
  return std::nullopt;
}

std::optional<int> orientation(std::string_view block) {
  try {
    return orientation_in(Block(block));
  } catch (const bytes::CutShort&) {
    return std::nullopt;
  }
}

bool is_jpeg(std::string_view file) { return file.substr(0, 2) == "\xff\xd8"; }
bool is_png(std::string_view file) {
  return file.substr(0, png_chunks::kSign.size()) == png_chunks::kSign;
}

// Of the first block that tells it: XMP stands in segments of the same kind.
std::optional<int> told_by_segments(std::string_view file) {
  for (const jpeg::Segment& segment : jpeg::segments(file)) {
    if (segment.marker != kSegment || segment.body.substr(0, kSign.size()) != kSign) continue;
    const std::optional<int> found = orientation(segment.body.substr(kSign.size()));
    if (found) return found;
  }
  return std::nullopt;
}

}  // namespace

bool reads(std::string_view file) {
  return is_jpeg(file) || is_png(file) || file.substr(0, 4) == "RIFF";
}

std::optional<int> told(std::string_view file) {
  if (is_jpeg(file)) return told_by_segments(file);
  const auto block = is_png(file) ? png_chunks::body(file, "eXIf") : webp::exif_block(file);
  return block ? orientation(*block) : std::nullopt;
}

//   1 as it is    2 left to right   3 both, which turns it round   4 top to bottom
//   5 transposed  6 and then 2      7 and then 3                   8 and then 4
Pixels turned(Pixels pixels, std::optional<int> told) {
  const int orientation = told.value_or(1);
  if (orientation >= 5 && orientation <= 8) pixels = transposed(pixels);
  const bool columns = orientation == 2 || orientation == 3 || orientation == 6 || orientation == 7;
  const bool rows = orientation == 3 || orientation == 4 || orientation == 7 || orientation == 8;
  if (columns) mirror_columns(pixels);
  if (rows) mirror_rows(pixels);
  return pixels;
}

}  // namespace calib8::exif

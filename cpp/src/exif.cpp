#include "exif.hpp"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

namespace calib8::exif {
namespace {

constexpr std::uint32_t kOrientation = 274;
constexpr std::size_t kEntry = 12;  // bytes: tag, type, count, value or its place

// The numbers of a block, in the byte order that its first two bytes tell; nothing beyond its end.
class Block {
 public:
  explicit Block(std::string_view bytes) : bytes_(bytes), little_(bytes.substr(0, 2) == "II") {}

  bool holds(std::size_t at, std::size_t size) const {
    return at <= bytes_.size() && size <= bytes_.size() - at;
  }

  std::optional<std::uint32_t> number(std::size_t at, std::size_t size) const {
    if (!holds(at, size)) return std::nullopt;
    std::uint32_t value = 0;
    for (std::size_t k = 0; k < size; ++k) {
      value = value << 8U | static_cast<unsigned char>(bytes_[at + (little_ ? size - 1 - k : k)]);
    }
    return value;
  }

 private:
  std::string_view bytes_;
  bool little_;
};

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

// Whether a field of text lies inside; up to four bytes of it are looked for at the block's start,
// where OpenCV looks for them.
bool holds_text(const Block& block, std::size_t entry) {
  const std::size_t length = block.number(entry + 4, 4).value_or(0);
  const std::optional<std::uint32_t> place = block.number(entry + 8, 4);
  return place && block.holds(length > 4 ? *place : 8, length);
}

bool holds_ratios(const Block& block, std::size_t entry, std::size_t count) {
  const std::optional<std::uint32_t> place = block.number(entry + 8, 4);
  return place && block.holds(*place, 8 * count);
}

// Whether the fields that OpenCV looks into can be read; at the first that cannot, it stops.
bool readable(const Block& block, std::size_t entry, std::uint32_t tag) {
  switch (tag) {
    case 270:    // description
    case 271:    // make
    case 272:    // model
    case 305:    // software
    case 306:    // date
    case 33432:  // copyright
      return holds_text(block, entry);
    case 282:  // resolution across
    case 283:  // and down
      return holds_ratios(block, entry, 1);
    case 318:  // white point
      return holds_ratios(block, entry, 2);
    case 529:  // weights of the colours
      return holds_ratios(block, entry, 3);
    case 319:  // the colours
    case 532:  // black and white
      return holds_ratios(block, entry, 6);
    case kOrientation:
    case 296:  // unit of the resolution
    case 531:  // place of the colours
      return block.holds(entry + 8, 2);
    default: return true;
  }
}

}  // namespace

std::optional<int> orientation(std::string_view bytes) {
  const Block block(bytes);
  if (block.number(2, 2) != 42U) return std::nullopt;
  const std::size_t directory = block.number(4, 4).value_or(0);
  const std::uint32_t count = block.number(directory, 2).value_or(0);
  for (std::uint32_t k = 0; k < count; ++k) {
    const std::size_t entry = directory + 2 + k * kEntry;
    const std::optional<std::uint32_t> tag = block.number(entry, 2);
    if (!tag || !readable(block, entry, *tag)) return std::nullopt;
    if (*tag == kOrientation) return static_cast<int>(block.number(entry + 8, 2).value_or(1));
  }
  return std::nullopt;
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

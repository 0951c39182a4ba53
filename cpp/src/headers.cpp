#include "headers.hpp"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "bytes.hpp"
#include "jpeg.hpp"
#include "scan.hpp"

namespace calib8::headers {
namespace {

using bytes::big;
using bytes::little;
using std::string_view_literals::operator""sv;
using Found = std::optional<Sides>;
constexpr std::uint64_t kLongest = std::uint64_t{1} << 40U;  // a side that any limit refuses

std::int64_t absolute32(std::uint64_t value) {
  return std::abs(static_cast<std::int64_t>(static_cast<std::int32_t>(value)));
}

Sides both(std::uint64_t width, std::uint64_t height) {
  return {static_cast<std::int64_t>(width), static_cast<std::int64_t>(height)};
}

Found png(std::string_view data) { return both(big(data, 16, 4), big(data, 20, 4)); }

// Frames of every coding: SOF0 to SOF15 without the three markers that stand between them.
bool is_frame(unsigned char marker) {
  return marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC;
}

Found jpeg_frame(std::string_view data) {
  for (const jpeg::Segment& segment : jpeg::segments(data)) {
    if (is_frame(segment.marker)) return both(big(segment.body, 3, 2), big(segment.body, 1, 2));
  }
  return std::nullopt;
}

Found webp(std::string_view data) {
  const std::string_view kind =
      bytes::piece(data, 8, 4) == "WEBP" ? bytes::piece(data, 12, 4) : ""sv;
  if (kind == "VP8 ") return both(little(data, 26, 2) & 0x3FFFU, little(data, 28, 2) & 0x3FFFU);
  if (kind == "VP8X") {
    const auto side = [&](std::size_t at) {  // of what there is: the decoder refuses less
      const std::string_view found = bytes::piece(data, at, 3);
      return little(found, 0, found.size()) + 1;
    };
    return both(side(24), side(27));
  }
  if (kind != "VP8L") return std::nullopt;
  const std::uint64_t packed = little(data, 21, 4);
  return both((packed & 0x3FFFU) + 1, ((packed >> 14U) & 0x3FFFU) + 1);
}

Found bmp(std::string_view data) {
  if (little(data, 14, 4) == 12) return both(little(data, 18, 2), little(data, 20, 2));
  return Sides{absolute32(little(data, 18, 4)), absolute32(little(data, 22, 4))};
}

Found gif(std::string_view data) { return both(little(data, 6, 2), little(data, 8, 2)); }

// The first directory's tags 256 and 257; of a BigTIFF too.
Found tiff(std::string_view data) {
  const auto number = data.front() == 'I' ? little : big;
  const bool large = number(data, 2, 2) == 43;
  const std::size_t width = large ? 8 : 4;  // bytes of an offset
  const std::uint64_t at = number(data, width, width);
  if (at > data.size()) return std::nullopt;
  const std::uint64_t count = number(data, at, large ? 8 : 2);
  Sides found;
  for (std::uint64_t k = 0; k < std::min<std::uint64_t>(count, 4096); ++k) {
    const std::uint64_t entry = at + (large ? 8 : 2) + k * (large ? 20 : 12);
    const std::uint64_t tag = number(data, entry, 2);
    const std::uint64_t kind = number(data, entry + 2, 2);
    if (tag != 256 && tag != 257) continue;
    const std::size_t size = kind == 3 ? 2 : kind == 16 ? 8 : 4;
    const std::uint64_t value = number(data, entry + (large ? 12 : 8), size);
    (tag == 256 ? found.width : found.height) =
        static_cast<std::int64_t>(std::min(value, kLongest));
  }
  if (found.width == 0 || found.height == 0) return std::nullopt;
  return found;
}

// White space and comments, one at least, before a number of 1 to 9 digits.
std::optional<std::int64_t> pnm_number(std::string_view& data) {
  bool apart = false;
  for (; !data.empty() && (scan::space(data.front()) || data.front() == '#'); apart = true) {
    const std::size_t end = data.front() == '#' ? data.find('\n') : 0;
    if (end == std::string_view::npos) return std::nullopt;
    data.remove_prefix(end + 1);
  }
  std::int64_t value = 0;
  std::size_t digits = 0;
  for (; digits < data.size() && digits < 10 && scan::digit(data[digits]); ++digits) {
    value = value * 10 + (data[digits] - '0');
  }
  data.remove_prefix(digits);
  const bool sound = apart && digits > 0 && digits < 10;
  return sound ? std::optional<std::int64_t>(value) : std::nullopt;
}

Found pnm(std::string_view data) {
  std::string_view rest = data.substr(2, 4094);
  const auto width = pnm_number(rest);
  if (!width) return std::nullopt;
  const auto height = pnm_number(rest);
  if (!height || rest.empty() || !scan::space(rest.front())) return std::nullopt;
  return Sides{*width, *height};
}

// JPEG 2000 and AVIF: the box that tells is one of the first.
Found boxed(std::string_view data) {
  const std::string_view start = data.substr(0, std::size_t{1} << 16U);
  if (const std::size_t at = start.find("ihdr"); at != std::string_view::npos) {
    return both(big(data, at + 8, 4), big(data, at + 4, 4));
  }
  if (const std::size_t at = start.find("ispe"); at != std::string_view::npos) {
    return both(big(data, at + 8, 4), big(data, at + 12, 4));
  }
  return std::nullopt;
}

Found codestream(std::string_view data) {
  const auto side = [&](std::size_t at) {
    return static_cast<std::int64_t>(big(data, at, 4)) -
           static_cast<std::int64_t>(big(data, at + 8, 4));
  };
  return Sides{side(8), side(12)};
}

struct Kind {
  std::string_view sign;
  Found (*read)(std::string_view);
};

constexpr std::array<Kind, 17> kKinds{{{"\x89PNG\r\n\x1a\n"sv, png},
                                       {"\xff\xd8"sv, jpeg_frame},
                                       {"RIFF"sv, webp},
                                       {"BM"sv, bmp},
                                       {"GIF8"sv, gif},
                                       {"II*\0"sv, tiff},
                                       {"MM\0*"sv, tiff},
                                       {"II+\0"sv, tiff},
                                       {"MM\0+"sv, tiff},
                                       {"\0\0\0\x0cjP  "sv, boxed},
                                       {"\xff\x4f\xff\x51"sv, codestream},
                                       {"P1"sv, pnm},
                                       {"P2"sv, pnm},
                                       {"P3"sv, pnm},
                                       {"P4"sv, pnm},
                                       {"P5"sv, pnm},
                                       {"P6"sv, pnm}}};

}  // namespace

std::optional<Sides> sides(std::string_view data) {
  try {
    for (const Kind& kind : kKinds) {
      if (data.substr(0, kind.sign.size()) == kind.sign) return kind.read(data);
    }
    return bytes::piece(data, 4, 4) == "ftyp" ? boxed(data) : std::nullopt;
  } catch (const bytes::CutShort&) {  // the decoder says so
    return std::nullopt;
  }
}

}  // namespace calib8::headers

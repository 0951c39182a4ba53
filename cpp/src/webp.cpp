#include "webp.hpp"

#include <vector>

#include "bytes.hpp"

// RIFF size WEBP, then chunks: name, size, body, and a byte of padding behind an odd body. The first
// one of an extended file is VP8X: flags, three bytes, the canvas's sides less one in three bytes each.
// Source: WebP Container Specification (RFC 9649, section 2.7).
namespace calib8::webp {
namespace {

constexpr unsigned kAnimation = 0x02;
constexpr unsigned kExif = 0x08;
constexpr unsigned kAlpha = 0x10;
constexpr std::size_t kHead = 12;       // bytes before the first chunk of a file
constexpr std::size_t kFrameHead = 16;  // bytes before the first chunk of a frame

struct Chunk {
  std::string_view name;
  std::string_view body;
};

// Nothing where one of them is cut short.
std::optional<std::vector<Chunk>> chunks_of(std::string_view data) {
  std::vector<Chunk> found;
  while (data.size() >= 8) {
    const std::size_t size = bytes::little(data, 4, 4);
    if (size > data.size() - 8) return std::nullopt;
    found.push_back({data.substr(0, 4), data.substr(8, size)});
    data = bytes::piece(data, 8 + size + size % 2, data.size());
  }
  return data.empty() ? std::optional(found) : std::nullopt;
}

// The body of the first chunk of this name.
std::optional<std::string_view> body_of(const std::vector<Chunk>& chunks, std::string_view name) {
  for (const Chunk& one : chunks) {
    if (one.name == name) return one.body;
  }
  return std::nullopt;
}

// The chunks of a whole extended WebP with this flag; none of another file.
std::vector<Chunk> flagged(std::string_view data, unsigned flag) {
  if (data.substr(0, 4) != "RIFF" || bytes::piece(data, 8, 8) != "WEBPVP8X") return {};
  if (data.size() < 30 || (bytes::little(data, 20, 1) & flag) == 0) return {};
  const std::size_t size = bytes::little(data, 4, 4);
  if (size < 4 || size > data.size() - 8) return {};
  return chunks_of(data.substr(kHead, size - 4)).value_or(std::vector<Chunk>{});
}

// Whether every picture of an animation is there.
bool frames_are_whole(const std::vector<Chunk>& chunks) {
  bool told = false;  // how often it repeats, before the first of them
  for (const Chunk& one : chunks) {
    told = told || one.name == "ANIM";
    if (one.name != "ANMF") continue;
    if (!told || one.body.size() < kFrameHead) return false;
    const auto inner = chunks_of(one.body.substr(kFrameHead));
    if (!inner || !(body_of(*inner, "VP8 ") || body_of(*inner, "VP8L"))) return false;
  }
  return true;
}

std::string little_bytes(std::size_t value, std::size_t size) {
  std::string text;
  for (; size > 0; --size, value >>= 8U) text += static_cast<char>(value & 0xFFU);
  return text;
}

int side(std::string_view data, std::size_t at) {
  return static_cast<int>(bytes::little(data, at, 3));
}

}  // namespace

std::optional<First> first_picture(std::string_view data) {
  const std::vector<Chunk> chunks = flagged(data, kAnimation);
  const auto frame = body_of(chunks, "ANMF");
  if (!frame || !frames_are_whole(chunks)) return std::nullopt;
  const std::string_view picture = frame->substr(kFrameHead);
  std::string body(picture);
  if (picture.substr(0, 4) == "ALPH") {
    body = "VP8X" + little_bytes(10, 4) + little_bytes(kAlpha, 4) +
           std::string(frame->substr(6, 6)) + body;
  }
  return First{"RIFF" + little_bytes(body.size() + 4, 4) + "WEBP" + body, 2 * side(*frame, 0),
               2 * side(*frame, 3), side(data, 24) + 1, side(data, 27) + 1};
}

std::optional<std::string_view> exif_block(std::string_view data) {
  return body_of(flagged(data, kExif), "EXIF");
}

}  // namespace calib8::webp

#include "webp.hpp"

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

// The body of the first chunk of this name.
std::optional<std::string_view> chunk(std::string_view chunks, std::string_view name) {
  while (chunks.size() >= 8) {
    const std::size_t size = bytes::little(chunks, 4, 4);
    if (chunks.substr(0, 4) == name) return bytes::piece(chunks, 8, size);
    chunks = bytes::piece(chunks, 8 + size + size % 2, chunks.size());
  }
  return std::nullopt;
}

// The chunks of an extended WebP with this flag.
std::optional<std::string_view> flagged(std::string_view data, unsigned flag) {
  if (data.substr(0, 4) != "RIFF" || bytes::piece(data, 8, 8) != "WEBPVP8X") return std::nullopt;
  if (data.size() < 30 || (bytes::little(data, 20, 1) & flag) == 0) return std::nullopt;
  return data.substr(kHead);
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
  const auto chunks = flagged(data, kAnimation);
  const auto frame = chunks ? chunk(*chunks, "ANMF") : std::nullopt;
  if (!frame || frame->size() < kFrameHead) return std::nullopt;
  const std::string_view picture = frame->substr(kFrameHead);
  std::string body(picture);
  if (picture.substr(0, 4) == "ALPH") {
    body = "VP8X" + little_bytes(10, 4) + little_bytes(kAlpha, 4) + std::string(frame->substr(6, 6)) +
           body;
  }
  return First{"RIFF" + little_bytes(body.size() + 4, 4) + "WEBP" + body,
               2 * side(*frame, 0),
               2 * side(*frame, 3),
               side(data, 24) + 1,
               side(data, 27) + 1};
}

std::optional<std::string_view> exif_block(std::string_view data) {
  const auto chunks = flagged(data, kExif);
  return chunks ? chunk(*chunks, "EXIF") : std::nullopt;
}

}  // namespace calib8::webp

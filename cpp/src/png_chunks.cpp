#include "png_chunks.hpp"

#include <array>
#include <cstdint>

#include "bytes.hpp"

namespace calib8::png_chunks {
namespace {

constexpr std::array<std::uint32_t, 256> crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t n = 0; n < 256; ++n) {
    std::uint32_t c = n;
    for (int k = 0; k < 8; ++k) c = (c & 1U) != 0 ? 0xEDB88320U ^ (c >> 1U) : c >> 1U;
    table[n] = c;
  }
  return table;
}

// The CRC of a PNG chunk (ISO 3309).
std::uint32_t crc32(std::string_view bytes) {
  static constexpr std::array<std::uint32_t, 256> kTable = crc_table();
  std::uint32_t c = 0xFFFFFFFFU;
  for (const char byte : bytes) {
    c = kTable[(c ^ static_cast<unsigned char>(byte)) & 0xFFU] ^ (c >> 8U);
  }
  return ~c;
}

}  // namespace

std::string fault(std::string_view data) {
  data.remove_prefix(kSign.size());
  while (data.size() >= 12) {
    const std::size_t length = bytes::big(data, 0, 4);
    if (length > data.size() - 12) return "cut short";
    const std::string_view body = data.substr(4, length + 4);
    if (crc32(body) != bytes::big(data, length + 8, 4)) {
      return "damaged: a checksum does not fit";
    }
    if (body.substr(0, 4) == "IEND") return {};
    data.remove_prefix(length + 12);
  }
  return "cut short";
}

std::optional<std::string_view> body(std::string_view data, std::string_view name) {
  data.remove_prefix(kSign.size());
  while (data.size() >= 12) {
    const std::size_t length = bytes::big(data, 0, 4);
    if (data.substr(4, 4) == name) return data.substr(8, length);
    data = bytes::piece(data, length + 12, data.size());
  }
  return std::nullopt;
}

}  // namespace calib8::png_chunks

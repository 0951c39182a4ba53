// Whole numbers in the bytes of a file.
#pragma once

#include <cstdint>
#include <string_view>

namespace calib8::bytes {

// The bytes end before the number does.
struct CutShort {};

// The `size` bytes from `offset` on, at most 8, the lowest first. Throws CutShort.
inline std::uint64_t little(std::string_view data, std::size_t offset, std::size_t size) {
  if (offset > data.size() || size > data.size() - offset) throw CutShort();
  std::uint64_t value = 0;
  for (std::size_t k = size; k-- > 0;) {
    value = (value << 8U) | static_cast<unsigned char>(data[offset + k]);
  }
  return value;
}

// The `size` bytes from `offset` on, or those of them that there are.
inline std::string_view piece(std::string_view data, std::size_t offset, std::size_t size) {
  return data.substr(offset < data.size() ? offset : data.size(), size);
}

}  // namespace calib8::bytes

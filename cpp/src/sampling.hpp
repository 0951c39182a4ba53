// Which samples are used where not all of them are: an order of low discrepancy, which keeps step with
// no pattern in the feed; deploy/feed/sampling.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

namespace calib8 {

// Flips each bit or not, as the bits below it decide.
inline std::uint32_t scramble_bits(std::uint32_t x) {
  constexpr std::uint32_t kSeed = 0x9E3779B9u;
  x ^= x * 0x3D20ADEAu;
  x += kSeed;
  x *= (kSeed >> 16) | 1u;
  x ^= x * 0x05526C56u;
  return x ^ x * 0x53A22864u;
}

// The 32 bits in reverse order.
inline std::uint32_t reverse_bits(std::uint32_t x) {
  std::uint32_t result = 0;
  for (int bit = 0; bit < 32; ++bit) {
    const std::uint32_t value = x >> bit & 1u;
    result |= value << (31 - bit);
  }
  return result;
}

// At most `max_samples` indices below `count`, ascending.
inline std::vector<std::size_t> sample_indices(std::size_t count, std::size_t max_samples) {
  const std::size_t sample_count = std::min(max_samples, count);
  std::set<std::size_t> indices;
  for (std::uint32_t step = 0; indices.size() < sample_count; ++step) {
    const std::uint64_t fraction = reverse_bits(scramble_bits(step));  // of 2^32
    indices.insert(static_cast<std::size_t>(fraction * count >> 32));
  }
  return {indices.begin(), indices.end()};
}

}  // namespace calib8

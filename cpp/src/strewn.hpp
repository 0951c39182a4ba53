// Which samples are taken where not all are: from all over, in step with nothing in the feed;
// deploy/feed/sampling.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

namespace calib8 {

// Each bit turned or not by what is below it.
inline std::uint32_t scrambled(std::uint32_t x) {
  constexpr std::uint32_t kSeed = 0x9E3779B9u;
  x ^= x * 0x3D20ADEAu;
  x += kSeed;
  x *= (kSeed >> 16) | 1u;
  x ^= x * 0x05526C56u;
  return x ^ x * 0x53A22864u;
}

// The first of 32 bits as the last.
inline std::uint32_t reversed(std::uint32_t x) {
  std::uint32_t out = 0;
  for (int bit = 0; bit < 32; ++bit) out |= (x >> bit & 1u) << (31 - bit);
  return out;
}

// At most so many places below count, rising.
inline std::vector<std::size_t> some(std::size_t count, std::size_t most) {
  std::set<std::size_t> found;
  for (std::uint32_t step = 0; found.size() < std::min(most, count); ++step) {
    found.insert(static_cast<std::size_t>(std::uint64_t{reversed(scrambled(step))} * count >> 32));
  }
  return {found.begin(), found.end()};
}

}  // namespace calib8

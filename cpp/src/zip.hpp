// A zip archive as .npz files are: entries that are stored as they are, or deflated.
//
// Source: PKWARE's APPNOTE.TXT, "4.3 General Format of a .ZIP file"; RFC 1951 by zlib.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace calib8::zip {

// Bytes that are no such archive, and why, in half a sentence.
class Broken : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Entry {
  std::string name;
  bool deflated = false;
  std::uint32_t crc = 0;
  std::uint64_t packed = 0;  // bytes in the file
  std::uint64_t size = 0;    // bytes unpacked
  std::uint64_t begin = 0;   // offset of the first packed byte
};

// Reads `size` bytes from an offset on; all of them, or throws.
using ReadAt = std::function<std::string(std::uint64_t at, std::size_t size)>;

// The entries of a file of `size` bytes, at most `most` of them. Throws Broken.
std::vector<Entry> entries(const ReadAt& read, std::uint64_t size, std::size_t most);

// A deflated entry in pieces, never more than it tells of. Throws Broken: damaged.
void inflate(const ReadAt& read, const Entry& entry,
             const std::function<void(std::string_view)>& take);

}  // namespace calib8::zip

// A zip archive as numpy.savez writes it: entries that are stored as they are.
//
// Source: PKWARE's APPNOTE.TXT, "4.3 General Format of a .ZIP file".
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
  std::uint64_t size = 0;   // bytes
  std::uint64_t begin = 0;  // offset of the first one
};

// Reads `size` bytes from an offset on; all of them, or throws.
using ReadAt = std::function<std::string(std::uint64_t offset, std::size_t size)>;

// The entries of a file of `size` bytes, at most `max_entries` of them. Throws Broken: damaged, or
// compressed.
std::vector<Entry> entries(const ReadAt& read, std::uint64_t size, std::size_t max_entries);

}  // namespace calib8::zip

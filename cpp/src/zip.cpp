#include "zip.hpp"

#include <algorithm>

#include "bytes.hpp"

namespace calib8::zip {
namespace {

using bytes::little;

constexpr std::uint64_t kEnd = 22;          // bytes of the end of the table of contents
constexpr std::uint64_t kComment = 0xFFFF;  // at most, behind it
constexpr std::uint64_t kRow = 46;          // of the table, without names
constexpr std::uint64_t kMostListing = std::uint64_t{128} << 20U;
constexpr std::uint64_t kIn64 = 0xFFFFFFFF;  // "see the fields of 64 bits"

struct Listing {
  std::uint64_t count = 0;
  std::uint64_t size = 0;
  std::uint64_t begin = 0;
};

Listing listing_64(const ReadAt& read, std::uint64_t size, std::uint64_t end) {
  if (end < 20) throw Broken("its end is damaged");
  const std::string locator = read(end - 20, 20);
  if (locator.substr(0, 4) != "PK\x06\x07") throw Broken("its end is damaged");
  const std::uint64_t at = little(locator, 8, 8);
  if (at > size || size - at < 56) throw Broken("its end is damaged");
  const std::string own = read(at, 56);
  if (own.substr(0, 4) != "PK\x06\x06") throw Broken("its end is damaged");
  return {little(own, 32, 8), little(own, 40, 8), little(own, 48, 8)};
}

Listing listing_of(const ReadAt& read, std::uint64_t size) {
  const std::uint64_t length = std::min(size, kEnd + kComment);
  const std::string tail = read(size - length, length);
  const std::size_t place = tail.rfind("PK\x05\x06");
  if (place == std::string::npos || tail.size() - place < kEnd) throw Broken("it is no zip file");
  Listing found{little(tail, place + 10, 2), little(tail, place + 12, 4),
                little(tail, place + 16, 4)};
  const bool in_64 = found.count == 0xFFFF || found.size == kIn64 || found.begin == kIn64;
  return in_64 ? listing_64(read, size, size - length + place) : found;
}

// The fields that did not fit into 32 bits, in their order.
void take_64(std::initializer_list<std::uint64_t*> fields, std::string_view extra) {
  while (extra.size() >= 4) {
    const std::uint64_t id = little(extra, 0, 2);
    const std::uint64_t length = little(extra, 2, 2);
    const std::string_view own = bytes::piece(extra, 4, length);
    extra.remove_prefix(std::min<std::size_t>(extra.size(), 4 + length));
    if (id != 1) continue;
    std::size_t at = 0;
    for (std::uint64_t* field : fields) {
      if (*field != kIn64) continue;
      *field = little(own, at, 8);
      at += 8;
    }
  }
}

// The data begin behind the local header, whose extra field may be of another length than the table's.
std::uint64_t data_of(const ReadAt& read, std::uint64_t size, std::uint64_t header,
                      const std::string& name) {
  const std::size_t length = 30 + name.size();
  if (header > size || size - header < length) throw Broken("a local header is damaged");
  const std::string local = read(header, length);
  if (local.substr(0, 4) != "PK\x03\x04" || little(local, 26, 2) != name.size() ||
      local.substr(30) != name) {
    throw Broken("a local header is damaged");
  }
  return header + length + little(local, 28, 2);
}

Entry entry_of(const ReadAt& read, std::uint64_t size, std::string_view row) {
  Entry entry;
  const std::uint64_t method = little(row, 10, 2);
  if ((little(row, 8, 2) & 1U) != 0) throw Broken("it is encrypted");
  if (method != 0) throw Broken("it is compressed, which only calib8 for Python reads");
  std::uint64_t packed = little(row, 20, 4);
  entry.size = little(row, 24, 4);
  std::uint64_t header = little(row, 42, 4);
  const std::uint64_t name = little(row, 28, 2);
  entry.name = bytes::piece(row, kRow, name);
  take_64({&entry.size, &packed, &header}, bytes::piece(row, kRow + name, little(row, 30, 2)));
  entry.begin = data_of(read, size, header, entry.name);
  if (entry.begin > size || size - entry.begin < packed) throw Broken("it is cut short");
  if (packed != entry.size) throw Broken("its sizes contradict each other");
  return entry;
}

}  // namespace

std::vector<Entry> entries(const ReadAt& read, std::uint64_t size, std::size_t most) {
  try {
    const Listing listing = listing_of(read, size);
    if (listing.count > most || listing.size > kMostListing) {
      throw Broken("it has more than " + std::to_string(most) + " entries");
    }
    if (listing.begin > size || size - listing.begin < listing.size)
      throw Broken("it is cut short");
    const std::string table = read(listing.begin, listing.size);
    std::vector<Entry> found;
    std::string_view rest = table;
    for (std::uint64_t k = 0; k < listing.count; ++k) {
      if (rest.substr(0, 4) != "PK\x01\x02") throw Broken("its table of contents is damaged");
      const std::uint64_t length =
          kRow + little(rest, 28, 2) + little(rest, 30, 2) + little(rest, 32, 2);
      if (length > rest.size()) throw Broken("its table of contents is damaged");
      found.push_back(entry_of(read, size, rest.substr(0, length)));
      rest.remove_prefix(length);
    }
    return found;
  } catch (const bytes::CutShort&) {
    throw Broken("its table of contents is damaged");
  }
}

}  // namespace calib8::zip

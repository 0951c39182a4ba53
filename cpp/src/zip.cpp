#include "zip.hpp"

#include <algorithm>

#include "bytes.hpp"

namespace calib8::zip {
namespace {

using bytes::little;

constexpr std::uint64_t kEndBytes = 22;             // bytes of the end of the table of contents
constexpr std::uint64_t kMaxCommentBytes = 0xFFFF;  // at most, behind it
constexpr std::uint64_t kRowBytes = 46;             // of the table, without names
constexpr std::uint64_t kMaxListingBytes = std::uint64_t{128} << 20U;
constexpr std::uint64_t kSee64BitField = 0xFFFFFFFF;  // "see the fields of 64 bits"

struct Listing {
  std::uint64_t count = 0;
  std::uint64_t size = 0;
  std::uint64_t begin = 0;
};

Listing read_listing_64(const ReadAt& read, std::uint64_t size, std::uint64_t end) {
  if (end < 20) throw Broken("its end is damaged");
  const std::string locator = read(end - 20, 20);
  if (locator.substr(0, 4) != "PK\x06\x07") throw Broken("its end is damaged");
  const std::uint64_t offset = little(locator, 8, 8);
  if (offset > size || size - offset < 56) throw Broken("its end is damaged");
  const std::string record = read(offset, 56);
  if (record.substr(0, 4) != "PK\x06\x06") throw Broken("its end is damaged");
  return {little(record, 32, 8), little(record, 40, 8), little(record, 48, 8)};
}

Listing read_listing(const ReadAt& read, std::uint64_t size) {
  const std::uint64_t length = std::min(size, kEndBytes + kMaxCommentBytes);
  const std::string tail = read(size - length, length);
  const std::size_t position = tail.rfind("PK\x05\x06");
  if (position == std::string::npos || tail.size() - position < kEndBytes)
    throw Broken("it is no zip file");
  Listing listing{little(tail, position + 10, 2), little(tail, position + 12, 4),
                  little(tail, position + 16, 4)};
  const bool needs_64_bits =
      listing.count == 0xFFFF || listing.size == kSee64BitField || listing.begin == kSee64BitField;
  return needs_64_bits ? read_listing_64(read, size, size - length + position) : listing;
}

// The fields that did not fit into 32 bits, in their order.
void replace_64_bit_fields(std::initializer_list<std::uint64_t*> fields, std::string_view extra) {
  while (extra.size() >= 4) {
    const std::uint64_t id = little(extra, 0, 2);
    const std::uint64_t length = little(extra, 2, 2);
    const std::string_view field_bytes = bytes::piece(extra, 4, length);
    extra.remove_prefix(std::min<std::size_t>(extra.size(), 4 + length));
    if (id != 1) continue;
    std::size_t offset = 0;
    for (std::uint64_t* field : fields) {
      if (*field != kSee64BitField) continue;
      *field = little(field_bytes, offset, 8);
      offset += 8;
    }
  }
}

// The data begin behind the local header, whose extra field may be of another length than the table's.
std::uint64_t find_data(const ReadAt& read, std::uint64_t size, std::uint64_t header,
                        const std::string& name) {
  const std::size_t length = 30 + name.size();
  if (header > size || size - header < length) throw Broken("a local header is damaged");
  const std::string local_header = read(header, length);
  if (local_header.substr(0, 4) != "PK\x03\x04" || little(local_header, 26, 2) != name.size() ||
      local_header.substr(30) != name) {
    throw Broken("a local header is damaged");
  }
  return header + length + little(local_header, 28, 2);
}

Entry read_entry(const ReadAt& read, std::uint64_t size, std::string_view row) {
  Entry entry;
  const std::uint64_t method = little(row, 10, 2);
  if ((little(row, 8, 2) & 1U) != 0) throw Broken("it is encrypted");
  if (method != 0) throw Broken("it is compressed, which only calib8 for Python reads");
  std::uint64_t stored_bytes = little(row, 20, 4);
  entry.size = little(row, 24, 4);
  std::uint64_t header = little(row, 42, 4);
  const std::uint64_t name_bytes = little(row, 28, 2);
  entry.name = bytes::piece(row, kRowBytes, name_bytes);
  replace_64_bit_fields({&entry.size, &stored_bytes, &header},
                        bytes::piece(row, kRowBytes + name_bytes, little(row, 30, 2)));
  entry.begin = find_data(read, size, header, entry.name);
  if (entry.begin > size || size - entry.begin < stored_bytes) throw Broken("it is cut short");
  if (stored_bytes != entry.size) throw Broken("its sizes contradict each other");
  return entry;
}

}  // namespace

std::vector<Entry> entries(const ReadAt& read, std::uint64_t size, std::size_t max_entries) {
  try {
    const Listing listing = read_listing(read, size);
    if (listing.count > max_entries || listing.size > kMaxListingBytes) {
      throw Broken("it has more than " + std::to_string(max_entries) + " entries");
    }
    if (listing.begin > size || size - listing.begin < listing.size)
      throw Broken("it is cut short");
    const std::string table = read(listing.begin, listing.size);
    std::vector<Entry> result;
    std::string_view remaining_table = table;
    for (std::uint64_t k = 0; k < listing.count; ++k) {
      if (remaining_table.substr(0, 4) != "PK\x01\x02")
        throw Broken("its table of contents is damaged");
      const std::uint64_t length = kRowBytes + little(remaining_table, 28, 2) +
                                   little(remaining_table, 30, 2) + little(remaining_table, 32, 2);
      if (length > remaining_table.size()) throw Broken("its table of contents is damaged");
      result.push_back(read_entry(read, size, remaining_table.substr(0, length)));
      remaining_table.remove_prefix(length);
    }
    return result;
  } catch (const bytes::CutShort&) {
    throw Broken("its table of contents is damaged");
  }
}

}  // namespace calib8::zip

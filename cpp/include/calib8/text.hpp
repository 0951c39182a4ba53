// Text formatted as in Python, so that messages of both languages agree.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8::text {

// A string in quotes with escapes, as Python's repr of the bytes read as UTF-8 with
// "surrogateescape": a byte that is not UTF-8 becomes \udcXX.
std::string repr(std::string_view bytes);

// As `repr`, with bytes that are not UTF-8 replaced by U+FFFD.
std::string repr_replaced(std::string_view bytes);

// The first `count` characters (a byte that is not UTF-8 counts as one).
std::string_view head(std::string_view bytes, std::size_t count);

// A file name for a message: one line, unprintable characters escaped.
std::string printable(std::string_view name);

// repr of a list of strings: ['a', 'b'].
std::string repr(const std::vector<std::string>& list);

// Whether all bytes are UTF-8.
bool is_utf8(std::string_view bytes);

// ASCII lower case.
std::string lower(std::string_view text);

// Strip white space (Unicode's, as Python defines it) from both ends.
std::string_view strip(std::string_view text);

// A number with its thousands apart: 100,000.
std::string with_commas(std::uint64_t number);

// Split a stripped text at its last white space; the second part is empty if there is none.
std::pair<std::string_view, std::string_view> split_last(std::string_view text);

}  // namespace calib8::text
CALIB8_EXPORT_END

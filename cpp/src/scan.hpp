// Character classes of ASCII, independent of the locale.
#pragma once

#include <algorithm>
#include <string_view>

namespace calib8::scan {

inline bool digit(char c) { return c >= '0' && c <= '9'; }

inline bool letter(char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); }

inline bool space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

inline bool hex_digit(char c) {
  return digit(c) || (c >= 'A' && c <= 'F') || (c >= 'a' && c <= 'f');
}

// 1 to 8 hex digits and nothing else.
inline bool hex(std::string_view text) {
  return !text.empty() && text.size() <= 8 && std::all_of(text.begin(), text.end(), hex_digit);
}

inline bool digits(std::string_view text, std::size_t least, std::size_t most) {
  return text.size() >= least && text.size() <= most &&
         std::all_of(text.begin(), text.end(), digit);
}

}  // namespace calib8::scan

// Character classes of ASCII, independent of the locale.
#pragma once

#include <algorithm>
#include <string_view>

namespace calib8::scan {

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

inline bool is_letter(char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z'); }

inline bool is_white_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

inline bool is_hex_digit(char c) {
  return is_digit(c) || (c >= 'A' && c <= 'F') || (c >= 'a' && c <= 'f');
}

// 1 to 8 hex digits and nothing else.
inline bool is_hex(std::string_view text) {
  return !text.empty() && text.size() <= 8 && std::all_of(text.begin(), text.end(), is_hex_digit);
}

inline bool are_digits(std::string_view text, std::size_t min_size, std::size_t max_size) {
  return text.size() >= min_size && text.size() <= max_size &&
         std::all_of(text.begin(), text.end(), is_digit);
}

}  // namespace calib8::scan

#include "calib8/text.hpp"

#include <cstdint>
#include <cstdio>

namespace calib8::text {
namespace {

struct Character {
  char32_t code;     // the code point; the byte itself where it is no UTF-8
  std::size_t size;  // bytes taken
  bool valid;
};

bool continues(std::string_view bytes, std::size_t index) {
  return index < bytes.size() && (static_cast<unsigned char>(bytes[index]) & 0xC0U) == 0x80U;
}

// One character by the UTF-8 table of RFC 3629 (no overlong forms, no surrogates).
Character decode(std::string_view bytes, std::size_t index) {
  const auto byte = [&](std::size_t k) -> char32_t {
    return static_cast<unsigned char>(bytes[index + k]);
  };
  const char32_t first = byte(0);
  if (first < 0x80) return {first, 1, true};
  const std::size_t size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4) return {first, 1, false};
  char32_t code = first & (0x7FU >> size);
  for (std::size_t k = 1; k < size; ++k) {
    if (!continues(bytes, index + k)) return {first, 1, false};
    code = (code << 6U) | (byte(k) & 0x3FU);
  }
  const bool overlong = (size == 3 && code < 0x800) || (size == 4 && code < 0x10000);
  if (overlong || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) return {first, 1, false};
  return {code, size, true};
}

// Bytes that Python's decoder replaces by one U+FFFD: the longest start of a character.
std::size_t replaced_size(std::string_view bytes, std::size_t index) {
  const auto first = static_cast<unsigned char>(bytes[index]);
  if (first < 0xC2 || first > 0xF4) return 1;
  const std::size_t full_size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  std::size_t size = 1;
  while (size < full_size && continues(bytes, index + size)) {
    const auto next = static_cast<unsigned char>(bytes[index + size]);
    const bool is_too_low = (first == 0xE0 && next < 0xA0) || (first == 0xF0 && next < 0x90);
    const bool is_too_high = (first == 0xED && next > 0x9F) || (first == 0xF4 && next > 0x8F);
    if (size == 1 && (is_too_low || is_too_high)) return 1;
    ++size;
  }
  return size;
}

// The ranges that Python does not call printable: no letters, or none assigned in any version of
// Unicode; those that some version assigned are left to the reader.
bool is_printable(char32_t code) {
  if (code < 0x20 || code == 0x7F || (code >= 0x80 && code <= 0xA0) || code == 0xAD) return false;
  if (code >= 0x2000 && code <= 0x200F) return false;
  if (code >= 0x2028 && code <= 0x202F) return false;
  if (code >= 0x205F && code <= 0x206F) return false;
  const bool is_private = code >= 0xE000 && code <= 0xF8FF;  // private
  const bool is_noncharacter = (code >= 0xFDD0 && code <= 0xFDEF) || (code & 0xFFFEU) == 0xFFFE;
  const bool is_selector = code >= 0xE0100 && code <= 0xE01EF;
  return code != 0x3000 && code != 0xFEFF && !is_private && !is_noncharacter &&
         (code < 0x323B0 || is_selector);
}

// What Python's str.isspace() says.
bool is_space(const Character& c) {
  if (!c.valid) return false;
  const bool is_control = (c.code >= 0x09 && c.code <= 0x0D) || (c.code >= 0x1C && c.code <= 0x1F);
  const bool is_typographic = c.code >= 0x2000 && c.code <= 0x200A;
  constexpr std::u32string_view kOtherSpaces = U" \u00A0\u1680\u2028\u2029\u202F\u205F\u3000";
  return is_control || is_typographic || c.code == 0x85 ||
         kOtherSpaces.find(c.code) != std::u32string_view::npos;
}

// Where the last character begins; a byte that is no UTF-8 is one.
std::size_t last_begin(std::string_view text) {
  std::size_t index = text.size() - 1;
  while (index > 0 && text.size() - index < 4 && continues(text, index)) --index;
  return index + decode(text, index).size == text.size() ? index : text.size() - 1;
}

std::string_view strip_end(std::string_view text) {
  while (!text.empty()) {
    const std::size_t begin = last_begin(text);
    if (!is_space(decode(text, begin))) break;
    text = text.substr(0, begin);
  }
  return text;
}

std::string escape(char32_t code) {
  if (code == '\n') return "\\n";
  if (code == '\r') return "\\r";
  if (code == '\t') return "\\t";
  char buffer[16];
  const auto value = static_cast<unsigned>(code);
  const char* form = code < 0x100 ? "\\x%02x" : code < 0x10000 ? "\\u%04x" : "\\U%08x";
  std::snprintf(buffer, sizeof buffer, form, value);
  return buffer;
}

std::string quoted(std::string_view bytes, bool replace_invalid) {
  const bool has_single = bytes.find('\'') != std::string_view::npos;
  const char quote = has_single && bytes.find('"') == std::string_view::npos ? '"' : '\'';
  std::string out(1, quote);
  for (std::size_t index = 0; index < bytes.size();) {
    const Character c = decode(bytes, index);
    if (!c.valid) {
      out += replace_invalid ? std::string("\xEF\xBF\xBD") : escape(0xDC00 + c.code);
      index += replace_invalid ? replaced_size(bytes, index) : 1;
      continue;
    }
    if (c.code == U'\\' || c.code == static_cast<char32_t>(quote)) out += '\\';
    out += is_printable(c.code) ? std::string(bytes.substr(index, c.size)) : escape(c.code);
    index += c.size;
  }
  return out + quote;
}

}  // namespace

std::string repr(std::string_view bytes) { return quoted(bytes, false); }

std::string repr_replaced(std::string_view bytes) { return quoted(bytes, true); }

std::string_view head(std::string_view bytes, std::size_t count) {
  std::size_t end = 0;
  for (; count > 0 && end < bytes.size(); --count) end += decode(bytes, end).size;
  return bytes.substr(0, end);
}

std::string printable(std::string_view name) {
  std::string out;
  for (std::size_t index = 0; index < name.size();) {
    const Character c = decode(name, index);
    const bool is_plain = c.valid && is_printable(c.code);
    out += is_plain ? std::string(name.substr(index, c.size)) : escape(c.code);
    index += c.size;
  }
  return out;
}

std::string repr(const std::vector<std::string>& list) {
  std::string out = "[";
  for (const std::string& entry : list) out += (out.size() > 1 ? ", " : "") + repr(entry);
  return out + "]";
}

bool is_utf8(std::string_view bytes) {
  for (std::size_t index = 0; index < bytes.size();) {
    const Character c = decode(bytes, index);
    if (!c.valid) return false;
    index += c.size;
  }
  return true;
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

std::string_view strip(std::string_view text) {
  while (!text.empty()) {
    const Character first = decode(text, 0);
    if (!is_space(first)) break;
    text.remove_prefix(first.size);
  }
  return strip_end(text);
}

std::string with_commas(std::uint64_t number) {
  std::string digits = std::to_string(number);
  for (std::size_t position = digits.size(); position > 3;) digits.insert(position -= 3, ",");
  return digits;
}

std::pair<std::string_view, std::string_view> split_last(std::string_view text) {
  for (std::size_t begin = text.size(); begin > 0;) {
    const std::size_t end = begin;
    begin = last_begin(text.substr(0, begin));
    if (is_space(decode(text, begin))) return {strip_end(text.substr(0, begin)), text.substr(end)};
  }
  return {text, {}};
}

}  // namespace calib8::text

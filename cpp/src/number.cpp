#include "number.hpp"

#include <array>
#include <charconv>
#include <cmath>

namespace calib8::number {

namespace {

template <class Real>
std::string shortest(Real value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::array<char, 512> buffer{};
  const double size = std::fabs(static_cast<double>(value));
  const bool plain = size == 0 || (size >= 1e-4 && size < 1e16);
  const auto form = plain ? std::chars_format::fixed : std::chars_format::scientific;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, form).ptr;
  std::string text(buffer.data(), end);
  if (plain && text.find('.') == std::string::npos) text += ".0";
  return text;
}

}  // namespace

std::string repr(double value) { return shortest(value); }

std::string repr_float(float value) { return shortest(value); }

std::string hex(std::uint64_t value) { return hex(value, 1); }

std::string hex(std::uint64_t value, std::size_t width) {
  std::string text;
  for (; value != 0 || text.empty(); value >>= 4U) {
    text.insert(text.begin(), "0123456789abcdef"[value & 0xFU]);
  }
  return text.size() < width ? std::string(width - text.size(), '0') + text : text;
}

}  // namespace calib8::number

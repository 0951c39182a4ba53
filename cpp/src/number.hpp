// Numbers as text and bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace calib8::number {

// The shortest text that reads back as the same double, written as Python writes it: 1.0, 1e-05.
std::string repr(double value);

// As `repr`, for the shortest text that reads back as the same float.
std::string repr_float(float value);

// Lower-case hex digits without padding.
std::string hex(std::uint64_t value);

// Lower-case hex digits padded with zeros to `width`.
std::string hex(std::uint64_t value, std::size_t width);

template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "only the type changes");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace calib8::number

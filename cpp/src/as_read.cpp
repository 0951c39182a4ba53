#include "calib8/as_read.hpp"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "calib8/errors.hpp"
#include "calib8/text.hpp"

namespace calib8 {
namespace {

template <class Value>
Value value_at(const std::vector<char>& bytes, std::size_t index) {
  Value value;
  std::memcpy(&value, bytes.data() + index * sizeof value, sizeof value);
  return value;
}

template <class Value>
void put(std::vector<char>& bytes, Value value) {
  const char* own = reinterpret_cast<const char*>(&value);
  bytes.insert(bytes.end(), own, own + sizeof value);
}

// IEEE 754: a sign, five bits of exponent of bias 15, ten of the fraction.
float from_half(std::uint16_t bits) {
  const int exponent = (bits >> 10U) & 0x1F;
  const int fraction = bits & 0x3FF;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                   : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return (bits & 0x8000U) != 0 ? -size : size;
}

std::vector<char> halves_as_float(const std::vector<char>& bytes) {
  std::vector<char> out;
  out.reserve(2 * bytes.size());
  for (std::size_t k = 0; k < bytes.size() / 2; ++k) {
    put(out, from_half(value_at<std::uint16_t>(bytes, k)));
  }
  return out;
}

std::vector<char> narrowed(const Tensor& tensor) {
  std::vector<char> out;
  out.reserve(tensor.bytes.size() / 2);
  for (std::size_t k = 0; k < tensor.bytes.size() / sizeof(std::int64_t); ++k) {
    const auto value = value_at<std::int64_t>(tensor.bytes, k);
    if (value < std::numeric_limits<std::int32_t>::min() ||
        value > std::numeric_limits<std::int32_t>::max()) {
      throw CalibrationError("TensorRT reads " + text::repr(tensor.name) +
                             " as int32, which does not hold " + std::to_string(value) +
                             "; give smaller numbers");
    }
    put(out, static_cast<std::int32_t>(value));
  }
  return out;
}

}  // namespace

std::vector<char> as_read(const Tensor& tensor, const std::string& dtype) {
  const bool floats = dtype.find("float") != std::string::npos;
  if (tensor.dtype == (floats ? "float32" : dtype)) return tensor.bytes;
  if (floats && tensor.dtype == "float16") return halves_as_float(tensor.bytes);
  if (dtype == "int32" && tensor.dtype == "int64") return narrowed(tensor);
  throw CalibrationError("TensorRT reads " + text::repr(tensor.name) + " as " +
                         (floats ? "float32" : dtype) + ", got " + tensor.dtype +
                         "; give it such values");
}

}  // namespace calib8

#include "calib8/binding_values.hpp"

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
  const char* value_bytes = reinterpret_cast<const char*>(&value);
  bytes.insert(bytes.end(), value_bytes, value_bytes + sizeof value);
}

// IEEE 754: a sign, five bits of exponent of bias 15, ten of the fraction.
float half_to_float(std::uint16_t bits) {
  const int exponent = (bits >> 10U) & 0x1F;
  const int fraction = bits & 0x3FF;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(fraction), -24)
                              : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return (bits & 0x8000U) != 0 ? -magnitude : magnitude;
}

std::vector<char> halves_to_float32(const std::vector<char>& bytes) {
  std::vector<char> float32_values;
  float32_values.reserve(2 * bytes.size());
  for (std::size_t k = 0; k < bytes.size() / 2; ++k) {
    put(float32_values, half_to_float(value_at<std::uint16_t>(bytes, k)));
  }
  return float32_values;
}

std::vector<char> narrow_to_int32(const Tensor& tensor) {
  std::vector<char> int32_values;
  int32_values.reserve(tensor.bytes.size() / 2);
  for (std::size_t k = 0; k < tensor.bytes.size() / sizeof(std::int64_t); ++k) {
    const auto value = value_at<std::int64_t>(tensor.bytes, k);
    if (value < std::numeric_limits<std::int32_t>::min() ||
        value > std::numeric_limits<std::int32_t>::max()) {
      throw CalibrationError("TensorRT reads " + text::repr(tensor.name) +
                             " as int32, which does not hold " + std::to_string(value) +
                             "; give smaller numbers");
    }
    put(int32_values, static_cast<std::int32_t>(value));
  }
  return int32_values;
}

}  // namespace

std::vector<char> binding_values(const Tensor& tensor, const std::string& dtype) {
  const bool is_float = dtype.find("float") != std::string::npos;
  if (tensor.dtype == (is_float ? "float32" : dtype)) return tensor.bytes;
  if (is_float && tensor.dtype == "float16") return halves_to_float32(tensor.bytes);
  if (dtype == "int32" && tensor.dtype == "int64") return narrow_to_int32(tensor);
  throw CalibrationError("TensorRT reads " + text::repr(tensor.name) + " as " +
                         (is_float ? "float32" : dtype) + ", got " + tensor.dtype +
                         "; give it such values");
}

}  // namespace calib8

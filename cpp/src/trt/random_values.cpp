#include "random_values.hpp"

#include <cstdint>
#include <cstring>

namespace calib8::trt {
namespace {

template <class Value>
void fill(void* memory, std::size_t bytes, Random& random,
          Value (*value_from)(std::uint64_t bits)) {
  auto* out = static_cast<char*>(memory);
  for (std::size_t offset = 0; offset + sizeof(Value) <= bytes; offset += sizeof(Value)) {
    const Value value = value_from(random());
    std::memcpy(out + offset, &value, sizeof value);
  }
}

// -1 to 1 in steps that 11 bits tell apart, as many as float16 has there.
float coarse_float(std::uint64_t bits) {
  return static_cast<float>(static_cast<std::int64_t>(bits >> 53U) - 1024) / 1024.0F;
}

float fine_float(std::uint64_t bits) {
  return static_cast<float>(static_cast<std::int64_t>(bits >> 40U) - (1 << 23U)) / 0x1p23F;
}

std::uint32_t bits_of(float value) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Exact: none of the coarse values has more bits, or is below float16's normal ones.
std::uint16_t coarse_half(std::uint64_t random) {
  const std::uint32_t bits = bits_of(coarse_float(random));
  const std::uint32_t sign = (bits >> 16U) & 0x8000U;
  if ((bits & 0x7FFFFFFFU) == 0) return static_cast<std::uint16_t>(sign);
  const std::uint32_t exponent = ((bits >> 23U) & 0xFFU) - 112;  // of bias 127, now of bias 15
  return static_cast<std::uint16_t>(sign | (exponent << 10U) | ((bits >> 13U) & 0x3FFU));
}

template <class Value>
Value zero_or_one(std::uint64_t bits) {
  return static_cast<Value>(bits >> 63U);
}

std::uint8_t any_byte(std::uint64_t bits) { return static_cast<std::uint8_t>(bits >> 56U); }

}  // namespace

void fill_random(void* memory, std::size_t bytes, nvinfer1::DataType type, Random& random) {
  using nvinfer1::DataType;
  if (type == DataType::kFLOAT) return fill<float>(memory, bytes, random, fine_float);
  if (type == DataType::kHALF) return fill<std::uint16_t>(memory, bytes, random, coarse_half);
  if (type == DataType::kINT32) return fill(memory, bytes, random, zero_or_one<std::int32_t>);
  if (type == DataType::kBOOL) return fill(memory, bytes, random, zero_or_one<std::uint8_t>);
#if NV_TENSORRT_MAJOR >= 10
  if (type == DataType::kINT64) return fill(memory, bytes, random, zero_or_one<std::int64_t>);
  if (type == DataType::kBF16) {
    return fill<std::uint16_t>(memory, bytes, random, [](std::uint64_t bits) {
      return static_cast<std::uint16_t>(bits_of(coarse_float(bits)) >> 16U);
    });
  }
#endif
  fill<std::uint8_t>(memory, bytes, random, any_byte);
}

}  // namespace calib8::trt

// Protobuf's wire format: a message as its fields, without a schema.
//
//   tag = field << 3 | type     varint
//   type 0 varint, 1 eight bytes, 2 length and bytes (text, a message, packed numbers), 5 four bytes
//
// Source: protobuf.dev, "Encoding".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "calib8/errors.hpp"

namespace calib8::wire {

// Bytes that are no message.
class Broken : public CacheError {
 public:
  Broken();
};

struct Field {
  std::uint32_t number = 0;
  std::uint32_t type = 0;
  std::uint64_t value = 0;  // of a varint
  std::string_view bytes;   // of the others

  bool is_bytes() const { return type == 2; }
};

// The fields in their order; views into `message`. Throws Broken: it is no message.
std::vector<Field> fields(std::string_view message);

// Bytes of all fields of this number, in their order. Throws Broken where one is no such field.
std::vector<std::string_view> all(const std::vector<Field>& fields, std::uint32_t number);

// The last field of this number, as protobuf has it; "" or 0 where there is none.
std::string_view text(const std::vector<Field>& fields, std::uint32_t number);
std::uint64_t number(const std::vector<Field>& fields, std::uint32_t number);
bool has(const std::vector<Field>& fields, std::uint32_t number);

// The varints of a repeated field, each by itself or packed.
std::vector<std::uint64_t> varints(const std::vector<Field>& fields, std::uint32_t number);

// The bytes of a repeated field of numbers of `size` bytes, each by itself or packed.
std::string fixed(const std::vector<Field>& fields, std::uint32_t number, std::size_t size);

void put_varint(std::string& out, std::uint64_t value);
void put(std::string& out, const Field& field);

}  // namespace calib8::wire

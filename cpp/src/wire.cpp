#include "wire.hpp"

namespace calib8::wire {
namespace {

[[noreturn]] void refuse() { throw Broken(); }

std::uint64_t varint(std::string_view& message) {
  std::uint64_t value = 0;
  for (unsigned shift = 0; shift < 64; shift += 7) {
    if (message.empty()) refuse();
    const auto byte = static_cast<unsigned char>(message.front());
    message.remove_prefix(1);
    value |= static_cast<std::uint64_t>(byte & 0x7FU) << shift;
    if (byte < 0x80U) return value;
  }
  refuse();
}

std::string_view take_bytes(std::string_view& message, std::uint64_t size) {
  if (size > message.size()) refuse();
  const std::string_view bytes = message.substr(0, size);
  message.remove_prefix(size);
  return bytes;
}

Field next(std::string_view& message) {
  Field field;
  const std::uint64_t tag = varint(message);
  field.number = static_cast<std::uint32_t>(tag >> 3U);
  field.type = tag & 7U;
  if (field.number == 0 || (tag >> 3U) > 0x1FFFFFFFU) refuse();
  if (field.type == 0) {
    field.value = varint(message);
  } else if (field.type == 1 || field.type == 5) {
    field.bytes = take_bytes(message, field.type == 1 ? 8 : 4);
  } else if (field.type == 2) {
    field.bytes = take_bytes(message, varint(message));
  } else {
    refuse();  // groups, which ONNX has none of
  }
  return field;
}

}  // namespace

Broken::Broken()
    : CacheError(
          "a model must be whole ONNX, got bytes that do not parse; export or copy it"
          " again") {}

std::vector<Field> fields(std::string_view message) {
  std::vector<Field> result;
  while (!message.empty()) result.push_back(next(message));
  return result;
}

std::vector<std::string_view> all(const std::vector<Field>& fields, std::uint32_t number) {
  std::vector<std::string_view> result;
  for (const Field& field : fields) {
    if (field.number != number) continue;
    if (!field.is_bytes()) refuse();
    result.push_back(field.bytes);
  }
  return result;
}

std::string_view text(const std::vector<Field>& fields, std::uint32_t number) {
  const std::vector<std::string_view> values = all(fields, number);
  return values.empty() ? std::string_view{} : values.back();
}

std::uint64_t number(const std::vector<Field>& fields, std::uint32_t number) {
  std::uint64_t value = 0;
  for (const Field& field : fields) {
    if (field.number != number) continue;
    if (field.type != 0) refuse();
    value = field.value;
  }
  return value;
}

bool has(const std::vector<Field>& fields, std::uint32_t number) {
  for (const Field& field : fields) {
    if (field.number == number) return true;
  }
  return false;
}

std::vector<std::uint64_t> varints(const std::vector<Field>& fields, std::uint32_t number) {
  std::vector<std::uint64_t> values;
  for (const Field& field : fields) {
    if (field.number != number) continue;
    if (field.type == 0) values.push_back(field.value);
    std::string_view packed = field.bytes;
    while (!packed.empty()) values.push_back(varint(packed));
  }
  return values;
}

std::string fixed(const std::vector<Field>& fields, std::uint32_t number, std::size_t size) {
  std::string bytes;
  for (const Field& field : fields) {
    if (field.number != number) continue;
    if (field.type == 0 || field.bytes.size() % size != 0) refuse();
    bytes += field.bytes;
  }
  return bytes;
}

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80U; value >>= 7U) out += static_cast<char>((value & 0x7FU) | 0x80U);
  out += static_cast<char>(value);
}

void put(std::string& out, const Field& field) {
  put_varint(out, static_cast<std::uint64_t>(field.number) << 3U | field.type);
  if (field.type == 0) put_varint(out, field.value);
  if (field.is_bytes()) put_varint(out, field.bytes.size());
  out += field.bytes;
}

}  // namespace calib8::wire

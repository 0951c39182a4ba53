#include "wire.hpp"

namespace calib8::wire {
namespace {

[[noreturn]] void broken() { throw Broken(); }

std::uint64_t varint(std::string_view& rest) {
  std::uint64_t value = 0;
  for (unsigned shift = 0; shift < 64; shift += 7) {
    if (rest.empty()) broken();
    const auto byte = static_cast<unsigned char>(rest.front());
    rest.remove_prefix(1);
    value |= static_cast<std::uint64_t>(byte & 0x7FU) << shift;
    if (byte < 0x80U) return value;
  }
  broken();
}

std::string_view taken(std::string_view& rest, std::uint64_t size) {
  if (size > rest.size()) broken();
  const std::string_view bytes = rest.substr(0, size);
  rest.remove_prefix(size);
  return bytes;
}

Field next(std::string_view& rest) {
  Field field;
  const std::uint64_t tag = varint(rest);
  field.number = static_cast<std::uint32_t>(tag >> 3U);
  field.type = tag & 7U;
  if (field.number == 0 || (tag >> 3U) > 0x1FFFFFFFU) broken();
  if (field.type == 0) {
    field.value = varint(rest);
  } else if (field.type == 1 || field.type == 5) {
    field.bytes = taken(rest, field.type == 1 ? 8 : 4);
  } else if (field.type == 2) {
    field.bytes = taken(rest, varint(rest));
  } else {
    broken();  // groups, which ONNX has none of
  }
  return field;
}

}  // namespace

Broken::Broken()
    : CacheError(
          "a model must be whole ONNX, got bytes that do not parse; export or copy it"
          " again") {}

std::vector<Field> fields(std::string_view message) {
  std::vector<Field> found;
  while (!message.empty()) found.push_back(next(message));
  return found;
}

std::vector<std::string_view> all(const std::vector<Field>& fields, std::uint32_t number) {
  std::vector<std::string_view> found;
  for (const Field& field : fields) {
    if (field.number != number) continue;
    if (!field.is_bytes()) broken();
    found.push_back(field.bytes);
  }
  return found;
}

std::string_view text(const std::vector<Field>& fields, std::uint32_t number) {
  const std::vector<std::string_view> found = all(fields, number);
  return found.empty() ? std::string_view{} : found.back();
}

std::uint64_t number(const std::vector<Field>& fields, std::uint32_t number) {
  std::uint64_t value = 0;
  for (const Field& field : fields) {
    if (field.number != number) continue;
    if (field.type != 0) broken();
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
  std::vector<std::uint64_t> found;
  for (const Field& field : fields) {
    if (field.number != number) continue;
    if (field.type == 0) found.push_back(field.value);
    std::string_view packed = field.bytes;
    while (!packed.empty()) found.push_back(varint(packed));
  }
  return found;
}

std::string fixed(const std::vector<Field>& fields, std::uint32_t number, std::size_t size) {
  std::string bytes;
  for (const Field& field : fields) {
    if (field.number != number) continue;
    if (field.type == 0 || field.bytes.size() % size != 0) broken();
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

#include "calib8/model_identity.hpp"

#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/files.hpp"
#include "calib8/text.hpp"
#include "wire.hpp"

// Fields by their numbers in onnx.proto (onnx/onnx, onnx/onnx.proto).
namespace calib8 {
namespace {

namespace fs = std::filesystem;
using wire::Field;
using Fields = std::vector<Field>;

constexpr int kMaxDepth = 100;  // messages in messages, as protobuf itself reads
constexpr std::size_t kChunk = std::size_t{1} << 20U;

std::string little_endian(std::uint64_t value) {
  std::string bytes;
  for (int k = 0; k < 8; ++k) bytes += static_cast<char>((value >> (8 * k)) & 0xFFU);
  return bytes;
}

// The message's fields by their numbers, packed numbers by themselves, as protobuf writes it again.
std::string canonical_message(Fields fields) {
  std::stable_sort(fields.begin(), fields.end(),
                   [](const Field& a, const Field& b) { return a.number < b.number; });
  std::string out;
  for (const Field& field : fields) wire::put(out, field);
  return out;
}

// Which fields of a type's messages are messages again: (message, field) -> message.
enum class Kind { kType, kTensor, kShape, kDim, kSequence, kMap, kOptional, kPlain };

Kind inner_kind(Kind kind, std::uint32_t number) {
  if (kind == Kind::kType) {
    if (number == 1 || number == 8) return Kind::kTensor;
    if (number == 4 || number == 9) return Kind::kSequence;
    return number == 5 ? Kind::kMap : Kind::kPlain;
  }
  if (kind == Kind::kTensor) return number == 2 ? Kind::kShape : Kind::kPlain;
  if (kind == Kind::kShape) return number == 1 ? Kind::kDim : Kind::kPlain;
  if (kind == Kind::kSequence) return number == 1 ? Kind::kType : Kind::kPlain;
  return kind == Kind::kMap && number == 2 ? Kind::kType : Kind::kPlain;
}

// A TypeProto as protobuf writes it again.
std::string canonical_type(std::string_view message, Kind kind = Kind::kType, int depth = 0) {
  if (depth > kMaxDepth) throw wire::Broken();
  Fields fields = wire::fields(message);
  std::vector<std::string> inner_messages;
  inner_messages.reserve(fields.size());  // the fields look into it
  for (Field& field : fields) {
    const Kind field_kind = inner_kind(kind, field.number);
    if (field_kind == Kind::kPlain || !field.is_bytes()) continue;
    inner_messages.push_back(canonical_type(field.bytes, field_kind, depth + 1));
    field.bytes = inner_messages.back();
  }
  return canonical_message(fields);
}

// Bytes of a value of an element type; 0 where the digest is not defined for it.
std::size_t bytes_per_value(std::uint64_t type) {
  switch (type) {
    case 2:
    case 3:
    case 9:
    case 17:
    case 18:
    case 19:
    case 20:
    case 24: return 1;
    case 4:
    case 5:
    case 10:
    case 16: return 2;
    case 1:
    case 6:
    case 12: return 4;
    case 7:
    case 11:
    case 13: return 8;
    default: return 0;
  }
}

// Values that stand as numbers of their own, low bytes first.
std::string typed_bytes(const Fields& tensor, std::uint64_t type) {
  if (type == 1) return wire::fixed(tensor, 4, 4);
  if (type == 11) return wire::fixed(tensor, 10, 8);
  const std::uint32_t field_number = type == 7 ? 7U : type == 12 || type == 13 ? 11U : 5U;
  std::string bytes;
  for (const std::uint64_t value : wire::varints(tensor, field_number)) {
    bytes += little_endian(value).substr(0, bytes_per_value(type));
  }
  return bytes;
}

struct DataRange {
  std::string location;
  std::uint64_t offset = 0;
  std::uint64_t length = 0;

  bool operator<(const DataRange& other) const {
    return std::tie(location, offset, length) <
           std::tie(other.location, other.offset, other.length);
  }
};

// A tree of lists, texts and bytes as one stream: [count] before a list, <size> before bytes.
class ModelDigest {
 public:
  explicit ModelDigest(fs::path folder) : folder_(std::move(folder)) {}

  void model(const Fields& fields) {
    const auto functions = wire::all(fields, 25);
    list(2 + 2 * functions.size());
    opsets(fields);
    const auto graphs = wire::all(fields, 7);
    if (graphs.size() != 1) throw wire::Broken();
    graph(graphs.front());
    for (const std::string_view bytes : functions) {
      const Fields function = wire::fields(bytes);
      list(4);
      text(wire::text(function, 10));
      text(wire::text(function, 1));
      texts(wire::all(function, 4));
      texts(wire::all(function, 5));
      nodes(wire::all(function, 7));
    }
  }

  std::string graph_digest() { return is_defined_ ? state_.hex() : ""; }

  std::string weights_digest() const {
    if (external_digests_.empty()) return "";
    Sha256 state;
    for (const auto& [range, digest] : external_digests_) {
      state.update(range.location + '\0' + little_endian(range.offset) +
                   little_endian(range.length) + digest);
    }
    return state.hex();
  }

 private:
  void list(std::size_t count) { state_.update("[" + std::to_string(count) + "]"); }
  void text(std::string_view bytes) {
    state_.update("<" + std::to_string(bytes.size()) + ">");
    state_.update(bytes);
  }
  void texts(const std::vector<std::string_view>& texts) {
    list(texts.size());
    for (const std::string_view text_bytes : texts) text(text_bytes);
  }

  void opsets(const Fields& model) {
    std::vector<std::string> sorted;
    for (const std::string_view bytes : wire::all(model, 8)) {
      const Fields opset = wire::fields(bytes);
      const auto version = static_cast<std::int64_t>(wire::number(opset, 2));
      sorted.push_back(std::string(wire::text(opset, 1)) + "=" + std::to_string(version));
    }
    std::sort(sorted.begin(), sorted.end());
    texts({sorted.begin(), sorted.end()});
  }

  void graph(std::string_view message) {
    if (++depth_ > kMaxDepth) throw wire::Broken();
    const Fields fields = wire::fields(message);
    std::vector<std::pair<std::string_view, Fields>> weights;
    for (const std::string_view bytes : wire::all(fields, 5)) {
      Fields tensor = wire::fields(bytes);
      weights.emplace_back(wire::text(tensor, 8), std::move(tensor));
    }
    const auto by_name = [](const auto& a, const auto& b) { return a.first < b.first; };
    std::stable_sort(weights.begin(), weights.end(), by_name);
    list(5);
    std::vector<Fields> inputs;
    for (const std::string_view bytes : wire::all(fields, 11)) {
      Fields value = wire::fields(bytes);
      const std::pair<std::string_view, Fields> name{wire::text(value, 1), {}};
      if (!std::binary_search(weights.begin(), weights.end(), name, by_name)) {
        inputs.push_back(std::move(value));
      }
    }
    values(inputs);
    std::vector<Fields> outputs;
    for (const std::string_view bytes : wire::all(fields, 12))
      outputs.push_back(wire::fields(bytes));
    values(outputs);
    nodes(wire::all(fields, 1));
    list(weights.size());
    for (const auto& [name, tensor] : weights) this->tensor(tensor);
    list(0);
    if (wire::has(fields, 15)) is_defined_ = false;  // sparse
    --depth_;
  }

  void values(const std::vector<Fields>& value_infos) {
    list(value_infos.size());
    for (const Fields& value : value_infos) {
      list(2);
      text(wire::text(value, 1));
      text(canonical_type(wire::text(value, 2)));
    }
  }

  void nodes(const std::vector<std::string_view>& messages) {
    list(messages.size());
    for (const std::string_view bytes : messages) node(wire::fields(bytes));
  }

  void node(const Fields& node) {
    std::vector<std::pair<std::string_view, Fields>> attributes;
    for (const std::string_view bytes : wire::all(node, 5)) {
      Fields attribute = wire::fields(bytes);
      attributes.emplace_back(wire::text(attribute, 1), std::move(attribute));
    }
    std::stable_sort(attributes.begin(), attributes.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    const std::string_view domain = wire::text(node, 7);
    list(5);
    text(wire::text(node, 4));
    text(domain == "ai.onnx" ? "" : domain);
    texts(wire::all(node, 1));
    texts(wire::all(node, 2));
    list(2 * attributes.size());
    for (const auto& [name, attribute] : attributes) {
      text(name);
      this->attribute(attribute);
    }
  }

  void attribute(const Fields& attribute) {
    if (wire::has(attribute, 5)) return tensor(wire::fields(wire::text(attribute, 5)));
    if (wire::has(attribute, 10)) {
      const auto tensors = wire::all(attribute, 10);
      list(tensors.size());
      for (const std::string_view bytes : tensors) tensor(wire::fields(bytes));
      return;
    }
    if (wire::has(attribute, 6)) return graph(wire::text(attribute, 6));
    if (wire::has(attribute, 11)) {
      const auto graphs = wire::all(attribute, 11);
      list(graphs.size());
      for (const std::string_view bytes : graphs) graph(bytes);
      return;
    }
    text(plain(attribute));
  }

  // An attribute of numbers, texts and types as protobuf writes it again, its doc_string empty.
  std::string plain(const Fields& attribute) {
    Fields fields{{13, 2, 0, {}}};
    std::vector<std::string> types;
    types.reserve(attribute.size());
    for (Field field : attribute) {
      const bool is_packed = (field.number == 7 || field.number == 8) && field.is_bytes();
      if (field.number == 13 || is_packed) continue;
      if (field.number == 14 || field.number == 15) {
        types.push_back(canonical_type(field.bytes));
        field.bytes = types.back();
      }
      if (field.number == 22 || field.number == 23) is_defined_ = false;  // sparse
      fields.push_back(field);
    }
    unpack(attribute, fields);
    return canonical_message(fields);
  }

  static void unpack(const Fields& attribute, Fields& fields) {
    for (const Field& field : attribute) {
      if (!field.is_bytes() || (field.number != 7 && field.number != 8)) continue;
      if (field.number == 8) {
        for (const std::uint64_t value : wire::varints({field}, 8))
          fields.push_back({8, 0, value, {}});
        continue;
      }
      for (std::size_t offset = 0; offset + 4 <= field.bytes.size(); offset += 4) {
        fields.push_back({7, 5, 0, field.bytes.substr(offset, 4)});
      }
    }
  }

  void tensor(const Fields& tensor) {
    const std::uint64_t type = wire::number(tensor, 2);
    const std::size_t size = bytes_per_value(type);
    const std::vector<std::uint64_t> dims = wire::varints(tensor, 1);
    if (size == 0) is_defined_ = false;
    list(4);
    text(wire::text(tensor, 8));
    text(std::to_string(type));
    list(dims.size());
    for (const std::uint64_t dim : dims) text(std::to_string(static_cast<std::int64_t>(dim)));
    if (wire::number(tensor, 14) == 1) return external(tensor);
    if (wire::has(tensor, 9)) return text(wire::text(tensor, 9));
    text(size == 0 ? "" : typed_bytes(tensor, type));
  }

  void external(const Fields& tensor) {
    const std::string name(wire::text(tensor, 8));
    std::map<std::string, std::string> entries;
    for (const std::string_view bytes : wire::all(tensor, 13)) {
      const Fields pair = wire::fields(bytes);
      entries[std::string(wire::text(pair, 1))] = wire::text(pair, 2);
    }
    const fs::path file = find_external_file(name, entries["location"]);
    std::error_code error;
    const std::uint64_t file_bytes = fs::file_size(file, error);
    const auto offset = count(entries, "offset", 0);
    const auto length = !offset || *offset > file_bytes
                            ? std::nullopt
                            : count(entries, "length", file_bytes - *offset);
    if (!length || *length > file_bytes - *offset) {
      throw CacheError("external data of " + text::repr(name) + " must lie within its file " +
                       text::printable(file.string()) + " of " + std::to_string(file_bytes) +
                       " bytes; copy the file again, it may be truncated");
    }
    state_.update("<" + std::to_string(*length) + ">");
    external_digests_[{entries["location"], *offset, *length}] = hash_range(file, *offset, *length);
  }

  fs::path find_external_file(const std::string& name, const std::string& location) const {
    std::error_code error;
    const fs::path folder = fs::canonical(folder_, error);
    const fs::path file = fs::canonical(folder / location, error);
    const fs::path relative = error ? fs::path() : file.lexically_relative(folder);
    const bool is_inside = !relative.empty() && *relative.begin() != ".." && relative != ".";
    if (location.empty() || fs::path(location).is_absolute() || !is_inside ||
        !fs::is_regular_file(file, error)) {
      throw CacheError("external data of " + text::repr(name) +
                       " must be a file in the model's folder, got " + text::repr(location) +
                       "; put the file itself beside the model");
    }
    return file;
  }

  static std::optional<std::uint64_t> count(const std::map<std::string, std::string>& entry,
                                            const std::string& key, std::uint64_t default_value) {
    const auto entry_found = entry.find(key);
    if (entry_found == entry.end()) return default_value;
    const std::string& digits = entry_found->second;
    if (digits.empty() || digits.size() > 18 ||
        digits.find_first_not_of("0123456789") != std::string::npos) {
      return std::nullopt;
    }
    return std::stoull(digits);
  }

  // Hashes the bytes into the tree; gives their own sha256.
  std::string hash_range(const fs::path& file, std::uint64_t offset, std::uint64_t length) {
    std::ifstream stream(file, std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(offset));
    std::string chunk(std::min<std::uint64_t>(kChunk, length), '\0');
    Sha256 range_digest;
    while (length > 0) {
      const auto size = static_cast<std::size_t>(std::min<std::uint64_t>(chunk.size(), length));
      if (!stream.read(chunk.data(), static_cast<std::streamsize>(size))) {
        throw FeedError(text::printable(file.string()) + " cannot be read whole");
      }
      const std::string_view bytes(chunk.data(), size);
      state_.update(bytes);
      range_digest.update(bytes);
      length -= size;
    }
    return range_digest.bytes();
  }

  fs::path folder_;
  Sha256 state_;
  std::map<DataRange, std::string> external_digests_;
  int depth_ = 0;
  bool is_defined_ = true;
};

}  // namespace

bool same_model(const ModelIdentity& first, const ModelIdentity& second) {
  if (!first.graph.empty() && first.graph == second.graph) return true;
  return !first.file.empty() && first.file == second.file && first.weights == second.weights;
}

ModelIdentity identity_of(const fs::path& onnx) {
  const std::string data = files::read(onnx);
  ModelIdentity identity;
  identity.file = Sha256().update(data).hex();
  try {
    ModelDigest digest(onnx.has_parent_path() ? onnx.parent_path() : ".");
    digest.model(wire::fields(data));
    identity.weights = digest.weights_digest();
    identity.graph = digest.graph_digest();
  } catch (const wire::Broken&) {
    return identity;  // what is no ONNX has neither, and TensorRT says what it makes of it
  }
  return identity;
}

}  // namespace calib8

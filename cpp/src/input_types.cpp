#include "calib8/files.hpp"
#include "calib8/model_identity.hpp"
#include "wire.hpp"

// Fields and element types by their numbers in onnx.proto (onnx/onnx, onnx/onnx.proto).
namespace calib8 {
namespace {

std::string dtype_of(std::uint64_t type) {
  switch (type) {
    case 1: return "float32";
    case 2: return "uint8";
    case 3: return "int8";
    case 4: return "uint16";
    case 5: return "int16";
    case 6: return "int32";
    case 7: return "int64";
    case 9: return "bool";
    case 10: return "float16";
    case 11: return "float64";
    default: return "";
  }
}

using Types = std::map<std::string_view, std::uint64_t>;

// Element types of the graph's constants.
Types constant_types(const std::vector<wire::Field>& graph) {
  Types types;
  for (const std::string_view bytes : wire::all(graph, 5)) {
    const std::vector<wire::Field> tensor = wire::fields(bytes);
    types[wire::text(tensor, 8)] = wire::number(tensor, 2);
  }
  for (const std::string_view bytes : wire::all(graph, 1)) {
    const std::vector<wire::Field> node = wire::fields(bytes);
    if (wire::text(node, 4) != "Constant") continue;
    for (const std::string_view attribute : wire::all(node, 5)) {
      const std::string_view value = wire::text(wire::fields(attribute), 5);
      types[wire::text(node, 2)] = wire::number(wire::fields(value), 2);
    }
  }
  return types;
}

bool has_typed_pair(const std::vector<wire::Field>& graph) {
  const Types types = constant_types(graph);
  const auto type_of = [&types](const std::vector<std::string_view>& inputs, std::size_t index) {
    const auto type = index < inputs.size() ? types.find(inputs[index]) : types.end();
    return type == types.end() ? 0 : type->second;
  };
  bool quantizes_activations =
      false;  // weights alone need no type: TensorRT may still calibrate the rest
  bool has_typed_node = false;
  for (const std::string_view bytes : wire::all(graph, 1)) {
    const std::vector<wire::Field> node = wire::fields(bytes);
    const std::string_view operation = wire::text(node, 4);
    quantizes_activations = quantizes_activations || operation == "QuantizeLinear";
    if (operation != "QuantizeLinear" && operation != "DequantizeLinear") continue;
    const std::vector<std::string_view> inputs = wire::all(node, 1);
    const std::uint64_t scale = type_of(inputs, 1);
    const std::uint64_t zero = type_of(inputs, 2);
    // half, bfloat16; the four of float8
    has_typed_node = has_typed_node || scale == 10 || scale == 16 || (zero >= 17 && zero <= 20);
  }
  return quantizes_activations && has_typed_node;
}

}  // namespace

std::map<std::string, std::string> input_types(const std::filesystem::path& model) {
  std::map<std::string, std::string> types;
  try {
    const std::string data = files::read(model);
    const std::vector<wire::Field> whole = wire::fields(data);
    for (const std::string_view input : wire::all(wire::fields(wire::text(whole, 7)), 11)) {
      const std::vector<wire::Field> value = wire::fields(input);
      const std::vector<wire::Field> tensor =
          wire::fields(wire::text(wire::fields(wire::text(value, 2)), 1));
      const std::string dtype = dtype_of(wire::number(tensor, 1));
      if (!dtype.empty()) types[std::string(wire::text(value, 1))] = dtype;
    }
  } catch (const wire::Broken&) {
    return {};
  }
  return types;
}

bool is_typed(const std::filesystem::path& onnx) {
  try {
    const std::string data = files::read(onnx);
    return has_typed_pair(wire::fields(wire::text(wire::fields(data), 7)));
  } catch (const wire::Broken&) {
    return false;
  }
}

}  // namespace calib8

#include "calib8/files.hpp"
#include "calib8/model_identity.hpp"
#include "wire.hpp"

// Fields by their numbers in onnx.proto (onnx/onnx, onnx/onnx.proto).
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

}  // namespace calib8

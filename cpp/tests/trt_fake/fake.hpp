// A TensorRT that runs on host memory, to drive calib8's programs without a GPU. Compiled against the
// real headers of a version; calculates nothing. settings.hpp lists what a test can set.
//
// A model is ONNX, of which inputs, outputs and Q/DQ nodes count, or text: "input NAME TYPE DIM...", "output NAME TYPE DIM...", "quantize" for a Q/DQ node,
// "plugin" for a node of TensorRT's plugin library. A dimension of -1 is open; an output's
// dimension of ? depends on the data; an input "shape NAME TYPE DIM" is read from host memory.
#pragma once

#include <NvInfer.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "settings.hpp"

namespace fake {

constexpr int kOnData = -2;  // a dimension that depends on the data

struct Tensor {
  std::string role;  // input, shape or output
  std::string name;
  std::string type;
  std::vector<int> dims;

  bool is_input() const { return role != "output"; }
};

inline nvinfer1::DataType data_type(const std::string& word) {
  using nvinfer1::DataType;
  if (word == "float16") return DataType::kHALF;
  if (word == "int32") return DataType::kINT32;
  if (word == "bool") return DataType::kBOOL;
  if (word == "uint8") return DataType::kUINT8;
#if NV_TENSORRT_MAJOR >= 10
  if (word == "int64") return DataType::kINT64;
  if (word == "bfloat16") return DataType::kBF16;
#endif
  return DataType::kFLOAT;
}

inline std::size_t type_bytes(const std::string& word) {
  if (word == "int64") return 8;
  if (word == "float16" || word == "bfloat16") return 2;
  return word == "bool" || word == "uint8" ? 1 : 4;
}

inline nvinfer1::Dims to_dims(const std::vector<int>& values) {
  nvinfer1::Dims dims{};
  dims.nbDims = static_cast<std::int32_t>(values.size());
  for (std::size_t k = 0; k < values.size(); ++k) dims.d[k] = values[k] < 0 ? -1 : values[k];
  return dims;
}

inline std::vector<int> from_dims(const nvinfer1::Dims& dims) {
  std::vector<int> values;
  for (std::int32_t k = 0; k < dims.nbDims; ++k) values.push_back(static_cast<int>(dims.d[k]));
  return values;
}

inline bool is_open(const std::vector<int>& dims) {
  for (const int dim : dims) {
    if (dim < 0) return true;
  }
  return false;
}

inline std::size_t volume(const std::vector<int>& dims) {
  std::size_t product = 1;
  for (const int dim : dims) product *= static_cast<std::size_t>(dim);
  return product;
}

inline std::string shown(const std::vector<int>& dims) {
  std::string text;
  for (const int dim : dims) text += (text.empty() ? "" : "x") + std::to_string(dim);
  return text;
}

// "input image float32 1 3 16 20", in models and in engines.
inline std::string to_line(const Tensor& tensor) {
  std::string line = tensor.role + " " + tensor.name + " " + tensor.type;
  for (const int dim : tensor.dims) line += dim == kOnData ? " ?" : " " + std::to_string(dim);
  return line + "\n";
}

inline Tensor from_line(const std::string& line) {
  std::istringstream words(line);
  Tensor tensor;
  words >> tensor.role >> tensor.name >> tensor.type;
  for (std::string dim; words >> dim;) {
    tensor.dims.push_back(dim == "?" ? kOnData : std::stoi(dim));
  }
  return tensor;
}

inline bool is_tensor(const std::string& line) {
  const std::string role = line.substr(0, line.find(' '));
  return role == "input" || role == "shape" || role == "output";
}

}  // namespace fake

// Questions to TensorRT's dimensions.
#pragma once

#include <NvInfer.h>

#include <cstddef>

namespace calib8::trt {

// Whether a dimension is still to be given, or depends on the data.
inline bool has_open_dimension(const nvinfer1::Dims& dims) {
  for (std::int32_t k = 0; k < dims.nbDims; ++k) {
    if (dims.d[k] < 0) return true;
  }
  return false;
}

inline std::size_t volume(const nvinfer1::Dims& dims) {
  std::size_t product = 1;
  for (std::int32_t k = 0; k < dims.nbDims; ++k) product *= static_cast<std::size_t>(dims.d[k]);
  return product;
}

}  // namespace calib8::trt

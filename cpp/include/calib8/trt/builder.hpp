// From an ONNX file to a serialized engine: 8.5 to 10.16 with a calibrator or with Q/DQ nodes, 11
// with Q/DQ nodes.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "calib8/preprocess.hpp"
#include "calib8/trt/calibrator.hpp"
#include "calib8/trt/logger.hpp"

namespace calib8::trt {

struct BuildOptions {
  int batch = 1;                            // for inputs whose batch is open
  Size size{0, 0};                          // for inputs whose height and width are open
  std::size_t workspace_bytes = std::size_t{1} << 30U;
};

class Builder {
 public:
  // Parses the model. Throws BackendError with the parser's own words.
  Builder(const std::filesystem::path& onnx, Logger& logger, BuildOptions options);
  ~Builder();
  Builder(Builder&&) noexcept;

  // The model's only input, its open dimensions set by the options where they say so.
  // Throws BackendError: there are several inputs.
  TensorSpec input() const;

  // Whether the model holds QuantizeLinear nodes, which need no calibration.
  bool has_qdq() const;

#if NV_TENSORRT_MAJOR < 11
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  // Builds an int8 engine by the calibrator, kept alive by the caller until its check().
  // Throws BackendError with TensorRT's last error.
  std::string build(nvinfer1::IInt8Calibrator& calibrator);
#pragma GCC diagnostic pop
#endif
  // Builds what the model says: int8 where it holds Q/DQ nodes, else float32.
  std::string build();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// "8.6.1": the TensorRT that this was compiled for.
std::string version();

}  // namespace calib8::trt

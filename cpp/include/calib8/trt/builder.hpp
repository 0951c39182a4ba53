// From an ONNX file to a serialized engine: 8.5 to 10.16 with a calibrator or with Q/DQ nodes, 11
// with Q/DQ nodes.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "calib8/preprocess.hpp"
#include "calib8/trt/calibrator.hpp"
#include "calib8/trt/logger.hpp"

namespace calib8::trt {

struct BuildOptions {
  std::optional<int> batch;         // for an input whose batch is open; none: 1
  Size size{0, 0};                  // for an input whose height and width are open
  bool fp16 = true;                 // for what does not run in int8; 11 has the model's own types
  std::size_t workspace_bytes = 0;  // 0: TensorRT's own limit, all of the GPU's memory
};

class Builder {
 public:
  // Parses the model, with TensorRT's plugins loaded. Throws BackendError with the parser's own
  // words.
  Builder(const std::filesystem::path& onnx, Logger& logger, BuildOptions options);
  ~Builder();
  Builder(Builder&&) noexcept;

  // The model's only input as the network has it, its open dimensions set by the options where
  // they say so. Throws BackendError: there are several inputs; ConfigError: the options contradict
  // what the model fixes.
  TensorSpec input() const;

  // The same as calibration batches must be: TensorRT reads those of every float type as float32
  // (NVIDIA's trtexec and Polygraphy feed them so).
  TensorSpec calibration_input() const;

  // Whether the model holds QuantizeLinear nodes, which need no calibration.
  bool has_qdq() const;

#if NV_TENSORRT_MAJOR < 11
  // Has TensorRT calibrate, and gives its cache. It runs the network in float32 alone (fp16 and
  // TF32 would move the values that it sees), so what it builds on the way is thrown away.
  // Throws what a callback threw, CalibrationError, or BackendError with TensorRT's words.
  template <class Base>
  std::string calibrate(Calibrator<Base>& calibrator) {
    built_by(calibrator, calibrator.job(), true);
    return calibrator.check();
  }

  // Builds an int8 engine by the cache that the calibrator has. Throws as calibrate() does.
  template <class Base>
  std::string build(Calibrator<Base>& calibrator) {
    return built_by(calibrator, calibrator.job(), false);
  }
#endif
  // Builds what the model says: int8 where it holds Q/DQ nodes, else float.
  std::string build();

 private:
#if NV_TENSORRT_MAJOR < 11
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  std::string built_by(nvinfer1::IInt8Calibrator& calibrator, const CalibrationJob& job,
                       bool float32_alone);
#pragma GCC diagnostic pop
#endif

  struct State;
  std::unique_ptr<State> state_;
};

// "8.6.1": the TensorRT library that runs, which a cache's first line must name.
std::string version();

}  // namespace calib8::trt

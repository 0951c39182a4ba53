// From an ONNX file to a serialized engine: 8.5 to 10.16 with a calibrator or with Q/DQ nodes, 11
// with Q/DQ nodes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "calib8/fingerprint.hpp"
#include "calib8/preprocess.hpp"
#include "calib8/trt/calibrator.hpp"
#include "calib8/trt/logger.hpp"

namespace calib8::trt {

// The type of layers that do not run in int8, for TensorRT up to 10. Version 11, and version 10 for typed
// models, use the types of the model. kBf16 needs version 10.
enum class FloatType { kFp32, kFp16, kBf16 };

using Shape = std::vector<std::int64_t>;

// The smallest and largest shape of an input, and the one to tune and calibrate for.
struct Shapes {
  Shape min;
  Shape opt;
  Shape max;
};

struct BuildOptions {
  std::optional<int> batch;              // for an input with an open batch; none: 1
  Size size{0, 0};                       // for an input with open height and width
  std::map<std::string, Shapes> shapes;  // input -> its shapes, for open dimensions
  FloatType float_type = FloatType::kFp16;
  std::size_t workspace_bytes = 0;  // 0: TensorRT's default, all of the GPU's memory
  std::string timing_cache;         // a file of tactic timings, read and extended; "": none
  std::optional<int> dla;           // the DLA core to run on; layers that it cannot run use the GPU
  std::vector<std::string> plugins;  // plugin libraries, loaded before the model is read
};

// Not thread-safe: one thread at a time uses a builder; several builders may work in several threads.
class Builder {
 public:
  // Loads TensorRT's plugins and those of the options, then parses the model. Throws BackendError with the
  // parser's message; ConfigError: a library does not load, or this version lacks an option.
  Builder(const std::filesystem::path& onnx, Logger& logger, BuildOptions options);
  ~Builder();
  Builder(Builder&&) noexcept;

  // The inputs of the network, with open dimensions set by the options. Throws ConfigError: the options
  // contradict the model.
  std::vector<TensorSpec> inputs() const;

  // All options that the engine depends on, as a JSON object.
  std::string settings() const;

  // Whether the model holds QuantizeLinear nodes, which need no calibration.
  bool has_qdq() const;

  // Whether the network is strongly typed: each layer runs in the type that the model gives it, and
  // BuildOptions::float_type has no effect. Always from TensorRT 11 on; until 9 never; in 10 where
  // is_typed() of calib8/model_identity.hpp says so.
  bool is_strongly_typed() const;

#if NV_TENSORRT_MAJOR < 11
  // Calibrates with TensorRT and returns its cache. The network runs in float32 only (fp16 and TF32 would
  // change the observed values), so the engine that TensorRT builds on the way is discarded.
  // Throws the error of a callback, CalibrationError, or BackendError with TensorRT's message.
  template <class Base>
  std::string calibrate(Calibrator<Base>& calibrator) {
    build_with(calibrator, calibrator.job(), true, {});
    return calibrator.check();
  }

  // Builds an int8 engine with the calibrator's cache. With FloatType::kFp16 the layers of
  // `float32`, listed in the cache's note (StoredCache::float32_layers), compute and output float32: their
  // values overflow float16. Throws as calibrate() does.
  template <class Base>
  std::string build(Calibrator<Base>& calibrator, const Float32Layers& float32 = {}) {
    return build_with(calibrator, calibrator.job(), false, float32);
  }
#endif
  // Builds without a calibrator: int8 where the model has Q/DQ nodes, else float.
  std::string build();

  // "", or after a build a sentence that TensorRT refused the timing cache, which is then unchanged.
  std::string note() const;

 private:
#if NV_TENSORRT_MAJOR < 11
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  std::string build_with(nvinfer1::IInt8Calibrator& calibrator, const CalibrationJob& job,
                         bool float32_alone, const Float32Layers& float32);
#pragma GCC diagnostic pop
#endif

  struct State;
  std::unique_ptr<State> state_;
};

// The version of the loaded TensorRT library, "8.6.1", which a cache's first line must name.
std::string version();

}  // namespace calib8::trt

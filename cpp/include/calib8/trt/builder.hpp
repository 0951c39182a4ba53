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

// What does not run in int8, until TensorRT 10; 11, and typed models in 10, have the model's own types. kBf16 is from 10 on.
enum class FloatType { kFp32, kFp16, kBf16 };

using Shape = std::vector<std::int64_t>;

// The least and largest shapes of an input, and the one to tune and calibrate for.
struct Shapes {
  Shape min;
  Shape opt;
  Shape max;
};

struct BuildOptions {
  std::optional<int> batch;              // for an input whose batch is open; none: 1
  Size size{0, 0};                       // for an input whose height and width are open
  std::map<std::string, Shapes> shapes;  // input -> its shapes, where it leaves dimensions open
  FloatType float_type = FloatType::kFp16;
  std::size_t workspace_bytes = 0;   // 0: TensorRT's own limit, all of the GPU's memory
  std::string timing_cache;          // a file of tactic timings to use and to add to; "": none
  std::optional<int> dla;            // the core to run on, with the GPU for what it cannot
  std::vector<std::string> plugins;  // libraries of plugins, loaded before the model is read
};

// Not thread-safe: one thread at a time uses a builder; several builders may work in several threads.
class Builder {
 public:
  // Parses the model, with TensorRT's plugins and the options' own loaded. Throws BackendError with
  // the parser's own words; ConfigError: a library that does not load, or options that this version
  // does not have.
  Builder(const std::filesystem::path& onnx, Logger& logger, BuildOptions options);
  ~Builder();
  Builder(Builder&&) noexcept;

  // The model's inputs as the network has them, their open dimensions set by the options where they
  // say so. Throws ConfigError: the options contradict what the model fixes.
  std::vector<TensorSpec> inputs() const;

  // The options, all that an engine depends on, as a JSON object.
  std::string settings() const;

  // Whether the model holds QuantizeLinear nodes, which need no calibration.
  bool has_qdq() const;

  // Whether the network is strongly typed: each layer runs in the type that the model gives it, and
  // BuildOptions::float_type has no effect. Always from TensorRT 11 on; until 9 never; in 10 where
  // is_typed() of calib8/model_identity.hpp says so.
  bool is_strongly_typed() const;

#if NV_TENSORRT_MAJOR < 11
  // Has TensorRT calibrate, and gives its cache. It runs the network in float32 alone (fp16 and
  // TF32 would move the values that it sees), so what it builds on the way is thrown away.
  // Throws what a callback threw, CalibrationError, or BackendError with TensorRT's words.
  template <class Base>
  std::string calibrate(Calibrator<Base>& calibrator) {
    build_with(calibrator, calibrator.job(), true, {});
    return calibrator.check();
  }

  // Builds an int8 engine by the cache that the calibrator has. With FloatType::kFp16 the layers of
  // `float32`, which the cache's note lists (StoredCache::float32_layers), compute and output float32: their
  // values overflow float16. Throws as calibrate() does.
  template <class Base>
  std::string build(Calibrator<Base>& calibrator, const Float32Layers& float32 = {}) {
    return build_with(calibrator, calibrator.job(), false, float32);
  }
#endif
  // Builds what the model says: int8 where it holds Q/DQ nodes, else float.
  std::string build();

  // "" or, after a build, that TensorRT refused the file of timings, which then stays as it was.
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

// "8.6.1": the TensorRT library that runs, which a cache's first line must name.
std::string version();

}  // namespace calib8::trt

// Runs a serialized engine and times it: copy in, compute, copy out, by CUDA's own events.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "calib8/latency.hpp"
#include "calib8/trt/logger.hpp"

namespace calib8::trt {

struct MeasureOptions {
  double warmup_ms = 200;  // trtexec's defaults
  double duration_s = 3;
  std::size_t min_iterations = 10;
};

class Runner {
 public:
  // Loads the engine, with TensorRT's plugins, and reserves its inputs and outputs; one whose size
  // depends on the data is reserved as it runs. Throws BackendError with TensorRT's words.
  Runner(std::string_view engine, Logger& logger);
  ~Runner();
  Runner(Runner&&) noexcept;

  // One inference on random inputs, the same ones every time. Throws BackendError.
  DeviceTimes run();

  // Warm-up, then as many inferences as the options ask for. Throws BackendError.
  Latency measure(const MeasureOptions& options);

  double load_ms() const;  // from the bytes to an engine ready to run

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace calib8::trt

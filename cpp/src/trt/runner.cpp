#include "calib8/trt/runner.hpp"

#include <chrono>
#include <vector>

#include "calib8/errors.hpp"
#include "calib8/text.hpp"
#include "calib8/trt/cuda.hpp"

namespace calib8::trt {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

std::size_t bytes_of(nvinfer1::DataType type) {
  using nvinfer1::DataType;
  if (type == DataType::kFLOAT || type == DataType::kINT32) return 4;
  if (type == DataType::kHALF) return 2;
  if (type == DataType::kINT8 || type == DataType::kBOOL || type == DataType::kUINT8) return 1;
#if NV_TENSORRT_MAJOR >= 10
  if (type == DataType::kINT64) return 8;
  if (type == DataType::kBF16) return 2;
#endif
  throw BackendError("an engine's input or output must be of 1, 2, 4 or 8 bytes a value, got type " +
                     std::to_string(static_cast<int>(type)) + "; build it with plain types");
}

// One input or output: host and device memory of one size.
struct Binding {
  std::string name;
  bool input = false;
  std::vector<char> host;
  DeviceBuffer device;
};

}  // namespace

struct Runner::State {
  State(std::string_view plan, Logger& logger) {
    const Clock::time_point start = Clock::now();
    runtime.reset(nvinfer1::createInferRuntime(logger));
    if (runtime) engine.reset(runtime->deserializeCudaEngine(plan.data(), plan.size()));
    if (engine) context.reset(engine->createExecutionContext());
    if (!context) {
      throw BackendError("TensorRT cannot load the engine: " + logger.last_error());
    }
    for (std::int32_t k = 0; k < engine->getNbIOTensors(); ++k) bind(engine->getIOTensorName(k));
    load_ms = ms_since(start);
  }

  void bind(const char* name) {
    Binding binding;
    binding.name = name;
    binding.input = engine->getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT;
    if (binding.input) set_shape(name);
    const nvinfer1::Dims dims = context->getTensorShape(name);
    std::size_t bytes = bytes_of(engine->getTensorDataType(name));
    for (std::int32_t k = 0; k < dims.nbDims; ++k) {
      if (dims.d[k] < 0) {
        throw BackendError("the output " + text::repr(name) +
                           " has a size that depends on the data; run it with Python's calib8");
      }
      bytes *= static_cast<std::size_t>(dims.d[k]);
    }
    binding.host.resize(bytes);
    if (!context->setTensorAddress(name, binding.device.reserve(bytes))) {
      throw BackendError("TensorRT refused the buffer of " + text::repr(name));
    }
    bindings.push_back(std::move(binding));
  }

  // An open dimension takes the first profile's OPT shape.
  void set_shape(const char* name) const {
    const nvinfer1::Dims own = engine->getTensorShape(name);
    bool open = false;
    for (std::int32_t k = 0; k < own.nbDims; ++k) open = open || own.d[k] < 0;
    if (!open) return;
    const nvinfer1::Dims best =
        engine->getProfileShape(name, 0, nvinfer1::OptProfileSelector::kOPT);
    if (!context->setInputShape(name, best)) {
      throw BackendError("TensorRT refused the shape of " + text::repr(name));
    }
  }

  void copy(bool inputs) {
    for (Binding& binding : bindings) {
      if (binding.input != inputs) continue;
      void* from = inputs ? binding.host.data() : binding.device.get();
      void* to = inputs ? binding.device.get() : binding.host.data();
      const cudaMemcpyKind kind = inputs ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
      check(cudaMemcpyAsync(to, from, binding.host.size(), kind, stream.get()),
            "copy " + text::repr(binding.name));
    }
  }

  DeviceTimes run() {
    events[0].record(stream);
    copy(true);
    events[1].record(stream);
    const Clock::time_point start = Clock::now();
    if (!context->enqueueV3(stream.get())) throw BackendError("TensorRT refused to run the engine");
    const double enqueue_ms = ms_since(start);
    events[2].record(stream);
    copy(false);
    events[3].record(stream);
    stream.wait();
    return {events[1].since(events[0]), events[2].since(events[1]), events[3].since(events[2]),
            enqueue_ms};
  }

  double load_ms = 0;
  // in this order: each is freed before what it came from
  std::unique_ptr<nvinfer1::IRuntime> runtime;
  std::unique_ptr<nvinfer1::ICudaEngine> engine;
  std::unique_ptr<nvinfer1::IExecutionContext> context;
  CudaStream stream;
  CudaEvent events[4];
  std::vector<Binding> bindings;
};

Runner::Runner(std::string_view engine, Logger& logger)
    : state_(std::make_unique<State>(engine, logger)) {}

Runner::~Runner() = default;
Runner::Runner(Runner&&) noexcept = default;

DeviceTimes Runner::run() { return state_->run(); }

double Runner::load_ms() const { return state_->load_ms; }

Latency Runner::measure(const MeasureOptions& options) {
  std::size_t warmup = 0;
  for (const Clock::time_point start = Clock::now();
       warmup == 0 || ms_since(start) < options.warmup_ms; ++warmup) {
    run();
  }
  std::vector<double> host_ms;
  std::vector<DeviceTimes> device;
  for (const Clock::time_point start = Clock::now();
       device.size() < options.min_iterations || ms_since(start) < options.duration_s * 1e3;) {
    const Clock::time_point begin = Clock::now();
    device.push_back(run());
    host_ms.push_back(ms_since(begin));
  }
  return Latency::of(host_ms, device, warmup);
}

}  // namespace calib8::trt

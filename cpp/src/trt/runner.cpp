#include "calib8/trt/runner.hpp"

#include <chrono>
#include <exception>
#include <memory>
#include <vector>

#include "calib8/errors.hpp"
#include "calib8/text.hpp"
#include "calib8/trt/cuda.hpp"
#include "dims.hpp"
#include "plugins.hpp"
#include "random_values.hpp"

namespace calib8::trt {
namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

std::size_t value_size(nvinfer1::DataType type) {
  using nvinfer1::DataType;
  if (type == DataType::kFLOAT || type == DataType::kINT32) return 4;
  if (type == DataType::kHALF) return 2;
  if (type == DataType::kINT8 || type == DataType::kBOOL || type == DataType::kUINT8) return 1;
#if NV_TENSORRT_MAJOR >= 10
  if (type == DataType::kINT64) return 8;
  if (type == DataType::kBF16) return 2;
#endif
  throw BackendError(
      "an engine's input or output must be of 1, 2, 4 or 8 bytes a value, got type " +
      std::to_string(static_cast<int>(type)) + "; build it with plain types");
}

// One input or output: pinned host memory and device memory. An output whose size depends on the
// data is allocated while the engine runs; what it throws is kept, since TensorRT takes no
// exception.
struct Binding : nvinfer1::IOutputAllocator {
  void* reallocateOutput(char const* /*tensor*/, void* /*current*/, std::uint64_t size,
                         std::uint64_t /*alignment*/) noexcept override {
    try {
      host.reserve(size);
      return device.reserve(size);
    } catch (...) {
      error = std::current_exception();
      return nullptr;
    }
  }
  void notifyShape(char const* /*tensor*/, nvinfer1::Dims const& dims) noexcept override {
    bytes = volume(dims) * value_bytes;
  }

  std::string name;
  bool is_input = false;
  std::size_t value_bytes = 0;
  std::size_t bytes = 0;
  HostBuffer host;
  DeviceBuffer device;
  std::exception_ptr error;
};

}  // namespace

struct Runner::State {
  State(std::string_view plan, Logger& log) : logger(log) {
    const std::string no_plugins = load_plugins(log);
    const Clock::time_point start = Clock::now();
    runtime.reset(nvinfer1::createInferRuntime(logger));
    if (runtime) engine.reset(runtime->deserializeCudaEngine(plan.data(), plan.size()));
    if (engine) context.reset(engine->createExecutionContext());
    if (!context) refuse("cannot load the engine", no_plugins);
    for (std::int32_t k = 0; k < engine->getNbIOTensors(); ++k) bind(engine->getIOTensorName(k));
    load_ms = ms_since(start);
  }

  [[noreturn]] void refuse(const std::string& action, const std::string& addition = "") const {
    throw BackendError("TensorRT " + action + ": " + logger.last_error() + addition);
  }

  void bind(const char* name) {
    if (engine->isShapeInferenceIO(name)) {
      throw BackendError("the values of " + text::repr(name) +
                         " are a shape, which calib8-build does not hand over; run the engine with"
                         " Python's calib8");
    }
    bindings.push_back(std::make_unique<Binding>());
    Binding& binding = *bindings.back();
    binding.name = name;
    binding.is_input = engine->getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT;
    binding.value_bytes = value_size(engine->getTensorDataType(name));
    if (binding.is_input) set_shape(name);
    const nvinfer1::Dims dims = context->getTensorShape(name);
    if (has_open_dimension(dims)) {
      if (!context->setOutputAllocator(name, &binding))
        refuse("refused to allocate " + binding.name);
      return;
    }
    binding.bytes = volume(dims) * binding.value_bytes;
    void* const host = binding.host.reserve(binding.bytes);
    if (binding.is_input) fill_random(host, binding.bytes, engine->getTensorDataType(name), random);
    if (!context->setTensorAddress(name, binding.device.reserve(binding.bytes))) {
      refuse("refused the buffer of " + text::repr(name));
    }
  }

  // An open dimension takes the first profile's OPT shape.
  void set_shape(const char* name) const {
    if (!has_open_dimension(engine->getTensorShape(name))) return;
    const nvinfer1::Dims opt_shape =
        engine->getProfileShape(name, 0, nvinfer1::OptProfileSelector::kOPT);
    if (!context->setInputShape(name, opt_shape))
      refuse("refused the shape of " + text::repr(name));
  }

  void copy(bool inputs) const {
    for (const auto& binding : bindings) {
      if (binding->is_input != inputs) continue;
      void* source = inputs ? binding->host.get() : binding->device.get();
      void* target = inputs ? binding->device.get() : binding->host.get();
      const cudaMemcpyKind kind = inputs ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
      check(cudaMemcpyAsync(target, source, binding->bytes, kind, stream.get()),
            "copy " + text::repr(binding->name));
    }
  }

  void enqueue() const {
    if (context->enqueueV3(stream.get())) return;
    for (const auto& binding : bindings) {
      if (binding->error) std::rethrow_exception(binding->error);
    }
    refuse("refused to run the engine");
  }

  DeviceTimes run() const {
    events[0].record(stream);
    copy(true);
    events[1].record(stream);
    const Clock::time_point start = Clock::now();
    enqueue();
    const double enqueue_ms = ms_since(start);
    events[2].record(stream);
    copy(false);
    events[3].record(stream);
    stream.wait();
    return {events[1].since(events[0]), events[2].since(events[1]), events[3].since(events[2]),
            enqueue_ms};
  }

  Logger& logger;
  Random random{0};  // of inputs
  double load_ms = 0;
  // in this order: each is freed before what it came from or holds on to
  std::unique_ptr<nvinfer1::IRuntime> runtime;
  std::unique_ptr<nvinfer1::ICudaEngine> engine;
  CudaStream stream;
  CudaEvent events[4];
  std::vector<std::unique_ptr<Binding>> bindings;  // the context holds their addresses
  std::unique_ptr<nvinfer1::IExecutionContext> context;
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
    const Clock::time_point iteration_start = Clock::now();
    device.push_back(run());
    host_ms.push_back(ms_since(iteration_start));
  }
  return Latency::of(host_ms, device, warmup);
}

}  // namespace calib8::trt

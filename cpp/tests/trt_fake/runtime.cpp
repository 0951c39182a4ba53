// The half of the fake that loads and runs an engine.
#include <algorithm>
#include <map>

#include "cuda.hpp"
#include "fake.hpp"
#include "stubs.hpp"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

using namespace nvinfer1;

namespace fake {
namespace {

constexpr int kFound = 7;  // what a dimension that depends on the data comes to

class Engine;

class Context final : public IExecutionContext, public stubs::VExecutionContext {
 public:
  Context(const Engine& engine, ILogger& log) : engine_(engine), log_(log) { mImpl = this; }

  bool setInputShape(char const* name, Dims const& dims) noexcept override {
    shapes_[name] = from_dims(dims);
    trace("input shape " + std::string(name) + " " + shown(shapes_[name]));
    return true;
  }
  Dims getTensorShape(char const* name) const noexcept override { return to_dims(shape(name)); }
  bool setTensorAddress(char const* name, void* memory) noexcept override {
    addresses_[name] = memory;
    return true;
  }
  bool setOutputAllocator(char const* name, IOutputAllocator* allocator) noexcept override {
    allocators_[name] = allocator;
    return true;
  }
  bool enqueueV3(cudaStream_t stream) noexcept override;

 private:
  std::vector<int> shape(const std::string& name) const;
  bool refuse(const std::string& words) const {
    log_.log(ILogger::Severity::kERROR, words.c_str());
    return false;
  }
  bool use(const Tensor& tensor, cudaStream_t stream);

  const Engine& engine_;
  ILogger& log_;
  std::map<std::string, std::vector<int>> shapes_;
  std::map<std::string, void*> addresses_;
  std::map<std::string, IOutputAllocator*> allocators_;
};

class Engine final : public ICudaEngine, public stubs::VCudaEngine {
 public:
  Engine(const std::string& plan, ILogger& log) : log_(log) {
    mImpl = this;
    std::istringstream lines(plan);
    for (std::string line; std::getline(lines, line);) {
      if (is_tensor(line)) tensors.push_back(from_line(line));
      if (line.rfind("best ", 0) == 0) best[from_line(line).name] = from_line(line).dims;
    }
  }

  std::int32_t getNbIOTensors() const noexcept override {
    return static_cast<std::int32_t>(tensors.size());
  }
  char const* getIOTensorName(std::int32_t index) const noexcept override {
    return tensors.at(static_cast<std::size_t>(index)).name.c_str();
  }
  TensorIOMode getTensorIOMode(char const* name) const noexcept override {
    return at(name).is_input() ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
  }
  DataType getTensorDataType(char const* name) const noexcept override {
    return data_type(at(name).type);
  }
  Dims getTensorShape(char const* name) const noexcept override { return to_dims(at(name).dims); }
  bool isShapeInferenceIO(char const* name) const noexcept override {
    return at(name).role == "shape";
  }
  Dims getProfileShape(char const* name, std::int32_t /*profile*/,
                       OptProfileSelector /*which*/) const noexcept override {
    return to_dims(best.at(name));
  }
#if NV_TENSORRT_MAJOR >= 10
  IExecutionContext* createExecutionContext(
      ExecutionContextAllocationStrategy /*strategy*/) noexcept override {
#else
  IExecutionContext* createExecutionContext() noexcept override {
#endif
    return new Context(*this, log_);
  }

  const Tensor& at(const std::string& name) const {
    return *std::find_if(tensors.begin(), tensors.end(),
                         [&name](const Tensor& tensor) { return tensor.name == name; });
  }

  std::vector<Tensor> tensors;
  std::map<std::string, std::vector<int>> best;

 private:
  ILogger& log_;
};

std::vector<int> Context::shape(const std::string& name) const {
  const auto found = shapes_.find(name);
  return found == shapes_.end() ? engine_.at(name).dims : found->second;
}

// Reads or writes all of the tensor's memory, so that a sanitizer sees what is too small.
bool Context::use(const Tensor& tensor, cudaStream_t stream) {
  std::vector<int> dims = shape(tensor.name);
  void* memory = addresses_.count(tensor.name) > 0 ? addresses_[tensor.name] : nullptr;
  const bool on_data = std::count(dims.begin(), dims.end(), kOnData) > 0;
  std::replace(dims.begin(), dims.end(), kOnData, kFound);
  if (is_open(dims)) return refuse("the shape of " + tensor.name + " was not set.");
  const std::size_t bytes = volume(dims) * type_bytes(tensor.type);
  if (on_data) {
    if (allocators_.count(tensor.name) == 0) return refuse(tensor.name + " has no allocator.");
    IOutputAllocator& allocator = *allocators_[tensor.name];
#if NV_TENSORRT_MAJOR >= 10
    memory = allocator.reallocateOutputAsync(tensor.name.c_str(), memory, bytes, 256, stream);
#else
    memory = allocator.reallocateOutput(tensor.name.c_str(), memory, bytes, 256);
    static_cast<void>(stream);
#endif
    allocator.notifyShape(tensor.name.c_str(), to_dims(dims));
  }
  if (memory == nullptr) return refuse(tensor.name + " is bound to nullptr.");
  if (on_device(memory, bytes) == (tensor.role == "shape")) {
    return refuse(tensor.name + " is in the wrong kind of memory, or too small.");
  }
  auto* values = static_cast<unsigned char*>(memory);
  if (tensor.is_input()) {
    add_to("CALIB8_FAKE_INPUTS", static_cast<const char*>(memory), bytes);
    volatile unsigned sum = 0;
    for (std::size_t k = 0; k < bytes; ++k) sum = sum + values[k];
  } else {
    std::fill_n(values, bytes, static_cast<unsigned char>(1));
  }
  return true;
}

bool Context::enqueueV3(cudaStream_t stream) noexcept {
  if (asked("fail-run")) return refuse("Error Code 1: Cask: no kernel image is available.");
  for (const Tensor& tensor : engine_.tensors) {
    if (!use(tensor, stream)) return false;
  }
  return true;
}

class Runtime final : public IRuntime, public stubs::VRuntime {
 public:
  explicit Runtime(ILogger& log) : log_(log) { mImpl = this; }

#if NV_TENSORRT_MAJOR < 10
  ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size,
                                     IPluginFactory* /*factory*/) noexcept override {
#else
  ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept override {
#endif
    const std::string plan(static_cast<const char*>(blob), size);
    if (asked("fail-load") || plan.rfind("fake engine\n", 0) != 0) {
      log_.log(ILogger::Severity::kERROR, "Serialization assertion failed: version tag differs.");
      return nullptr;
    }
    return new Engine(plan, log_);
  }

 private:
  ILogger& log_;
};

}  // namespace
}  // namespace fake

extern "C" __attribute__((visibility("default"))) void* createInferRuntime_INTERNAL(
    void* logger, std::int32_t /*version*/) noexcept {
  return static_cast<IRuntime*>(new fake::Runtime(*static_cast<ILogger*>(logger)));
}

#include "calib8/trt/builder.hpp"

#include <NvOnnxParser.h>

#include "calib8/cache.hpp"
#include "calib8/errors.hpp"
#include "calib8/text.hpp"
#include "dims.hpp"
#include "plugins.hpp"

// kINT8, setInt8Calibrator and others are deprecated in 10.1 to 10.16 and gone in 11; each use
// below stands under the version that has it.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace calib8::trt {
namespace {

constexpr std::uint32_t network_flags() {
#if NV_TENSORRT_MAJOR < 10
  return 1U << static_cast<std::uint32_t>(nvinfer1::NetworkDefinitionCreationFlag::kEXPLICIT_BATCH);
#else
  return 0;
#endif
}

std::string parser_errors(const nvonnxparser::IParser& parser, const Logger& logger) {
  std::string words;
  for (std::int32_t k = 0; k < parser.getNbErrors(); ++k) {
    words += (words.empty() ? "" : "; ") + std::string(parser.getError(k)->desc());
  }
  return words.empty() ? logger.last_error() : words;
}

template <class T>
std::unique_ptr<T> made(T* object, const Logger& logger, const std::string& what) {
  if (object == nullptr) {
    throw BackendError("TensorRT could not make " + what + ": " + logger.last_error());
  }
  return std::unique_ptr<T>(object);
}

std::string dtype_of(nvinfer1::DataType type) {
  using nvinfer1::DataType;
  if (type == DataType::kFLOAT) return "float32";
  if (type == DataType::kHALF) return "float16";
  if (type == DataType::kINT32) return "int32";
  if (type == DataType::kINT8) return "int8";
  if (type == DataType::kUINT8) return "uint8";
  if (type == DataType::kBOOL) return "bool";
#if NV_TENSORRT_MAJOR >= 10
  if (type == DataType::kINT64) return "int64";
  if (type == DataType::kBF16) return "bfloat16";
#endif
  return "type " + std::to_string(static_cast<int>(type));
}

}  // namespace

struct Builder::State {
  State(const std::filesystem::path& onnx, Logger& log, const BuildOptions& given)
      : logger(log),
        options(given),
        model(text::shown(onnx.string())),
        no_plugins(load_plugins(log)),
        builder(made(nvinfer1::createInferBuilder(log), log, "a builder")),
        network(made(builder->createNetworkV2(network_flags()), log, "a network")),
        parser(made(nvonnxparser::createParser(*network, log), log, "an ONNX parser")) {
    constexpr auto kQuiet = static_cast<int>(nvinfer1::ILogger::Severity::kWARNING);
    if (!parser->parseFromFile(onnx.c_str(), kQuiet)) {
      throw BackendError("TensorRT cannot read " + model + ": " + parser_errors(*parser, log) +
                         no_plugins);
    }
  }

  nvinfer1::ITensor& only_input() const {
    if (network->getNbInputs() != 1) {
      throw BackendError("images feed one input, the model has " +
                         std::to_string(network->getNbInputs()) + "; build it with Python's calib8");
    }
    return *network->getInput(0);
  }

  // The input's dimensions with the options' in place of open ones; -1 stays where they are silent.
  nvinfer1::Dims dims() const {
    nvinfer1::Dims dims = only_input().getDimensions();
    if (dims.nbDims > 0) set(dims, 0, options.batch, "--batch");
    if (dims.nbDims > 0 && dims.d[0] < 0) dims.d[0] = options.batch.value_or(1);
    if (options.size.height <= 0) return dims;
    const bool nhwc = dims.nbDims == 4 && dims.d[3] > 0 && dims.d[3] <= 4;
    if (dims.nbDims == 4) {
      set(dims, nhwc ? 1 : 2, options.size.height, "--size");
      set(dims, nhwc ? 2 : 3, options.size.width, "--size");
    }
    return dims;
  }

  // An option for a dimension that the model fixes must say the same.
  void set(nvinfer1::Dims& dims, std::int32_t axis, std::optional<int> wanted,
           const char* option) const {
    if (!wanted || dims.d[axis] == *wanted) return;
    if (dims.d[axis] >= 0) {
      throw ConfigError("the model fixes dimension " + std::to_string(axis) + " of its input " +
                        text::repr(only_input().getName()) + " to " +
                        std::to_string(dims.d[axis]) + ", got " + std::to_string(*wanted) + " by " +
                        option + "; leave it away");
    }
    dims.d[axis] = *wanted;
  }

  std::unique_ptr<nvinfer1::IBuilderConfig> config() const {
    auto made_config = made(builder->createBuilderConfig(), logger, "a builder configuration");
    if (options.workspace_bytes > 0) {
      made_config->setMemoryPoolLimit(nvinfer1::MemoryPoolType::kWORKSPACE,
                                      options.workspace_bytes);
    }
    return made_config;
  }

  // One profile of one shape, where the model leaves anything open.
  nvinfer1::IOptimizationProfile* add_profile(nvinfer1::IBuilderConfig& config) const {
    const nvinfer1::Dims fixed = dims();
    if (!has_open(only_input().getDimensions())) return nullptr;
    nvinfer1::IOptimizationProfile* profile = builder->createOptimizationProfile();
    const char* name = only_input().getName();
    using Selector = nvinfer1::OptProfileSelector;
    for (const Selector selector : {Selector::kMIN, Selector::kOPT, Selector::kMAX}) {
      if (!profile->setDimensions(name, selector, fixed)) {
        throw BackendError("the input " + text::repr(name) +
                           " leaves dimensions open; give --size HxW and --batch N");
      }
    }
    config.addOptimizationProfile(profile);
    return profile;
  }

  std::string serialized(nvinfer1::IBuilderConfig& config) const {
    const std::unique_ptr<nvinfer1::IHostMemory> plan(
        builder->buildSerializedNetwork(*network, config));
    if (!plan) throw BackendError("TensorRT could not build " + model + ": " + logger.last_error());
    return {static_cast<const char*>(plan->data()), plan->size()};
  }

  Logger& logger;
  BuildOptions options;
  std::string model;
  std::string no_plugins;
  std::unique_ptr<nvinfer1::IBuilder> builder;
  std::unique_ptr<nvinfer1::INetworkDefinition> network;
  std::unique_ptr<nvonnxparser::IParser> parser;
};

Builder::Builder(const std::filesystem::path& onnx, Logger& logger, BuildOptions options)
    : state_(std::make_unique<State>(onnx, logger, options)) {}

Builder::~Builder() = default;
Builder::Builder(Builder&&) noexcept = default;

TensorSpec Builder::input() const {
  const nvinfer1::ITensor& tensor = state_->only_input();
  TensorSpec spec{tensor.getName(), dtype_of(tensor.getType()), {}};
  const nvinfer1::Dims dims = state_->dims();
  for (std::int32_t k = 0; k < dims.nbDims; ++k) {
    spec.shape.push_back(dims.d[k] < 0 ? Dim() : Dim(static_cast<std::int64_t>(dims.d[k])));
  }
  return spec;
}

TensorSpec Builder::calibration_input() const {
  TensorSpec spec = input();
  if (spec.dtype == "float16" || spec.dtype == "bfloat16") spec.dtype = "float32";
  return spec;
}

bool Builder::has_qdq() const {
  for (std::int32_t k = 0; k < state_->network->getNbLayers(); ++k) {
    if (state_->network->getLayer(k)->getType() == nvinfer1::LayerType::kQUANTIZE) return true;
  }
  return false;
}

#if NV_TENSORRT_MAJOR < 11
// TensorRT swallows what a callback throws and stumbles over it: that is the reason, then come its
// own words.
std::string Builder::built_by(nvinfer1::IInt8Calibrator& calibrator, const CalibrationJob& job,
                              bool float32_alone) {
  using nvinfer1::BuilderFlag;
  const auto config = state_->config();
  config->setFlag(BuilderFlag::kINT8);
  if (float32_alone) {
    config->clearFlag(BuilderFlag::kTF32);
  } else if (state_->options.fp16) {
    config->setFlag(BuilderFlag::kFP16);
  }
  config->setInt8Calibrator(&calibrator);
  if (const nvinfer1::IOptimizationProfile* profile = state_->add_profile(*config)) {
    config->setCalibrationProfile(profile);
  }
  try {
    std::string engine = state_->serialized(*config);
    job.rethrow();
    if (job.trouble().empty()) return engine;
  } catch (const BackendError& error) {
    job.rethrow();
    const std::string wrong = job.begun() ? job.trouble() : "";
    throw BackendError(error.what() + (wrong.empty() ? "" : "; " + wrong));
  }
  throw CalibrationError(job.trouble() + "; TensorRT said: " + state_->logger.last_error());
}
#endif

std::string Builder::build() {
  const auto config = state_->config();
#if NV_TENSORRT_MAJOR < 11  // from 11 on every network is typed by its own nodes
  if (has_qdq()) config->setFlag(nvinfer1::BuilderFlag::kINT8);
  if (state_->options.fp16) config->setFlag(nvinfer1::BuilderFlag::kFP16);
#endif
  state_->add_profile(*config);
  return state_->serialized(*config);
}

std::string version() { return label_to_version(getInferLibVersion()); }

}  // namespace calib8::trt

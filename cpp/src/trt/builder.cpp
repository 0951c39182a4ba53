#include "calib8/trt/builder.hpp"

#include <NvOnnxParser.h>

#include "calib8/errors.hpp"
#include "calib8/text.hpp"

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

}  // namespace

struct Builder::State {
  State(const std::filesystem::path& onnx, Logger& log, const BuildOptions& given)
      : logger(log),
        options(given),
        builder(made(nvinfer1::createInferBuilder(log), log, "a builder")),
        network(made(builder->createNetworkV2(network_flags()), log, "a network")),
        parser(made(nvonnxparser::createParser(*network, log), log, "an ONNX parser")),
        config(made(builder->createBuilderConfig(), log, "a builder configuration")) {
    constexpr auto kQuiet = static_cast<int>(nvinfer1::ILogger::Severity::kWARNING);
    if (!parser->parseFromFile(onnx.c_str(), kQuiet)) {
      throw BackendError("TensorRT cannot read " + text::shown(onnx.string()) + ": " +
                         parser_errors(*parser, log));
    }
    config->setMemoryPoolLimit(nvinfer1::MemoryPoolType::kWORKSPACE, options.workspace_bytes);
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
    const bool nhwc = dims.nbDims == 4 && dims.d[3] > 0 && dims.d[3] <= 4;
    const std::int32_t height = nhwc ? 1 : 2;
    if (dims.nbDims > 0 && dims.d[0] < 0) dims.d[0] = options.batch;
    if (dims.nbDims == 4 && options.size.height > 0) {
      if (dims.d[height] < 0) dims.d[height] = options.size.height;
      if (dims.d[height + 1] < 0) dims.d[height + 1] = options.size.width;
    }
    return dims;
  }

  // One profile of one shape, where the model leaves anything open.
  nvinfer1::IOptimizationProfile* add_profile() {
    const nvinfer1::Dims own = only_input().getDimensions();
    bool open = false;
    for (std::int32_t k = 0; k < own.nbDims; ++k) open = open || own.d[k] < 0;
    if (!open) return nullptr;
    nvinfer1::IOptimizationProfile* profile = builder->createOptimizationProfile();
    const char* name = only_input().getName();
    const nvinfer1::Dims fixed = dims();
    using Selector = nvinfer1::OptProfileSelector;
    for (const Selector selector : {Selector::kMIN, Selector::kOPT, Selector::kMAX}) {
      if (!profile->setDimensions(name, selector, fixed)) {
        throw BackendError("the input " + text::repr(name) +
                           " leaves dimensions open; give --size HxW and --batch N");
      }
    }
    config->addOptimizationProfile(profile);
    return profile;
  }

  std::string serialized() const {
    const auto plan =
        made(builder->buildSerializedNetwork(*network, *config), logger, "an engine");
    return {static_cast<const char*>(plan->data()), plan->size()};
  }

  Logger& logger;
  BuildOptions options;
  std::unique_ptr<nvinfer1::IBuilder> builder;
  std::unique_ptr<nvinfer1::INetworkDefinition> network;
  std::unique_ptr<nvonnxparser::IParser> parser;
  std::unique_ptr<nvinfer1::IBuilderConfig> config;
};

Builder::Builder(const std::filesystem::path& onnx, Logger& logger, BuildOptions options)
    : state_(std::make_unique<State>(onnx, logger, options)) {}

Builder::~Builder() = default;
Builder::Builder(Builder&&) noexcept = default;

TensorSpec Builder::input() const {
  const nvinfer1::ITensor& tensor = state_->only_input();
  TensorSpec spec{tensor.getName(), "float32", {}};
  if (tensor.getType() != nvinfer1::DataType::kFLOAT) spec.dtype = "no float32";
  const nvinfer1::Dims dims = state_->dims();
  for (std::int32_t k = 0; k < dims.nbDims; ++k) {
    spec.shape.push_back(dims.d[k] < 0 ? Dim() : Dim(static_cast<std::int64_t>(dims.d[k])));
  }
  return spec;
}

bool Builder::has_qdq() const {
  for (std::int32_t k = 0; k < state_->network->getNbLayers(); ++k) {
    if (state_->network->getLayer(k)->getType() == nvinfer1::LayerType::kQUANTIZE) return true;
  }
  return false;
}

#if NV_TENSORRT_MAJOR < 11
std::string Builder::build(nvinfer1::IInt8Calibrator& calibrator) {
  nvinfer1::IBuilderConfig& config = *state_->config;
  config.setFlag(nvinfer1::BuilderFlag::kINT8);
  config.setInt8Calibrator(&calibrator);
  if (const nvinfer1::IOptimizationProfile* profile = state_->add_profile()) {
    config.setCalibrationProfile(profile);
  }
  return state_->serialized();
}
#endif

std::string Builder::build() {
#if NV_TENSORRT_MAJOR < 11  // from 11 on every network is typed by its own nodes
  if (has_qdq()) state_->config->setFlag(nvinfer1::BuilderFlag::kINT8);
#endif
  state_->add_profile();
  return state_->serialized();
}

std::string version() {
  return std::to_string(NV_TENSORRT_MAJOR) + "." + std::to_string(NV_TENSORRT_MINOR) + "." +
         std::to_string(NV_TENSORRT_PATCH);
}

}  // namespace calib8::trt

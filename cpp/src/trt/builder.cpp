#include "calib8/trt/builder.hpp"

#include <NvOnnxParser.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <system_error>
#include <type_traits>

#include "calib8/cache.hpp"
#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/files.hpp"
#include "calib8/model_identity.hpp"
#include "calib8/text.hpp"
#include "dims.hpp"
#include "plugins.hpp"

// kINT8, setInt8Calibrator and others are deprecated in 10.1 to 10.16 and gone in 11; each use
// below stands under the version that has it.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace calib8::trt {
namespace {

// Whether TensorRT 10 is to take every type from the model, as it does from 11 on.
bool wants_types([[maybe_unused]] const std::filesystem::path& onnx) {
#if NV_TENSORRT_MAJOR == 10
  try {
    return is_typed(onnx);
  } catch (const FeedError&) {  // the parser says it in TensorRT's words
    return false;
  }
#else
  return NV_TENSORRT_MAJOR > 10;
#endif
}

std::uint32_t network_flags([[maybe_unused]] bool typed) {
  using Flag [[maybe_unused]] = nvinfer1::NetworkDefinitionCreationFlag;
#if NV_TENSORRT_MAJOR < 10
  return 1U << static_cast<std::uint32_t>(Flag::kEXPLICIT_BATCH);
#elif NV_TENSORRT_MAJOR == 10
  return typed ? 1U << static_cast<std::uint32_t>(Flag::kSTRONGLY_TYPED) : 0;
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

nvinfer1::Dims dims_of(const Shape& shape) {
  nvinfer1::Dims dims{};
  dims.nbDims = static_cast<std::int32_t>(shape.size());
  // the sizes are of 32 bits until TensorRT 9
  using Size = std::remove_reference_t<decltype(dims.d[0])>;
  for (std::size_t k = 0; k < shape.size(); ++k) dims.d[k] = static_cast<Size>(shape[k]);
  return dims;
}

template <class Sizes>
std::string joined(const Sizes& sizes, std::size_t count) {
  std::string words;
  for (std::size_t k = 0; k < count; ++k) {
    words += (k > 0 ? "x" : "") + (sizes[k] < 0 ? std::string("?") : std::to_string(sizes[k]));
  }
  return words;
}
std::string shown(const nvinfer1::Dims& dims) {
  return joined(dims.d, static_cast<std::size_t>(std::max(dims.nbDims, 0)));
}
std::string shown(const Shape& shape) { return joined(shape, shape.size()); }

#if NV_TENSORRT_MAJOR < 11
void set_rest(nvinfer1::IBuilderConfig& config, Rest rest) {
  if (rest == Rest::kFp16) config.setFlag(nvinfer1::BuilderFlag::kFP16);
  if (rest != Rest::kBf16) return;
#if NV_TENSORRT_MAJOR >= 10
  config.setFlag(nvinfer1::BuilderFlag::kBF16);
#else
  throw ConfigError("bf16 is for TensorRT from 10 on, got " + version() + "; take fp16 or fp32");
#endif
}

// TensorRT does not name every layer after its node: it may be known by the tensor that it makes.
bool is_listed(const nvinfer1::ILayer& layer, const Float32Layers& nodes) {
  if (nodes.count(layer.getName()) > 0) return true;
  for (std::int32_t k = 0; k < layer.getNbOutputs(); ++k) {
    const std::string made_here = layer.getOutput(k)->getName();
    const auto makes = [&made_here](const auto& one) { return one.second == made_here; };
    if (std::any_of(nodes.begin(), nodes.end(), makes)) return true;
  }
  return false;
}

void bind_to_float32(nvinfer1::IBuilderConfig& config, const nvinfer1::INetworkDefinition& network,
                     const Float32Layers& nodes) {
  if (nodes.empty()) return;
  config.setFlag(nvinfer1::BuilderFlag::kOBEY_PRECISION_CONSTRAINTS);
  for (std::int32_t index = 0; index < network.getNbLayers(); ++index) {
    nvinfer1::ILayer& layer = *network.getLayer(index);
    if (!is_listed(layer, nodes)) continue;
    layer.setPrecision(nvinfer1::DataType::kFLOAT);
    for (std::int32_t k = 0; k < layer.getNbOutputs(); ++k) {
      layer.setOutputType(k, nvinfer1::DataType::kFLOAT);
    }
  }
}
#endif

}  // namespace

struct Builder::State {
  State(const std::filesystem::path& onnx, Logger& log, const BuildOptions& given)
      : logger(log),
        options(given),
        model(text::shown(onnx.string())),
        no_plugins(loaded(given, log)),
        typed(wants_types(onnx)),
        builder(made(nvinfer1::createInferBuilder(log), log, "a builder")),
        network(made(builder->createNetworkV2(network_flags(typed)), log, "a network")),
        parser(made(nvonnxparser::createParser(*network, log), log, "an ONNX parser")) {
    constexpr auto kQuiet = static_cast<int>(nvinfer1::ILogger::Severity::kWARNING);
    if (!parser->parseFromFile(onnx.c_str(), kQuiet)) {
      throw BackendError("TensorRT cannot read " + model + ": " + parser_errors(*parser, log) +
                         no_plugins);
    }
    check_shapes();
  }

  static std::string loaded(const BuildOptions& given, Logger& log) {
    const std::string missing = load_plugins(log);
    for (const std::string& path : given.plugins) load_library(path);
    return missing;
  }

  std::int32_t count() const { return network->getNbInputs(); }

  // Shapes that were given must be those of inputs, and fit them.
  void check_shapes() const {
    std::string names;
    std::map<std::string, const Shapes*> left;
    for (const auto& [name, shapes] : options.shapes) left[name] = &shapes;
    for (std::int32_t k = 0; k < count(); ++k) {
      const nvinfer1::ITensor& input = *network->getInput(k);
      names += (names.empty() ? "" : ", ") + text::repr(input.getName());
      const auto found = left.find(input.getName());
      if (found == left.end()) continue;
      check_fits(input, *found->second);
      left.erase(found);
    }
    if (left.empty()) return;
    throw ConfigError("shapes are for inputs of the model, got " + text::repr(left.begin()->first) +
                      " beside " + names);
  }

  static void check_fits(const nvinfer1::ITensor& input, const Shapes& given) {
    const nvinfer1::Dims own = input.getDimensions();
    const auto rank = static_cast<std::size_t>(own.nbDims);
    bool fits = given.min.size() == rank && given.opt.size() == rank && given.max.size() == rank;
    for (std::size_t k = 0; fits && k < rank; ++k) {
      fits = given.min[k] >= 1 && given.min[k] <= given.opt[k] && given.opt[k] <= given.max[k] &&
             (own.d[k] < 0 || (given.min[k] == own.d[k] && given.max[k] == own.d[k]));
    }
    if (fits) return;
    throw ConfigError("shapes must fit the input " + text::repr(input.getName()) + " " +
                      shown(own) + ", the least first and none above the largest, got " +
                      shown(given.min) + ", " + shown(given.opt) + " and " + shown(given.max));
  }

  // The input's dimensions with the options' in place of open ones; -1 stays where they are silent.
  nvinfer1::Dims dims(const nvinfer1::ITensor& input) const {
    nvinfer1::Dims dims = input.getDimensions();
    const auto given = options.shapes.find(input.getName());
    if (given != options.shapes.end()) {
      if (options.batch || options.size.height > 0) {
        throw ConfigError(
            "an input's shapes and --batch or --size say the same thing, got both for " +
            text::repr(input.getName()) + "; give one");
      }
      return dims_of(given->second.opt);
    }
    if (dims.nbDims > 0) set(dims, 0, options.batch, "--batch", input);
    if (dims.nbDims > 0 && dims.d[0] < 0) dims.d[0] = options.batch.value_or(1);
    if (options.size.height <= 0) return dims;
    const bool nhwc = dims.nbDims == 4 && dims.d[3] > 0 && dims.d[3] <= 4;
    if (dims.nbDims == 4) {
      set(dims, nhwc ? 1 : 2, options.size.height, "--size", input);
      set(dims, nhwc ? 2 : 3, options.size.width, "--size", input);
    }
    return dims;
  }

  // An option for a dimension that the model fixes must say the same.
  static void set(nvinfer1::Dims& dims, std::int32_t axis, std::optional<int> wanted,
                  const char* option, const nvinfer1::ITensor& input) {
    if (!wanted || dims.d[axis] == *wanted) return;
    if (dims.d[axis] >= 0) {
      throw ConfigError("the model fixes dimension " + std::to_string(axis) + " of its input " +
                        text::repr(input.getName()) + " to " + std::to_string(dims.d[axis]) +
                        ", got " + std::to_string(*wanted) + " by " + option + "; leave it out");
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

  // DLA, for an engine that is to be kept: a calibration runs in float32, which DLA has not.
  void use_dla(nvinfer1::IBuilderConfig& config) const {
    if (!options.dla) return;
    const std::int32_t cores = builder->getNbDLACores();
    if (*options.dla >= cores) {
      throw ConfigError("--dla must name one of this machine's " + std::to_string(cores) +
                        " DLA cores, from 0, got " + std::to_string(*options.dla) +
                        "; leave it out to build for the GPU");
    }
    config.setDefaultDeviceType(nvinfer1::DeviceType::kDLA);
    config.setDLACore(*options.dla);
    config.setFlag(nvinfer1::BuilderFlag::kGPU_FALLBACK);
  }

  // One profile, where the model leaves anything open; a calibration knows one shape alone.
  nvinfer1::IOptimizationProfile* add_profile(nvinfer1::IBuilderConfig& config,
                                              bool calibrating) const {
    nvinfer1::IOptimizationProfile* profile = nullptr;
    for (std::int32_t k = 0; k < count(); ++k) {
      const nvinfer1::ITensor& input = *network->getInput(k);
      const nvinfer1::Dims best = dims(input);
      if (!has_open(input.getDimensions())) continue;
      if (profile == nullptr) profile = builder->createOptimizationProfile();
      set_profile(*profile, input, best, calibrating);
    }
    if (profile != nullptr) config.addOptimizationProfile(profile);
    return profile;
  }

  void set_profile(nvinfer1::IOptimizationProfile& profile, const nvinfer1::ITensor& input,
                   const nvinfer1::Dims& best, bool calibrating) const {
    using Selector = nvinfer1::OptProfileSelector;
    const auto given = options.shapes.find(input.getName());
    const bool range = given != options.shapes.end() && !calibrating;
    const nvinfer1::Dims least = range ? dims_of(given->second.min) : best;
    const nvinfer1::Dims most = range ? dims_of(given->second.max) : best;
    const char* name = input.getName();
    if (profile.setDimensions(name, Selector::kMIN, least) &&
        profile.setDimensions(name, Selector::kOPT, best) &&
        profile.setDimensions(name, Selector::kMAX, most)) {
      return;
    }
    throw BackendError("the input " + text::repr(name) +
                       " leaves dimensions open; give --size HxW and --batch N, or its shapes");
  }

  // The timings that an earlier build wrote, where there is a file and TensorRT takes it.
  std::unique_ptr<nvinfer1::ITimingCache> timings(nvinfer1::IBuilderConfig& config) {
    if (options.timing_cache.empty()) return nullptr;
    std::string known;
    std::error_code failed;
    if (std::filesystem::exists(options.timing_cache, failed)) {
      known = files::read(options.timing_cache);
    }
    std::unique_ptr<nvinfer1::ITimingCache> cache(
        config.createTimingCache(known.data(), known.size()));
    refused = !cache || !config.setTimingCache(*cache, false);
    if (refused) {
      cache = made(config.createTimingCache(nullptr, 0), logger, "a timing cache");
      config.setTimingCache(*cache, false);
    }
    return cache;
  }

  std::string built(nvinfer1::IBuilderConfig& config) {
    const auto known = timings(config);
    std::string plan = serialized(config);
    if (known && !refused) {
      const std::unique_ptr<nvinfer1::IHostMemory> fresh(config.getTimingCache()->serialize());
      if (fresh) {
        files::write(options.timing_cache,
                     {static_cast<const char*>(fresh->data()), fresh->size()});
      }
    }
    return plan;
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
  bool refused = false;  // the file of timings
  bool typed;
  std::unique_ptr<nvinfer1::IBuilder> builder;
  std::unique_ptr<nvinfer1::INetworkDefinition> network;
  std::unique_ptr<nvonnxparser::IParser> parser;
};

Builder::Builder(const std::filesystem::path& onnx, Logger& logger, BuildOptions options)
    : state_(std::make_unique<State>(onnx, logger, options)) {}

Builder::~Builder() = default;
Builder::Builder(Builder&&) noexcept = default;

std::vector<TensorSpec> Builder::inputs() const {
  std::vector<TensorSpec> specs;
  for (std::int32_t k = 0; k < state_->count(); ++k) {
    const nvinfer1::ITensor& tensor = *state_->network->getInput(k);
    TensorSpec spec{tensor.getName(), dtype_of(tensor.getType()), {}};
    const nvinfer1::Dims dims = state_->dims(tensor);
    for (std::int32_t axis = 0; axis < dims.nbDims; ++axis) {
      spec.shape.push_back(dims.d[axis] < 0 ? Dim() : Dim(static_cast<std::int64_t>(dims.d[axis])));
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

std::string Builder::settings() const {
  const BuildOptions& given = state_->options;
  nlohmann::json told{{"rest", static_cast<int>(given.rest)}, {"workspace", given.workspace_bytes}};
  for (std::int32_t k = 0; k < state_->count(); ++k) {
    const nvinfer1::ITensor& input = *state_->network->getInput(k);
    told["opt"][input.getName()] = shown(state_->dims(input));
  }
  for (const auto& [name, shapes] : given.shapes) {
    told["min"][name] = shapes.min;
    told["max"][name] = shapes.max;
  }
#if NV_TENSORRT_MAJOR == 10
  if (state_->typed) told["typed"] = true;
#endif
  if (given.dla) told["dla"] = *given.dla;
  for (const std::string& path : given.plugins) {
    told["plugins"].push_back(Sha256().update(files::read(path)).hex());
  }
  return told.dump();
}

bool Builder::has_qdq() const {
  for (std::int32_t k = 0; k < state_->network->getNbLayers(); ++k) {
    if (state_->network->getLayer(k)->getType() == nvinfer1::LayerType::kQUANTIZE) return true;
  }
  return false;
}

bool Builder::typed() const { return state_->typed; }

std::string Builder::note() const {
  if (!state_->refused) return "";
  return state_->options.timing_cache + " is not a timing cache of TensorRT " + version() +
         " on this GPU: it was neither used nor changed; give another file";
}

#if NV_TENSORRT_MAJOR < 11
// TensorRT swallows what a callback throws and stumbles over it: that is the reason, then come its
// own words.
std::string Builder::built_by(nvinfer1::IInt8Calibrator& calibrator, const CalibrationJob& job,
                              bool float32_alone, const Float32Layers& float32) {
  using nvinfer1::BuilderFlag;
  const auto config = state_->config();
  config->setFlag(BuilderFlag::kINT8);
  if (float32_alone) {
    config->clearFlag(BuilderFlag::kTF32);
  } else {
    set_rest(*config, state_->options.rest);
    if (state_->options.rest == Rest::kFp16) bind_to_float32(*config, *state_->network, float32);
    state_->use_dla(*config);
  }
  config->setInt8Calibrator(&calibrator);
  const nvinfer1::IOptimizationProfile* profile = state_->add_profile(*config, float32_alone);
  if (profile != nullptr) config->setCalibrationProfile(profile);
  try {
    std::string engine = float32_alone ? state_->serialized(*config) : state_->built(*config);
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
#if NV_TENSORRT_MAJOR < 11
  if (!state_->typed) {
    if (has_qdq()) config->setFlag(nvinfer1::BuilderFlag::kINT8);
    set_rest(*config, state_->options.rest);
  }
#endif
  state_->use_dla(*config);
  state_->add_profile(*config, false);
  return state_->built(*config);
}

std::string version() { return label_to_version(getInferLibVersion()); }

}  // namespace calib8::trt

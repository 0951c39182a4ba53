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
bool needs_strong_typing([[maybe_unused]] const std::filesystem::path& onnx) {
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
  std::string messages;
  for (std::int32_t k = 0; k < parser.getNbErrors(); ++k) {
    messages += (messages.empty() ? "" : "; ") + std::string(parser.getError(k)->desc());
  }
  return messages.empty() ? logger.last_error() : messages;
}

template <class T>
std::unique_ptr<T> require_created(T* object, const Logger& logger, const std::string& what) {
  if (object == nullptr) {
    throw BackendError("TensorRT could not make " + what + ": " + logger.last_error());
  }
  return std::unique_ptr<T>(object);
}

std::string numpy_dtype(nvinfer1::DataType type) {
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

nvinfer1::Dims to_dims(const Shape& shape) {
  nvinfer1::Dims dims{};
  dims.nbDims = static_cast<std::int32_t>(shape.size());
  // the sizes are of 32 bits until TensorRT 9
  using Size = std::remove_reference_t<decltype(dims.d[0])>;
  for (std::size_t k = 0; k < shape.size(); ++k) dims.d[k] = static_cast<Size>(shape[k]);
  return dims;
}

template <class Sizes>
std::string join_sizes(const Sizes& sizes, std::size_t count) {
  std::string text;
  for (std::size_t k = 0; k < count; ++k) {
    text += (k > 0 ? "x" : "") + (sizes[k] < 0 ? std::string("?") : std::to_string(sizes[k]));
  }
  return text;
}
std::string format_dims(const nvinfer1::Dims& dims) {
  return join_sizes(dims.d, static_cast<std::size_t>(std::max(dims.nbDims, 0)));
}
std::string format_dims(const Shape& shape) { return join_sizes(shape, shape.size()); }

#if NV_TENSORRT_MAJOR < 11
void set_float_type(nvinfer1::IBuilderConfig& config, FloatType float_type) {
  if (float_type == FloatType::kFp16) config.setFlag(nvinfer1::BuilderFlag::kFP16);
  if (float_type != FloatType::kBf16) return;
#if NV_TENSORRT_MAJOR >= 10
  config.setFlag(nvinfer1::BuilderFlag::kBF16);
#else
  throw ConfigError("bf16 is for TensorRT from 10 on, got " + version() + "; take fp16 or fp32");
#endif
}

// TensorRT does not name every layer after its node: it may be known by the tensor that it makes.
bool is_float32_layer(const nvinfer1::ILayer& layer, const Float32Layers& nodes) {
  if (nodes.count(layer.getName()) > 0) return true;
  for (std::int32_t k = 0; k < layer.getNbOutputs(); ++k) {
    const std::string output_name = layer.getOutput(k)->getName();
    const auto is_output_of = [&output_name](const auto& entry) {
      return entry.second == output_name;
    };
    if (std::any_of(nodes.begin(), nodes.end(), is_output_of)) return true;
  }
  return false;
}

void keep_in_float32(nvinfer1::IBuilderConfig& config, const nvinfer1::INetworkDefinition& network,
                     const Float32Layers& nodes) {
  if (nodes.empty()) return;
  config.setFlag(nvinfer1::BuilderFlag::kOBEY_PRECISION_CONSTRAINTS);
  for (std::int32_t index = 0; index < network.getNbLayers(); ++index) {
    nvinfer1::ILayer& layer = *network.getLayer(index);
    if (!is_float32_layer(layer, nodes)) continue;
    layer.setPrecision(nvinfer1::DataType::kFLOAT);
    for (std::int32_t k = 0; k < layer.getNbOutputs(); ++k) {
      layer.setOutputType(k, nvinfer1::DataType::kFLOAT);
    }
  }
}
#endif

}  // namespace

struct Builder::State {
  State(const std::filesystem::path& onnx, Logger& log, const BuildOptions& build_options)
      : logger(log),
        options(build_options),
        model(text::printable(onnx.string())),
        no_plugins(load_all_plugins(build_options, log)),
        typed(needs_strong_typing(onnx)),
        builder(require_created(nvinfer1::createInferBuilder(log), log, "a builder")),
        network(require_created(builder->createNetworkV2(network_flags(typed)), log, "a network")),
        parser(require_created(nvonnxparser::createParser(*network, log), log, "an ONNX parser")) {
    constexpr auto kQuiet = static_cast<int>(nvinfer1::ILogger::Severity::kWARNING);
    if (!parser->parseFromFile(onnx.c_str(), kQuiet)) {
      throw BackendError("TensorRT cannot read " + model + ": " + parser_errors(*parser, log) +
                         no_plugins);
    }
    check_shapes();
  }

  static std::string load_all_plugins(const BuildOptions& options, Logger& log) {
    const std::string missing = load_plugins(log);
    for (const std::string& path : options.plugins) load_library(path);
    return missing;
  }

  std::int32_t count() const { return network->getNbInputs(); }

  // Shapes that were given must be those of inputs, and fit them.
  void check_shapes() const {
    std::string name_list;
    std::map<std::string, const Shapes*> unmatched;
    for (const auto& [name, shapes] : options.shapes) unmatched[name] = &shapes;
    for (std::int32_t k = 0; k < count(); ++k) {
      const nvinfer1::ITensor& input = *network->getInput(k);
      name_list += (name_list.empty() ? "" : ", ") + text::repr(input.getName());
      const auto match = unmatched.find(input.getName());
      if (match == unmatched.end()) continue;
      check_fits(input, *match->second);
      unmatched.erase(match);
    }
    if (unmatched.empty()) return;
    throw ConfigError("shapes are for inputs of the model, got " +
                      text::repr(unmatched.begin()->first) + " beside " + name_list);
  }

  static void check_fits(const nvinfer1::ITensor& input, const Shapes& shapes) {
    const nvinfer1::Dims input_shape = input.getDimensions();
    const auto rank = static_cast<std::size_t>(input_shape.nbDims);
    bool is_valid =
        shapes.min.size() == rank && shapes.opt.size() == rank && shapes.max.size() == rank;
    for (std::size_t k = 0; is_valid && k < rank; ++k) {
      is_valid = shapes.min[k] >= 1 && shapes.min[k] <= shapes.opt[k] &&
                 shapes.opt[k] <= shapes.max[k] &&
                 (input_shape.d[k] < 0 ||
                  (shapes.min[k] == input_shape.d[k] && shapes.max[k] == input_shape.d[k]));
    }
    if (is_valid) return;
    throw ConfigError("shapes must fit the input " + text::repr(input.getName()) + " " +
                      format_dims(input_shape) +
                      ", the least first and none above the largest, got " +
                      format_dims(shapes.min) + ", " + format_dims(shapes.opt) + " and " +
                      format_dims(shapes.max));
  }

  // The input's dimensions with the options' in place of open ones; -1 stays where they are silent.
  nvinfer1::Dims input_dims(const nvinfer1::ITensor& input) const {
    nvinfer1::Dims dims = input.getDimensions();
    const auto entry = options.shapes.find(input.getName());
    if (entry != options.shapes.end()) {
      if (options.batch || options.size.height > 0) {
        throw ConfigError(
            "an input's shapes and the batch or size (--batch, --size) say the same thing, got "
            "both for " +
            text::repr(input.getName()) + "; give one");
      }
      return to_dims(entry->second.opt);
    }
    if (dims.nbDims > 0)
      set_dimension(dims, 0, options.batch, "BuildOptions::batch (--batch)", input);
    if (dims.nbDims > 0 && dims.d[0] < 0) dims.d[0] = options.batch.value_or(1);
    if (options.size.height <= 0) return dims;
    const bool nhwc = dims.nbDims == 4 && dims.d[3] > 0 && dims.d[3] <= 4;
    if (dims.nbDims == 4) {
      set_dimension(dims, nhwc ? 1 : 2, options.size.height, "BuildOptions::size (--size)", input);
      set_dimension(dims, nhwc ? 2 : 3, options.size.width, "BuildOptions::size (--size)", input);
    }
    return dims;
  }

  // An option for a dimension that the model fixes must say the same.
  static void set_dimension(nvinfer1::Dims& dims, std::int32_t axis, std::optional<int> requested,
                            const char* option, const nvinfer1::ITensor& input) {
    if (!requested || dims.d[axis] == *requested) return;
    if (dims.d[axis] >= 0) {
      throw ConfigError("the model fixes dimension " + std::to_string(axis) + " of its input " +
                        text::repr(input.getName()) + " to " + std::to_string(dims.d[axis]) +
                        ", got " + std::to_string(*requested) + " by " + option + "; leave it out");
    }
    dims.d[axis] = *requested;
  }

  std::unique_ptr<nvinfer1::IBuilderConfig> config() const {
    auto result =
        require_created(builder->createBuilderConfig(), logger, "a builder configuration");
    if (options.workspace_bytes > 0) {
      result->setMemoryPoolLimit(nvinfer1::MemoryPoolType::kWORKSPACE, options.workspace_bytes);
    }
    return result;
  }

  // DLA, for an engine that is to be kept: a calibration runs in float32, which DLA has not.
  void use_dla(nvinfer1::IBuilderConfig& config) const {
    if (!options.dla) return;
    const std::int32_t cores = builder->getNbDLACores();
    if (*options.dla >= cores) {
      throw ConfigError("BuildOptions::dla (--dla) must name one of this machine's " +
                        std::to_string(cores) + " DLA cores, from 0, got " +
                        std::to_string(*options.dla) + "; leave it out to build for the GPU");
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
      const nvinfer1::Dims opt_shape = input_dims(input);
      if (!has_open_dimension(input.getDimensions())) continue;
      if (profile == nullptr) profile = builder->createOptimizationProfile();
      set_profile(*profile, input, opt_shape, calibrating);
    }
    if (profile != nullptr) config.addOptimizationProfile(profile);
    return profile;
  }

  void set_profile(nvinfer1::IOptimizationProfile& profile, const nvinfer1::ITensor& input,
                   const nvinfer1::Dims& opt_shape, bool calibrating) const {
    using Selector = nvinfer1::OptProfileSelector;
    const auto entry = options.shapes.find(input.getName());
    const bool has_range = entry != options.shapes.end() && !calibrating;
    const nvinfer1::Dims min_shape = has_range ? to_dims(entry->second.min) : opt_shape;
    const nvinfer1::Dims max_shape = has_range ? to_dims(entry->second.max) : opt_shape;
    const char* name = input.getName();
    if (profile.setDimensions(name, Selector::kMIN, min_shape) &&
        profile.setDimensions(name, Selector::kOPT, opt_shape) &&
        profile.setDimensions(name, Selector::kMAX, max_shape)) {
      return;
    }
    throw BackendError(
        "the input " + text::repr(name) +
        " leaves dimensions open; give the size and batch (--size HxW, --batch N), or its shapes");
  }

  // The timings that an earlier build wrote, where there is a file and TensorRT takes it.
  std::unique_ptr<nvinfer1::ITimingCache> load_timing_cache(nvinfer1::IBuilderConfig& config) {
    if (options.timing_cache.empty()) return nullptr;
    std::string contents;
    std::error_code error;
    if (std::filesystem::exists(options.timing_cache, error)) {
      contents = files::read(options.timing_cache);
    }
    std::unique_ptr<nvinfer1::ITimingCache> cache(
        config.createTimingCache(contents.data(), contents.size()));
    timing_cache_refused = !cache || !config.setTimingCache(*cache, false);
    if (timing_cache_refused) {
      cache = require_created(config.createTimingCache(nullptr, 0), logger, "a timing cache");
      config.setTimingCache(*cache, false);
    }
    return cache;
  }

  std::string build_engine(nvinfer1::IBuilderConfig& config) {
    const auto timing_cache = load_timing_cache(config);
    std::string plan = serialize_engine(config);
    if (timing_cache && !timing_cache_refused) {
      const std::unique_ptr<nvinfer1::IHostMemory> new_timings(
          config.getTimingCache()->serialize());
      if (new_timings) {
        files::write(options.timing_cache,
                     {static_cast<const char*>(new_timings->data()), new_timings->size()});
      }
    }
    return plan;
  }

  std::string serialize_engine(nvinfer1::IBuilderConfig& config) const {
    const std::unique_ptr<nvinfer1::IHostMemory> plan(
        builder->buildSerializedNetwork(*network, config));
    if (!plan) throw BackendError("TensorRT could not build " + model + ": " + logger.last_error());
    return {static_cast<const char*>(plan->data()), plan->size()};
  }

  Logger& logger;
  BuildOptions options;
  std::string model;
  std::string no_plugins;
  bool timing_cache_refused = false;  // the file of timings
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
    TensorSpec spec{tensor.getName(), numpy_dtype(tensor.getType()), {}};
    const nvinfer1::Dims dims = state_->input_dims(tensor);
    for (std::int32_t axis = 0; axis < dims.nbDims; ++axis) {
      spec.shape.push_back(dims.d[axis] < 0 ? Dim() : Dim(static_cast<std::int64_t>(dims.d[axis])));
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

std::string Builder::settings() const {
  const BuildOptions& options = state_->options;
  nlohmann::json json{{"rest", static_cast<int>(options.float_type)},
                      {"workspace", options.workspace_bytes}};
  for (std::int32_t k = 0; k < state_->count(); ++k) {
    const nvinfer1::ITensor& input = *state_->network->getInput(k);
    json["opt"][input.getName()] = format_dims(state_->input_dims(input));
  }
  for (const auto& [name, shapes] : options.shapes) {
    json["min"][name] = shapes.min;
    json["max"][name] = shapes.max;
  }
#if NV_TENSORRT_MAJOR == 10
  if (state_->typed) json["typed"] = true;
#endif
  if (options.dla) json["dla"] = *options.dla;
  for (const std::string& path : options.plugins) {
    json["plugins"].push_back(Sha256().update(files::read(path)).hex());
  }
  return json.dump();
}

bool Builder::has_qdq() const {
  for (std::int32_t k = 0; k < state_->network->getNbLayers(); ++k) {
    if (state_->network->getLayer(k)->getType() == nvinfer1::LayerType::kQUANTIZE) return true;
  }
  return false;
}

bool Builder::is_strongly_typed() const { return state_->typed; }

std::string Builder::note() const {
  if (!state_->timing_cache_refused) return "";
  return state_->options.timing_cache + " is not a timing cache of TensorRT " + version() +
         " on this GPU: it was neither used nor changed; give another file";
}

#if NV_TENSORRT_MAJOR < 11
// TensorRT swallows what a callback throws and stumbles over it: that is the reason, then come its
// own words.
std::string Builder::build_with(nvinfer1::IInt8Calibrator& calibrator, const CalibrationJob& job,
                                bool float32_alone, const Float32Layers& float32) {
  using nvinfer1::BuilderFlag;
  const auto config = state_->config();
  config->setFlag(BuilderFlag::kINT8);
  if (float32_alone) {
    config->clearFlag(BuilderFlag::kTF32);
  } else {
    set_float_type(*config, state_->options.float_type);
    if (state_->options.float_type == FloatType::kFp16)
      keep_in_float32(*config, *state_->network, float32);
    state_->use_dla(*config);
  }
  config->setInt8Calibrator(&calibrator);
  const nvinfer1::IOptimizationProfile* profile = state_->add_profile(*config, float32_alone);
  if (profile != nullptr) config->setCalibrationProfile(profile);
  try {
    std::string engine =
        float32_alone ? state_->serialize_engine(*config) : state_->build_engine(*config);
    job.rethrow();
    if (job.problem().empty()) return engine;
  } catch (const BackendError& error) {
    job.rethrow();
    const std::string message = job.has_started() ? job.problem() : "";
    throw BackendError(error.what() + (message.empty() ? "" : "; " + message));
  }
  throw CalibrationError(job.problem() + "; TensorRT said: " + state_->logger.last_error());
}
#endif

std::string Builder::build() {
  const auto config = state_->config();
#if NV_TENSORRT_MAJOR < 11
  if (!state_->typed) {
    if (has_qdq()) config->setFlag(nvinfer1::BuilderFlag::kINT8);
    set_float_type(*config, state_->options.float_type);
  }
#endif
  state_->use_dla(*config);
  state_->add_profile(*config, false);
  return state_->build_engine(*config);
}

std::string version() { return label_to_version(getInferLibVersion()); }

}  // namespace calib8::trt

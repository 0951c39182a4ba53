// The half of the fake that parses, calibrates and builds.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <set>

#include "../../src/wire.hpp"
#include "fake.hpp"
#include "stubs.hpp"

// The calibrators are deprecated from 10.1 on.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

using namespace nvinfer1;

namespace fake {
namespace {

bool plugins_loaded = false;

class Memory final : public IHostMemory, public stubs::VHostMemory {
 public:
  explicit Memory(std::string text) : text_(std::move(text)) { mImpl = this; }
  void* data() const noexcept override { return const_cast<char*>(text_.data()); }
  std::size_t size() const noexcept override { return text_.size(); }

 private:
  std::string text_;
};

class NetworkTensor final : public ITensor, public stubs::VTensor {
 public:
  explicit NetworkTensor(Tensor tensor) : tensor(std::move(tensor)) { mImpl = this; }
  char const* getName() const noexcept override { return tensor.name.c_str(); }
  Dims getDimensions() const noexcept override { return to_dims(tensor.dims); }
  DataType getType() const noexcept override { return data_type(tensor.type); }

  const Tensor tensor;
};

class Layer final : public ILayer, public stubs::VLayer {
 public:
  explicit Layer(LayerType type, std::string name = "") : type_(type), name_(std::move(name)) {
    mLayer = this;
  }
  LayerType getType() const noexcept override { return type_; }
  char const* getName() const noexcept override { return name_.c_str(); }
  std::int32_t getNbOutputs() const noexcept override {
    return static_cast<std::int32_t>(outputs.size());
  }
  ITensor* getOutput(std::int32_t index) const noexcept override {
    return outputs.at(static_cast<std::size_t>(index)).get();
  }
#if NV_TENSORRT_MAJOR < 11
  void setPrecision(DataType type) noexcept override { bind("computes ", type); }
  void setOutputType(std::int32_t index, DataType type) noexcept override {
    bind(("output " + std::to_string(index) + " ").c_str(), type);
  }
#endif

  std::vector<std::unique_ptr<NetworkTensor>> outputs;

 private:
  void bind(const char* what, DataType type) const {
    trace("layer " + name_ + " " + what + (type == DataType::kFLOAT ? "float32" : "another type"));
  }

  LayerType type_;
  std::string name_;
};

class Network final : public INetworkDefinition, public stubs::VNetworkDefinition {
 public:
  Network() { mImpl = this; }
  std::int32_t getNbInputs() const noexcept override {
    return static_cast<std::int32_t>(inputs.size());
  }
  ITensor* getInput(std::int32_t index) const noexcept override {
    return inputs.at(static_cast<std::size_t>(index)).get();
  }
  std::int32_t getNbLayers() const noexcept override {
    return static_cast<std::int32_t>(layers.size());
  }
  ILayer* getLayer(std::int32_t index) const noexcept override {
    return layers.at(static_cast<std::size_t>(index)).get();
  }

  std::vector<std::unique_ptr<NetworkTensor>> inputs;
  std::vector<Tensor> outputs;
  std::vector<std::unique_ptr<Layer>> layers;
};

class Profile final : public IOptimizationProfile, public stubs::VOptimizationProfile {
 public:
  Profile() { mImpl = this; }
#if NV_TENSORRT_MAJOR < 10
  bool setDimensions(char const* name, OptProfileSelector which, Dims dims) noexcept override {
#else
  bool setDimensions(char const* name, OptProfileSelector which,
                     Dims const& dims) noexcept override {
#endif
    if (is_open(from_dims(dims))) return false;
    if (which == OptProfileSelector::kMIN) least[name] = from_dims(dims);
    if (which == OptProfileSelector::kOPT) best[name] = from_dims(dims);
    if (which == OptProfileSelector::kMAX) most[name] = from_dims(dims);
    return true;
  }

  std::map<std::string, std::vector<int>> least;
  std::map<std::string, std::vector<int>> best;
  std::map<std::string, std::vector<int>> most;
};

// Timings are words; those of another GPU are refused.
class Timings final : public ITimingCache, public stubs::VTimingCache {
 public:
  explicit Timings(std::string words) : words(std::move(words)) { mImpl = this; }
  IHostMemory* serialize() const noexcept override { return new Memory("timings " + words); }

  std::string words;
};

class Config final : public IBuilderConfig, public stubs::VBuilderConfig {
 public:
  Config() { mImpl = this; }
  void setFlag(BuilderFlag flag) noexcept override { flags |= bit(flag); }
  void clearFlag(BuilderFlag flag) noexcept override { flags &= ~bit(flag); }
  void setMemoryPoolLimit(MemoryPoolType /*pool*/, std::size_t bytes) noexcept override {
    trace("workspace " + std::to_string(bytes));
  }
  ITimingCache* createTimingCache(void const* blob, std::size_t size) const noexcept override {
    return new Timings(std::string(static_cast<const char*>(blob), size));
  }
  bool setTimingCache(ITimingCache const& cache, bool /*ignore*/) noexcept override {
    timings = static_cast<const Timings*>(&cache);
    const bool known = timings->words.empty() || timings->words.rfind("timings", 0) == 0;
    trace("timings " + (known ? "'" + timings->words + "'" : "refused"));
    return known;
  }
  ITimingCache const* getTimingCache() const noexcept override { return timings; }
  void setDefaultDeviceType(DeviceType type) noexcept override {
    trace(std::string("default device ") + (type == DeviceType::kDLA ? "DLA" : "GPU"));
  }
  void setDLACore(std::int32_t core) noexcept override {
    trace("DLA core " + std::to_string(core));
  }
  std::int32_t addOptimizationProfile(IOptimizationProfile const* given) noexcept override {
    profile = static_cast<const Profile*>(given);
    return 0;
  }
#if NV_TENSORRT_MAJOR < 11
  void setInt8Calibrator(IInt8Calibrator* given) noexcept override { calibrator = given; }
  bool setCalibrationProfile(IOptimizationProfile const* given) noexcept override {
    calibration_profile = static_cast<const Profile*>(given);
    return true;
  }
  IInt8Calibrator* calibrator = nullptr;
  const Profile* calibration_profile = nullptr;
#endif

  static std::uint32_t bit(BuilderFlag flag) { return 1U << static_cast<std::uint32_t>(flag); }
  bool has(BuilderFlag flag) const { return (flags & bit(flag)) != 0; }

  std::uint32_t flags = bit(BuilderFlag::kTF32);  // TensorRT's default
  const Profile* profile = nullptr;
  const Timings* timings = nullptr;
};

std::string flags_of(const Config& config) {
  std::string words;
#if NV_TENSORRT_MAJOR < 11
  if (config.has(BuilderFlag::kINT8)) words += " int8";
  if (config.has(BuilderFlag::kFP16)) words += " fp16";
  if (config.has(BuilderFlag::kOBEY_PRECISION_CONSTRAINTS)) words += " obey";
#if NV_TENSORRT_MAJOR >= 10
  if (config.has(BuilderFlag::kBF16)) words += " bf16";
#endif
#endif
  if (config.has(BuilderFlag::kGPU_FALLBACK)) words += " gpu-fallback";
  return words + (config.has(BuilderFlag::kTF32) ? " tf32" : "");
}

std::string library_version() {
  const std::string asked_for = setting("CALIB8_FAKE_LIBRARY");
  if (!asked_for.empty()) return asked_for;
  return std::to_string(NV_TENSORRT_MAJOR) + "." + std::to_string(NV_TENSORRT_MINOR) + "." +
         std::to_string(NV_TENSORRT_PATCH);
}

// 8.6.1 -> 8601, 10.16.0 -> 101600: NV_TENSORRT_VERSION, and the label of a cache.
std::int32_t library_number() {
  std::int32_t major = 0;
  std::int32_t minor = 0;
  std::int32_t patch = 0;
  std::sscanf(library_version().c_str(), "%d.%d.%d", &major, &minor, &patch);
  return major * (major < 10 ? 1000 : 10000) + minor * 100 + patch;
}

#if NV_TENSORRT_MAJOR < 11

// What a build does with a calibrator: asks for its cache, and for batches where that is not of
// this version and search.
class Calibration {
 public:
  Calibration(Network& network, Config& config, ILogger& log)
      : network_(network), config_(config), log_(log), calibrator_(*config.calibrator) {}

  // Whether there are scales, by the cache or by the batches.
  bool run() {
    trace("batch size " + std::to_string(calibrator_.getBatchSize()));
    return takes_cache() || calibrates();
  }

 private:
  std::string header() const {
    const char* words[] = {"Legacy", "Entropy", "Entropy", "MinMax"};
    const auto algorithm = static_cast<std::size_t>(calibrator_.getAlgorithm());
    return "TRT-" + std::to_string(library_number()) + "-" + words[algorithm] + "Calibration" +
           (algorithm == 2 ? "2" : "");
  }

  bool takes_cache() {
    std::size_t length = 12345;  // TensorRT does not promise a zero here
    const void* cache = calibrator_.readCalibrationCache(length);
    if (cache == nullptr) return false;
    const std::string text(static_cast<const char*>(cache), length);
    const bool fits = text.substr(0, text.find('\n')) == header() && !asked("refuse-cache");
    trace(std::string("cache ") + (fits ? "taken" : "refused"));
    return fits;
  }

  bool calibrates() {
    trace("calibrate " + header() + flags_of(config_));
    std::vector<const char*> names;
    for (const auto& input : network_.inputs) names.push_back(input->tensor.name.c_str());
    std::vector<void*> addresses(names.size(), nullptr);
    std::vector<float> largest(names.size(), 0);
    int batches = 0;
    while (!(asked("stop-early") && batches == 1) &&
           calibrator_.getBatch(addresses.data(), names.data(),
                                static_cast<std::int32_t>(names.size()))) {
      for (std::size_t k = 0; k < names.size(); ++k) {
        largest[k] = std::max(largest[k], read_batch(k, addresses[k]));
      }
      trace("batch " + std::to_string(++batches));
    }
    if (batches == 0) {
      log_.log(ILogger::Severity::kERROR,
               "Calibration failure occurred with no scaling factors detected.");
      return false;
    }
    if (!asked("no-cache")) write_cache(largest);
    return true;
  }

  // The largest magnitude of a batch. TensorRT reads float32, whatever the network's own float is, and
  // whole numbers as they are.
  float read_batch(std::size_t index, const void* memory) const {
    const Tensor& tensor = network_.inputs[index]->tensor;
    const bool open = is_open(tensor.dims) && config_.calibration_profile != nullptr;
    const std::size_t count =
        volume(open ? config_.calibration_profile->best.at(tensor.name) : tensor.dims);
    const bool floats = tensor.type.find("float") != std::string::npos;
    const std::size_t width = floats ? sizeof(float) : type_bytes(tensor.type);
    const std::string bytes(static_cast<const char*>(memory), count * width);
    add_to("CALIB8_FAKE_BATCHES", bytes.data(), bytes.size());
    if (!floats) return 1;
    std::vector<float> values(count);
    std::memcpy(values.data(), bytes.data(), bytes.size());
    float largest = 0;
    for (const float value : values) largest = std::max(largest, std::fabs(value));
    return largest;
  }

  // The text is gone after the call, as TensorRT's is.
  void write_cache(const std::vector<float>& largest) {
    std::string text = header() + "\n";
    for (std::size_t k = 0; k < largest.size(); ++k) {
      const float scale = largest[k] / 127;
      std::uint32_t bits = 0;
      std::memcpy(&bits, &scale, sizeof(bits));
      char number[16];
      std::snprintf(number, sizeof(number), "%x", bits);
      text += network_.inputs[k]->tensor.name + ": " + number + "\n";
    }
    const auto memory = std::make_unique<char[]>(text.size());
    std::copy(text.begin(), text.end(), memory.get());
    calibrator_.writeCalibrationCache(memory.get(), text.size());
    std::fill_n(memory.get(), text.size(), 'x');
  }

  Network& network_;
  Config& config_;
  ILogger& log_;
  IInt8Calibrator& calibrator_;
};

#endif

class Builder final : public IBuilder, public stubs::VBuilder {
 public:
  explicit Builder(ILogger& log) : log_(log) { mImpl = this; }

  INetworkDefinition* createNetworkV2(NetworkDefinitionCreationFlags flags) noexcept override {
    trace("network flags " + std::to_string(flags));
    return new Network;
  }
  IBuilderConfig* createBuilderConfig() noexcept override { return new Config; }
  std::int32_t getNbDLACores() const noexcept override { return 2; }
  IOptimizationProfile* createOptimizationProfile() noexcept override {
    profiles_.push_back(std::make_unique<Profile>());
    return profiles_.back().get();
  }

  IHostMemory* buildSerializedNetwork(INetworkDefinition& given,
                                      IBuilderConfig& given_config) noexcept override {
    auto& network = static_cast<Network&>(given);
    auto& config = static_cast<Config&>(given_config);
    trace("build" + flags_of(config));
    if (asked("fail-before")) return fail("Error Code 4: Network has an unsupported layer.");
    std::string plan = "fake engine\n";
    for (const auto& input : network.inputs) {
      Tensor tensor = input->tensor;
      if (is_open(tensor.dims)) {
        if (config.profile == nullptr) return fail("no optimization profile has been defined.");
        const std::vector<int>& best = config.profile->best.at(tensor.name);
        const std::vector<int>& least = config.profile->least.at(tensor.name);
        const std::vector<int>& most = config.profile->most.at(tensor.name);
        const bool one = least == best && most == best;
        trace("profile " + tensor.name + " " + (one ? "" : shown(least) + " ") + shown(best) +
              (one ? "" : " " + shown(most)));
        plan += "best " + tensor.name + " " + tensor.type;
        for (const int dim : best) plan += " " + std::to_string(dim);
        plan += "\n";
      }
      plan += to_line(tensor);
    }
    for (const Tensor& output : network.outputs) plan += to_line(output);
#if NV_TENSORRT_MAJOR < 11
    if (config.calibrator != nullptr && config.has(BuilderFlag::kINT8)) {
      if (!Calibration(network, config, log_).run()) return nullptr;
      if (asked("fail-after-calibrating")) return fail("Error Code 10: no implementation found.");
    }
    const bool tuned = config.has(BuilderFlag::kTF32);
#else
    const bool tuned = true;
#endif
    if (tuned && asked("fail-engine")) return fail("Error Code 2: out of GPU memory.");
    return new Memory(plan);
  }

 private:
  IHostMemory* fail(const char* words) {
    log_.log(ILogger::Severity::kERROR, words);
    return nullptr;
  }

  ILogger& log_;
  std::vector<std::unique_ptr<Profile>> profiles_;
};

// What a real ONNX model's inputs, outputs and nodes are in words; an output's open dimension is 1.
std::string value_line(const std::string& role, std::string_view value) {
  using namespace calib8;
  const auto fields = wire::fields(value);
  const auto type = wire::fields(wire::text(wire::fields(wire::text(fields, 2)), 1));
  const char* words[] = {"?",     "float32", "uint8", "int8", "uint16", "int16",
                         "int32", "int64",   "str",   "bool", "float16"};
#if NV_TENSORRT_MAJOR < 10
  words[7] = "int32";  // as its parser has it
#endif
  std::string line =
      role + " " + std::string(wire::text(fields, 1)) + " " + words[wire::number(type, 1)];
  for (const std::string_view dim : wire::all(wire::fields(wire::text(type, 2)), 1)) {
    const auto held = wire::fields(dim);
    line += " " + (wire::has(held, 1) ? std::to_string(wire::number(held, 1))
                   : role == "input"  ? "-1"
                                      : "1");
  }
  return line + "\n";
}

std::string words_of(const std::string& model) {
  using namespace calib8;
  const auto graph = wire::fields(wire::text(wire::fields(model), 7));
  std::set<std::string_view> weights;
  for (const auto tensor : wire::all(graph, 5)) weights.insert(wire::text(wire::fields(tensor), 8));
  std::string words;
  for (const auto node : wire::all(graph, 1)) {
    const auto fields = wire::fields(node);
    if (wire::text(fields, 4) == "QuantizeLinear") words += "quantize\n";
    words += "layer\t" + std::string(wire::text(fields, 3));
    for (const auto output : wire::all(fields, 2)) words += "\t" + std::string(output);
    words += "\n";
  }
  for (const auto value : wire::all(graph, 11)) {
    if (weights.count(wire::text(wire::fields(value), 1)) == 0) words += value_line("input", value);
  }
  for (const auto value : wire::all(graph, 12)) words += value_line("output", value);
  return words;
}

class ParserError final : public parser_stubs::ParserError {
 public:
  char const* desc() const noexcept override { return words.c_str(); }
  std::string words;
};

class Parser final : public parser_stubs::Parser {
 public:
  Parser(Network& network, ILogger& log) : network_(network), log_(log) {}

  bool parseFromFile(const char* path, int /*verbosity*/) noexcept override {
    std::ifstream file(path, std::ios::binary);
    const std::string model{std::istreambuf_iterator<char>(file), {}};
    std::istringstream lines(!model.empty() && model[0] == '\x08' ? words_of(model) : model);
    for (std::string line; std::getline(lines, line);) {
      if (!take(line)) return false;
    }
    error_.words = network_.inputs.empty() ? "Failed to parse the ONNX model" : "";
    return error_.words.empty();
  }
  int getNbErrors() const noexcept override { return error_.words.empty() ? 0 : 1; }
  nvonnxparser::IParserError const* getError(int /*index*/) const noexcept override {
    return &error_;
  }

 private:
  bool take(const std::string& line) {
    if (line == "plugin" && !plugins_loaded) {
      error_.words = "Plugin not found, are the plugin name, version, and namespace correct?";
      log_.log(ILogger::Severity::kERROR, error_.words.c_str());
      return false;
    }
    if (line == "quantize") {
      network_.layers.push_back(std::make_unique<Layer>(LayerType::kQUANTIZE));
    } else if (line.rfind("layer\t", 0) == 0) {
      take_layer(line);
    } else if (is_tensor(line)) {
      Tensor tensor = from_line(line);
      if (tensor.is_input()) {
        network_.inputs.push_back(std::make_unique<NetworkTensor>(std::move(tensor)));
      } else {
        network_.outputs.push_back(std::move(tensor));
      }
    }
    return true;
  }

  void take_layer(const std::string& line) {
    std::istringstream words(line.substr(line.find('\t') + 1));
    std::string word;
    std::getline(words, word, '\t');
    auto layer = std::make_unique<Layer>(LayerType::kIDENTITY, word);
    while (std::getline(words, word, '\t')) {
      layer->outputs.push_back(
          std::make_unique<NetworkTensor>(Tensor{"output", word, "float32", {}}));
    }
    network_.layers.push_back(std::move(layer));
  }

  Network& network_;
  ILogger& log_;
  ParserError error_;
};

}  // namespace
}  // namespace fake

extern "C" {

__attribute__((visibility("default"))) void* createInferBuilder_INTERNAL(
    void* logger, std::int32_t version) noexcept {
  auto& log = *static_cast<ILogger*>(logger);
  if (version / 1000 != fake::library_number() / 1000 && NV_TENSORRT_MAJOR < 10) {
    log.log(ILogger::Severity::kERROR, "Major version of the library and the headers differ.");
    return nullptr;
  }
  if (fake::asked("no-gpu")) {
    log.log(ILogger::Severity::kERROR, "CUDA initialization failure with error: 35.");
    return nullptr;
  }
  return static_cast<IBuilder*>(new fake::Builder(log));
}

__attribute__((visibility("default"))) std::int32_t getInferLibVersion() noexcept {
  return fake::library_number();
}

__attribute__((visibility("default"))) void* createNvOnnxParser_INTERNAL(
    void* network, void* logger, int /*version*/) PARSER_NOEXCEPT {
  auto& parsed = static_cast<fake::Network&>(*static_cast<INetworkDefinition*>(network));
  return static_cast<nvonnxparser::IParser*>(
      new fake::Parser(parsed, *static_cast<ILogger*>(logger)));
}

__attribute__((visibility("default"))) bool initLibNvInferPlugins(void* /*logger*/,
                                                                  char const* /*scope*/) {
  fake::trace("plugins");
  fake::plugins_loaded = !fake::asked("no-plugins");
  return fake::plugins_loaded;
}
}

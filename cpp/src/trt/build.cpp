#include "calib8/trt/build.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <system_error>

#include "calib8/cache.hpp"
#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/files.hpp"
#include "calib8/fingerprint.hpp"
#include "calib8/model_identity.hpp"
#include "calib8/text.hpp"
#include "engine_file.hpp"

namespace calib8::trt {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::pair<std::string_view, std::string_view> kCalibrators[] = {
    {"entropy2", kEntropy2}, {"entropy", kEntropy}, {"minmax", kMinMax}, {"legacy", kLegacy}};

#if NV_TENSORRT_MAJOR < 11

// The cache to build from, or the reason why none is used.
struct CacheDecision {
  std::optional<std::string> text;
  std::string method;
  std::string reason;
  std::vector<std::string> notes;
  Float32Layers float32 = {};
};

int major_of(int label) { return std::stoi(label_to_version(label)); }

// Accepts the cache if its first line fits. TensorRT itself ignores a cache of another version or
// calibrator without a message. A cache of another release of the same major version is used, with a
// note, since the parsers of both name the tensors alike.
CacheDecision check_label(const fs::path& path, std::string text, const std::string& calibrator,
                          bool is_trusted) {
  const CalibrationCache cache = parse_cache(text, path.string());
  const Header& header = cache.header;
  CacheDecision decision{std::nullopt, header.algorithm, "", {}};
  const auto is_algorithm_of = [&header](const auto& one) {
    return one.second == header.algorithm;
  };
  if (std::none_of(std::begin(kCalibrators), std::end(kCalibrators), is_algorithm_of) ||
      (!calibrator.empty() && calibrator != header.algorithm)) {
    decision.reason = path.string() + " begins with " + header.text + ", not with a calibrator " +
                      (calibrator.empty() ? "of TensorRT's" : calibrator);
    return decision;
  }
  const int current_label = version_label(version());
  if (header.label && *header.label != current_label) {
    if (!is_trusted && major_of(*header.label) != major_of(current_label)) {
      decision.reason = path.string() + " is for TensorRT " + label_to_version(*header.label) +
                        ", whose names of tensors are not those of " + version();
      return decision;
    }
    decision.notes.push_back(path.string() + " is labelled for TensorRT " +
                             label_to_version(*header.label) + " and is used by " + version());
    text = relabel(cache, version()).dump();
  }
  decision.text = std::move(text);
  return decision;
}

CacheDecision decide_trusted(const fs::path& path, const std::vector<TensorSpec>& inputs,
                             const std::string& calibrator) {
  CacheDecision decision = check_label(path, files::read(path), calibrator, true);
  if (!decision.text)
    throw CacheError(decision.reason + "; name its own calibrator, or none (--calibrator)");
  const CalibrationCache cache = parse_cache(*decision.text, path.string());
  const auto has_scale = [&cache](const TensorSpec& input) {
    return std::any_of(cache.entries.begin(), cache.entries.end(),
                       [&input](const Entry& entry) { return entry.name == input.name; });
  };
  if (std::none_of(inputs.begin(), inputs.end(), has_scale)) {
    throw CacheError("a trusted cache must know the model's tensors, " + path.string() +
                     " has no scale for its input " + text::repr(inputs.front().name) +
                     "; it is another model's");
  }
  decision.reason = path.string() + " is trusted as it is";
  try {
    decision.float32 = read_stored_cache(path).float32_layers;
  } catch (const CacheError&) {
    // No note belongs to this cache, so it lists no layers.
  }
  return decision;
}

CacheDecision decide_by_fingerprint(const fs::path& path, const Fingerprint& now,
                                    const std::string& calibrator) {
  try {
    StoredCache stored = read_stored_cache(path);
    CacheDecision decision;
    decision.reason = describe_mismatch(stored, now);
    if (!decision.reason.empty()) return decision;
    const std::string maker = stored.fingerprint.maker();
    decision = check_label(path, std::move(stored.text), calibrator, false);
    decision.float32 = std::move(stored.float32_layers);
    if (decision.text) {
      const bool has_images = now.images != Fingerprint().images;
      decision.reason = "the cache fits the " +
                        std::string(has_images ? "model and the images" : "model") +
                        "; it was made by " + maker;
    }
    return decision;
  } catch (const CacheError& error) {
    return {std::nullopt, "", error.what(), {}};
  }
}

template <class Calibrator>
std::string run_calibrator(Builder& builder, const CalibratorOptions& options,
                           const Float32Layers& float32) {
  Calibrator calibrator(options);
  return options.cache ? builder.build(calibrator, float32) : builder.calibrate(calibrator);
}

// Returns the engine if the options hold a cache; else calibrates and returns the new cache.
std::string calibrate_or_build(const std::string& method, Builder& builder,
                               const CalibratorOptions& options,
                               const Float32Layers& float32 = {}) {
  if (method == kEntropy) return run_calibrator<Int8EntropyCalibrator>(builder, options, float32);
  if (method == kMinMax) return run_calibrator<Int8MinMaxCalibrator>(builder, options, float32);
  if (method == kLegacy) return run_calibrator<Int8LegacyCalibrator>(builder, options, float32);
  return run_calibrator<Int8EntropyCalibrator2>(builder, options, float32);
}

// "2 nodes run in float32, since their values overflow float16: a, b"
std::string float32_note(const Float32Layers& float32) {
  std::string name_list;
  std::size_t count = 0;
  for (const auto& [node, tensor] : float32) {
    if (++count <= 5) name_list += (name_list.empty() ? "" : ", ") + node;
  }
  if (count > 5) name_list += " and " + std::to_string(count - 5) + " more";
  return std::to_string(float32.size()) +
         (float32.size() == 1 ? " node runs in float32, since its"
                              : " nodes run in float32, since their") +
         " values overflow float16: " + name_list;
}

#endif

class BuildJob {
 public:
  BuildJob(const fs::path& model, const fs::path& images, const fs::path& cache,
           const CalibrateAndBuildOptions& options, Logger& logger)
      : model_(model),
        images_(images),
        cache_(cache),
        options_(options),
        builder_(model, logger, options.build) {
    result_.inputs = builder_.inputs();
  }

  BuildResult run() {
    if (builder_.has_qdq()) {
#if NV_TENSORRT_MAJOR < 11
      if (builder_.is_strongly_typed()) {
        result_.notes.push_back(
            "the network is strongly typed: each layer runs in the type that the model gives it,"
            " and BuildOptions::float_type (--rest) has no effect");
      }
#endif
      result_.engine = find_or_build_engine({}, [this] { return builder_.build(); });
    } else {
      build_with_cache();
    }
    return std::move(result_);
  }

 private:
  const ModelIdentity& model_identity() {
    if (identity_.file.empty()) identity_ = identity_of(model_);
    return identity_;
  }

  // Everything that the engine depends on, as JSON.
  std::string engine_source(const std::string& cache, const Float32Layers& float32) {
    const ModelIdentity& identity = model_identity();
    const auto digest = [](const std::string& text) {
      return text.empty() ? std::string() : Sha256().update(text).hex();
    };
    Json json{{"tensorrt", version()},         {"gpu", gpu_name()},
              {"model_sha256", identity.file}, {"weights_sha256", identity.weights},
              {"cache_sha256", digest(cache)}, {"settings", Json::parse(builder_.settings())}};
    if (!float32.empty()) json["float32_layers"] = float32;
    return json.dump();
  }

  template <class Build>
  std::string build_and_note(Build build) {
    std::string engine = build();
    if (!builder_.note().empty()) result_.notes.push_back(builder_.note());
    return engine;
  }

  template <class Build>
  std::string find_or_build_engine(const std::string& cache, Build build,
                                   const Float32Layers& float32 = {}) {
    if (options_.engine.empty()) return build_and_note(build);
    const std::string source = engine_source(cache, float32);
    if (!options_.rebuild) {
      if (auto stored_engine = load_matching_engine(options_.engine, source)) {
        result_.engine_reused = true;
        result_.notes.push_back(
            "the engine was built before from the same model, cache and settings,"
            " on the same GPU");
        return *stored_engine;
      }
    }
    std::string engine = build_and_note(build);
    save_engine(options_.engine, engine, source);
    return engine;
  }

#if NV_TENSORRT_MAJOR < 11

  void build_with_cache() {
    algorithm_ = options_.calibrator.empty() ? "" : calibrator_algorithm(options_.calibrator);
    Fingerprint now = make_fingerprint();
    std::error_code error;
    if (!options_.trust_cache && fs::exists(cache_, error)) add_images(now);
    CacheDecision decision = options_.trust_cache
                                 ? decide_trusted(cache_, result_.inputs, algorithm_)
                                 : decide_by_fingerprint(cache_, now, algorithm_);
    result_.reason = decision.reason;
    result_.reused = decision.text.has_value();
    if (!decision.text) refuse_mismatch(decision.reason);
    result_.method = decision.text ? decision.method : now.method;
    const std::string text = decision.text ? *decision.text : calibrate(now);
    result_.notes.insert(result_.notes.end(), decision.notes.begin(), decision.notes.end());
    Float32Layers float32;
    if (decision.text && options_.build.float_type == FloatType::kFp16) float32 = decision.float32;
    if (!float32.empty()) result_.notes.push_back(float32_note(float32));
    const auto build = [&] {
      CalibratorOptions options = calibrator_options();
      options.cache = text;
      const Header header = parse_cache(text, cache_.string()).header;
      options.quantile = header.quantile.value_or(options.quantile);
      options.regression_cutoff = header.cutoff.value_or(options.regression_cutoff);
      return calibrate_or_build(*result_.method, builder_, options, float32);
    };
    result_.engine = find_or_build_engine(text, build, float32);
    if (result_.feed) {
      for (const std::string& note : result_.feed->notes()) result_.notes.push_back(note);
    }
  }

  CalibratorOptions calibrator_options() const {
    CalibratorOptions options;
    options.feed = result_.feed;
    for (const TensorSpec& input : result_.inputs) options.dtypes[input.name] = input.dtype;
    return options;
  }

  // The fingerprint of a calibration with these options, without the images: those are read only if
  // there is a cache to compare them with.
  Fingerprint make_fingerprint() {
    Fingerprint now;
    now.model = model_identity();
    now.method = algorithm_.empty() ? std::string(kEntropy2) : algorithm_;
    now.versions = Json{{"tensorrt", version()}, {"calib8", CALIB8_VERSION}}.dump();
    if (images_.empty() && !options_.samples) return now;
    if (options_.samples && !images_.empty()) {
      throw ConfigError(
          "a calibration has images or a function that gives samples, got both with " +
          images_.string() + "; give one");
    }
    const Feed feed = options_.samples ? Feed(options_.samples, sample_specs(), options_.feed)
                                       : Feed(images_, sample_specs(), options_.feed);
    result_.feed = std::make_shared<Feed>(feed.whole_batches());
    now.rule = "whole batches of " + std::to_string(result_.feed->batch());
    return now;
  }

  // The inputs with the types of the samples: float32 for images, whatever float the network has; for
  // arrays the types of the model, which TensorRT may have narrowed.
  std::vector<TensorSpec> sample_specs() const {
    std::vector<TensorSpec> specs = result_.inputs;
    const bool has_arrays = options_.samples || holds_arrays(images_);
    const std::map<std::string, std::string> model_types =
        has_arrays ? input_types(model_) : std::map<std::string, std::string>();
    for (TensorSpec& spec : specs) {
      const auto entry = model_types.find(spec.name);
      const bool is_narrowed = entry != model_types.end() && entry->second == "int64";
      if (has_arrays && is_narrowed && spec.dtype == "int32") spec.dtype = "int64";
      if (!has_arrays && (spec.dtype == "float16" || spec.dtype == "bfloat16"))
        spec.dtype = "float32";
    }
    return specs;
  }

  void add_images(Fingerprint& now) const {
    if (result_.feed) set_feed(now, result_.feed->manifest());
  }

  void refuse_mismatch(const std::string& reason) const {
    if (options_.require_cache) {
      throw CacheError("the cache must fit (require_cache, --require-cache), but " + reason +
                       "; leave that option out to calibrate again");
    }
    if (!result_.feed) {
      throw CacheError(
          "a model without Q/DQ nodes is calibrated with images, got none, and no cache"
          " in their place: " +
          reason +
          "; give a folder of images, a list file, or a"
          " cache that fits (--cache)");
    }
  }

  std::string calibrate(const Fingerprint& now) {
    CalibratorOptions options = calibrator_options();
    // Stored at once: building the engine afterwards may take hours, and may fail.
    options.store_cache = [&](const std::string& text) {
      Fingerprint complete = now;
      add_images(complete);  // the calibration has read all of them
      save_calibration(cache_, text, complete);
    };
    return calibrate_or_build(now.method, builder_, options);
  }

  std::string algorithm_;

#else

  [[noreturn]] void build_with_cache() const {
    throw ConfigError("TensorRT " + version() +
                      " has no calibrators and takes int8 from Q/DQ nodes, " + model_.string() +
                      " has none; make them with Python's calib8 build --target"
                      " tensorrt");
  }

#endif

  fs::path model_;
  fs::path images_;
  fs::path cache_;
  CalibrateAndBuildOptions options_;
  Builder builder_;
  ModelIdentity identity_;
  BuildResult result_;
};

}  // namespace

std::string calibrator_algorithm(const std::string& name) {
  for (const auto& [short_name, algorithm] : kCalibrators) {
    if (name == short_name || name == algorithm) return std::string(algorithm);
  }
  throw ConfigError(
      "the calibrator (--calibrator) must be one of entropy2, entropy, minmax, legacy, or the name"
      " in a cache's first line, such as EntropyCalibration2, got " +
      text::repr(name));
}

BuildResult calibrate_and_build(const fs::path& model, const fs::path& images,
                                const fs::path& cache, const CalibrateAndBuildOptions& options,
                                Logger& logger) {
  return BuildJob(model, images, cache, options, logger).run();
}

}  // namespace calib8::trt

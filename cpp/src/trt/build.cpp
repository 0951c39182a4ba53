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

// A cache that is to be built from, or why there is none.
struct Verdict {
  std::optional<std::string> text;
  std::string method;
  std::string reason;
  std::vector<std::string> notes;
  Float32Layers float32 = {};
};

int major_of(int label) { return std::stoi(label_to_version(label)); }

// TensorRT ignores a cache of another version or calibrator without a word. Its ranges are another
// release's of the same major version too, whose parser names tensors alike: that is only told.
Verdict labelled(const fs::path& path, std::string text, const std::string& calibrator,
                 bool trusted) {
  const CalibrationCache cache = parse_cache(text, path.string());
  const Header& header = cache.header;
  Verdict verdict{std::nullopt, header.algorithm, "", {}};
  const auto known = [&header](const auto& one) { return one.second == header.algorithm; };
  if (std::none_of(std::begin(kCalibrators), std::end(kCalibrators), known) ||
      (!calibrator.empty() && calibrator != header.algorithm)) {
    verdict.reason = path.string() + " begins with " + header.text + ", not with a calibrator " +
                     (calibrator.empty() ? "of TensorRT's" : calibrator);
    return verdict;
  }
  const int here = version_label(version());
  if (header.label && *header.label != here) {
    if (!trusted && major_of(*header.label) != major_of(here)) {
      verdict.reason = path.string() + " is for TensorRT " + label_to_version(*header.label) +
                       ", whose names of tensors are not those of " + version();
      return verdict;
    }
    verdict.notes.push_back(path.string() + " is labelled for TensorRT " +
                            label_to_version(*header.label) + " and is used by " + version());
    text = relabel(cache, version()).dump();
  }
  verdict.text = std::move(text);
  return verdict;
}

Verdict trusted(const fs::path& path, const std::vector<TensorSpec>& inputs,
                const std::string& calibrator) {
  Verdict verdict = labelled(path, files::read(path), calibrator, true);
  if (!verdict.text)
    throw CacheError(verdict.reason + "; name its own, or leave --calibrator out");
  const CalibrationCache cache = parse_cache(*verdict.text, path.string());
  const auto named = [&cache](const TensorSpec& input) {
    return std::any_of(cache.entries.begin(), cache.entries.end(),
                       [&input](const Entry& entry) { return entry.name == input.name; });
  };
  if (std::none_of(inputs.begin(), inputs.end(), named)) {
    throw CacheError("a trusted cache must know the model's tensors, " + path.string() +
                     " has no scale for its input " + text::repr(inputs.front().name) +
                     "; it is another model's");
  }
  verdict.reason = path.string() + " is trusted as it is";
  try {
    verdict.float32 = read_kept(path).float32_layers;
  } catch (const CacheError&) {  // nothing, or nothing of this cache, stands beside it
  }
  return verdict;
}

Verdict judged(const fs::path& path, const Fingerprint& now, const std::string& calibrator) {
  try {
    Kept kept = read_kept(path);
    Verdict verdict;
    verdict.reason = unfit(kept, now);
    if (!verdict.reason.empty()) return verdict;
    const std::string by = kept.fingerprint.by();
    verdict = labelled(path, std::move(kept.text), calibrator, false);
    verdict.float32 = std::move(kept.float32_layers);
    if (verdict.text) {
      const bool seen = now.images != Fingerprint().images;
      verdict.reason = "the cache fits the " +
                       std::string(seen ? "model and the images" : "model") + "; it was made by " +
                       by;
    }
    return verdict;
  } catch (const CacheError& error) {
    return {std::nullopt, "", error.what(), {}};
  }
}

template <class Calibrator>
std::string calibrated(Builder& builder, const CalibratorOptions& options,
                       const Float32Layers& float32) {
  Calibrator calibrator(options);
  return options.cache ? builder.build(calibrator, float32) : builder.calibrate(calibrator);
}

// The cache, where the options know none, else the engine that is built by it.
std::string by_method(const std::string& method, Builder& builder, const CalibratorOptions& options,
                      const Float32Layers& float32 = {}) {
  if (method == kEntropy) return calibrated<Int8EntropyCalibrator>(builder, options, float32);
  if (method == kMinMax) return calibrated<Int8MinMaxCalibrator>(builder, options, float32);
  if (method == kLegacy) return calibrated<Int8LegacyCalibrator>(builder, options, float32);
  return calibrated<Int8EntropyCalibrator2>(builder, options, float32);
}

// "2 nodes run in float32, since their values overflow float16: a, b"
std::string note_of(const Float32Layers& float32) {
  std::string names;
  std::size_t count = 0;
  for (const auto& [node, tensor] : float32) {
    if (++count <= 5) names += (names.empty() ? "" : ", ") + node;
  }
  if (count > 5) names += " and " + std::to_string(count - 5) + " more";
  return std::to_string(float32.size()) +
         (float32.size() == 1 ? " node runs in float32, since its"
                              : " nodes run in float32, since their") +
         " values overflow float16: " + names;
}

#endif

class Line {
 public:
  Line(const fs::path& model, const fs::path& images, const fs::path& cache,
       const CalibrateAndBuildOptions& options, Logger& logger)
      : model_(model),
        images_(images),
        cache_(cache),
        options_(options),
        builder_(model, logger, options.build) {
    built_.inputs = builder_.inputs();
  }

  Built run() {
    if (builder_.has_qdq()) {
#if NV_TENSORRT_MAJOR < 11
      if (builder_.typed()) {
        built_.notes.push_back(
            "the network is strongly typed: each layer runs in the type that the model gives it,"
            " and --rest has no effect");
      }
#endif
      built_.engine = engine({}, [this] { return builder_.build(); });
    } else {
      implicit();
    }
    return std::move(built_);
  }

 private:
  const ModelIdentity& identity() {
    if (identity_.file.empty()) identity_ = identity_of(model_);
    return identity_;
  }

  // All that an engine depends on.
  std::string made_from(const std::string& cache, const Float32Layers& float32) {
    const ModelIdentity& known = identity();
    const auto digest = [](const std::string& text) {
      return text.empty() ? std::string() : Sha256().update(text).hex();
    };
    Json from{{"tensorrt", version()},         {"gpu", gpu_name()},
              {"model_sha256", known.file},    {"weights_sha256", known.weights},
              {"cache_sha256", digest(cache)}, {"settings", Json::parse(builder_.settings())}};
    if (!float32.empty()) from["float32_layers"] = float32;
    return from.dump();
  }

  template <class Build>
  std::string noted(Build build) {
    std::string fresh = build();
    if (!builder_.note().empty()) built_.notes.push_back(builder_.note());
    return fresh;
  }

  template <class Build>
  std::string engine(const std::string& cache, Build build, const Float32Layers& float32 = {}) {
    if (options_.engine.empty()) return noted(build);
    const std::string from = made_from(cache, float32);
    if (!options_.rebuild) {
      if (auto known = fitting_engine(options_.engine, from)) {
        built_.engine_reused = true;
        built_.notes.push_back(
            "the engine was built before from the same model, cache and settings,"
            " on the same GPU");
        return *known;
      }
    }
    std::string fresh = noted(build);
    keep_engine(options_.engine, fresh, from);
    return fresh;
  }

#if NV_TENSORRT_MAJOR < 11

  void implicit() {
    asked_ = options_.calibrator.empty() ? "" : calibrator_named(options_.calibrator);
    Fingerprint now = fingerprint();
    std::error_code failed;
    if (!options_.trust_cache && fs::exists(cache_, failed)) set_images(now);
    Verdict verdict =
        options_.trust_cache ? trusted(cache_, built_.inputs, asked_) : judged(cache_, now, asked_);
    built_.reason = verdict.reason;
    built_.reused = verdict.text.has_value();
    if (!verdict.text) refuse_unfit(verdict.reason);
    built_.method = verdict.text ? verdict.method : now.method;
    const std::string text = verdict.text ? *verdict.text : fresh(now);
    built_.notes.insert(built_.notes.end(), verdict.notes.begin(), verdict.notes.end());
    Float32Layers float32;
    if (verdict.text && options_.build.rest == Rest::kFp16) float32 = verdict.float32;
    if (!float32.empty()) built_.notes.push_back(note_of(float32));
    const auto build = [&] {
      CalibratorOptions known = calibrating();
      known.cache = text;
      const Header header = parse_cache(text, cache_.string()).header;
      known.quantile = header.quantile.value_or(known.quantile);
      known.regression_cutoff = header.cutoff.value_or(known.regression_cutoff);
      return by_method(*built_.method, builder_, known, float32);
    };
    built_.engine = engine(text, build, float32);
    if (built_.feed) {
      for (const std::string& note : built_.feed->notes()) built_.notes.push_back(note);
    }
  }

  CalibratorOptions calibrating() const {
    CalibratorOptions options;
    options.feed = built_.feed;
    for (const TensorSpec& input : built_.inputs) options.dtypes[input.name] = input.dtype;
    return options;
  }

  // What a calibration would be made from here, by the calibrator that was asked for; but for the
  // images, which are read once where there is nothing to compare them with.
  Fingerprint fingerprint() {
    Fingerprint now;
    now.model = identity();
    now.method = asked_.empty() ? std::string(kEntropy2) : asked_;
    now.versions = Json{{"tensorrt", version()}, {"calib8", CALIB8_VERSION}}.dump();
    if (images_.empty() && !options_.samples) return now;
    if (options_.samples && !images_.empty()) {
      throw ConfigError(
          "a calibration has images or a function that gives samples, got both with " +
          images_.string() + "; give one");
    }
    const Feed feed = options_.samples ? Feed(options_.samples, samples_of(), options_.feed)
                                       : Feed(images_, samples_of(), options_.feed);
    built_.feed = std::make_shared<Feed>(feed.whole_batches());
    now.rule = "whole batches of " + std::to_string(built_.feed->batch());
    return now;
  }

  // The inputs as samples have them: of images float32, whatever the network's own float is; of arrays
  // the model's own types, which TensorRT may have narrowed.
  std::vector<TensorSpec> samples_of() const {
    std::vector<TensorSpec> specs = built_.inputs;
    const bool arrays = options_.samples || holds_arrays(images_);
    const std::map<std::string, std::string> own =
        arrays ? input_types(model_) : std::map<std::string, std::string>();
    for (TensorSpec& spec : specs) {
      const auto found = own.find(spec.name);
      const bool narrowed = found != own.end() && found->second == "int64";
      if (arrays && narrowed && spec.dtype == "int32") spec.dtype = "int64";
      if (!arrays && (spec.dtype == "float16" || spec.dtype == "bfloat16")) spec.dtype = "float32";
    }
    return specs;
  }

  void set_images(Fingerprint& now) const {
    if (built_.feed) set_feed(now, built_.feed->manifest());
  }

  void refuse_unfit(const std::string& reason) const {
    if (options_.require_cache) {
      throw CacheError("the cache must fit (--require-cache), but " + reason +
                       "; leave --require-cache out to calibrate anew");
    }
    if (!built_.feed) {
      throw CacheError(
          "a model without Q/DQ nodes is calibrated with images, got none, and no cache"
          " in their place: " +
          reason +
          "; give a folder of images, a list file, or a"
          " cache that fits (--cache)");
    }
  }

  std::string fresh(const Fingerprint& now) {
    CalibratorOptions options = calibrating();
    // at once, not after the hours that an engine may take
    options.keep = [&](const std::string& text) {
      Fingerprint made = now;
      set_images(made);  // by now all of them were read
      save_calibration(cache_, text, made);
    };
    return by_method(now.method, builder_, options);
  }

  std::string asked_;

#else

  [[noreturn]] void implicit() const {
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
  Built built_;
};

}  // namespace

std::string calibrator_named(const std::string& name) {
  for (const auto& [word, algorithm] : kCalibrators) {
    if (name == word || name == algorithm) return std::string(algorithm);
  }
  throw ConfigError(
      "--calibrator must be one of entropy2, entropy, minmax, legacy, or such as"
      " EntropyCalibration2, got " +
      text::repr(name));
}

Built calibrate_and_build(const fs::path& model, const fs::path& images, const fs::path& cache,
                          const CalibrateAndBuildOptions& options, Logger& logger) {
  return Line(model, images, cache, options, logger).run();
}

}  // namespace calib8::trt

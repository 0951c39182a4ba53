// From a model, images and a cache file to an engine, in one call:
//
//   calib8::trt::Logger logger;
//   const auto built = calib8::trt::calibrate_and_build("model.onnx", "photos/", "model.cache", {}, logger);
//   calib8::files::write("model.engine", built.engine);
//
// Samples may come from memory instead: set `options.samples` and give "" for the images.
//
// An existing cache is used if its fingerprint fits: one of calib8 from another machine, of TensorRT, or
// of an earlier call. Without images only the model is compared.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "calib8/feed.hpp"
#include "calib8/trt/builder.hpp"
#include "calib8/trt/logger.hpp"

namespace calib8::trt {

struct CalibrateAndBuildOptions {
  FeedOptions feed;
  NextSample samples;  // returns calibration samples in place of images; calib8/feed.hpp
  BuildOptions build;
  // EntropyCalibration2, EntropyCalibration, MinMaxCalibration or LegacyCalibration; "": that of
  // the cache if it is used, else the first one.
  std::string calibrator;
  bool require_cache = false;  // fail if the cache does not fit
  bool trust_cache =
      false;  // use the cache without comparing its fingerprint; it is never written then
  // Where to store the engine, with a note of what it was built from (ENGINE.json); a stored engine is
  // used again if its note fits. "": the engine is only returned.
  std::filesystem::path engine;
  bool rebuild = false;  // build even if the stored engine fits
};

// The engine, and how it was made.
struct BuildResult {
  std::string engine;  // serialized
  bool engine_reused = false;
  std::vector<TensorSpec> inputs;  // of the network
  // Only for a model without Q/DQ nodes:
  std::optional<std::string> method;  // the calibrator, as named in the cache's first line
  bool reused = false;                // whether an existing cache was used
  std::string reason;                 // one sentence: why that cache was used, or why not
  std::shared_ptr<const Feed> feed;   // null without images
  std::vector<std::string> notes;
};

// Not thread-safe for one cache or engine file; calls with other files and loggers may run in parallel.
// `images` is a folder, a list file or one file of images or arrays (see calib8/feed.hpp); "" if there are
// none. The cache's note may list layers that run in float32 (StoredCache::float32_layers). The cache is written as
// soon as TensorRT has it, before the engine is built, so it survives a failing build.
// Throws ConfigError, FeedError, CacheError (require_cache is set and it does not fit), CalibrationError, ExportError,
// BackendError; what `options.samples` throws.
BuildResult calibrate_and_build(const std::filesystem::path& model,
                                const std::filesystem::path& images,
                                const std::filesystem::path& cache,
                                const CalibrateAndBuildOptions& options, Logger& logger);

// The calibrator's name in a cache's first line, for that name itself or for entropy2, entropy, minmax,
// legacy. Throws ConfigError: an unknown name.
std::string calibrator_algorithm(const std::string& name);

}  // namespace calib8::trt

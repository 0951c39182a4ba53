// From a model, images and a cache file to an engine, in one call:
//
//   calib8::trt::Logger logger;
//   const auto built = calib8::trt::calibrate_and_build("model.onnx", "photos/", "model.cache", {}, logger);
//   calib8::files::write("model.engine", built.engine);
//
// Samples may come from memory instead: with `options.samples`, and "" for the images.
//
// The cache is used again while what it was made from fits: calib8's of another machine, TensorRT's own,
// or that of an earlier call. Without images the model alone is compared.
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
  NextSample samples;  // gives calibration samples in place of images; calib8/feed.hpp
  BuildOptions build;
  // EntropyCalibration2, EntropyCalibration, MinMaxCalibration or LegacyCalibration; "": the cache's
  // own, where it is used, else the first of them.
  std::string calibrator;
  bool require_cache = false;  // fail where the cache does not fit
  bool trust_cache = false;  // use it as it is, whatever it was made from; it is never written then
  // StoredCache here with a note of what it was built from (ENGINE.json), and used again while that fits; "":
  // the engine is given back alone.
  std::filesystem::path engine;
  bool rebuild = false;  // build even where the engine there fits
};

// What came of it.
struct BuildResult {
  std::string engine;  // serialized
  bool engine_reused = false;
  std::vector<TensorSpec> inputs;  // as the network has them
  // Of a model without Q/DQ nodes:
  std::optional<std::string> method;  // the calibrator, as the cache's first line has it
  bool reused = false;                // whether the cache was there
  std::string reason;                 // why it was used, or why not, in one sentence
  std::shared_ptr<const Feed> feed;   // null without images
  std::vector<std::string> notes;
};

// Not thread-safe for one cache or engine file; calls with other files and loggers may run in parallel.
// The images, or arrays (calib8/feed.hpp tells which), are a folder, a list file or one file; empty where
// there are none. The cache's note may list layers that run in float32 (StoredCache::float32_layers). The cache is written as
// soon as TensorRT has it, long before the engine is: a build that fails behind it has lost nothing.
// Throws ConfigError, FeedError, CacheError (it must fit and does not), CalibrationError, ExportError,
// BackendError; what `options.samples` throws.
BuildResult calibrate_and_build(const std::filesystem::path& model,
                                const std::filesystem::path& images,
                                const std::filesystem::path& cache,
                                const CalibrateAndBuildOptions& options, Logger& logger);

// The calibrator's name as a cache's first line has it, of that or of entropy2, entropy, minmax, legacy.
// Throws ConfigError: there is none.
std::string calibrator_algorithm(const std::string& name);

}  // namespace calib8::trt

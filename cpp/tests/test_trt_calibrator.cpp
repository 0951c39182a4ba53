// TensorRT's calibrators through TensorRT's own interface; needs its headers only. Without a GPU the
// copy to the device fails, and that must come out of check(), not out of the callback.
#include <stdexcept>

#include "calib8/cache.hpp"
#include "calib8/errors.hpp"
#include "calib8/trt/build.hpp"
#include "calib8/trt/calibrator.hpp"
#include "calib8/trt/logger.hpp"
#include "catch.hpp"
#include "folder.hpp"

using namespace calib8;

TEST_CASE("the log keeps the worst message") {
  trt::Logger logger(nvinfer1::ILogger::Severity::kINTERNAL_ERROR);
  CHECK(logger.last_error() == "TensorRT logged no error");
  using Severity = nvinfer1::ILogger::Severity;
  logger.log(Severity::kINFO, "hello");
  CHECK(logger.last_error() == "TensorRT logged no error");
  logger.log(Severity::kWARNING, "no GPU");
  CHECK(logger.last_error() == "no GPU");
  logger.log(Severity::kERROR, "first");
  logger.log(Severity::kERROR, "second");
  logger.log(Severity::kWARNING, "later");
  CHECK(logger.last_error() == "second");
}

#if NV_TENSORRT_MAJOR < 11

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace {

const std::string kCache = "TRT-8601-EntropyCalibration2\nimage: 3c008912\n";

bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

trt::CalibratorOptions options_of(const Folder& folder, std::optional<std::string> cache) {
  const TensorSpec spec{"image", "float32", {2, 3, 16, 20}};
  return {std::make_shared<Feed>(folder.path(), spec, FeedOptions{}), std::move(cache)};
}

template <class Calibrator>
void check_algorithm(const Folder& folder, nvinfer1::CalibrationAlgoType wanted) {
  Calibrator calibrator(options_of(folder, kCache));
  nvinfer1::IInt8Calibrator& seen_by_tensorrt = calibrator;
  CHECK(seen_by_tensorrt.getAlgorithm() == wanted);
  CHECK(seen_by_tensorrt.getBatchSize() == 1);
  std::size_t length = 0;
  const void* cache = seen_by_tensorrt.readCalibrationCache(length);
  CHECK(std::string(static_cast<const char*>(cache), length) == kCache);
  CHECK(calibrator.check() == kCache);
}

}  // namespace

TEST_CASE("the four calibrators are what TensorRT takes them for") {
  const Folder folder;
  folder.sample("a.npy", 9);
  using Algorithm = nvinfer1::CalibrationAlgoType;
  check_algorithm<trt::Int8EntropyCalibrator>(folder, Algorithm::kENTROPY_CALIBRATION);
  check_algorithm<trt::Int8EntropyCalibrator2>(folder, Algorithm::kENTROPY_CALIBRATION_2);
  check_algorithm<trt::Int8MinMaxCalibrator>(folder, Algorithm::kMINMAX_CALIBRATION);
  check_algorithm<trt::Int8LegacyCalibrator>(folder, Algorithm::kLEGACY_CALIBRATION);
  const trt::Int8LegacyCalibrator legacy(options_of(folder, kCache));
  CHECK(legacy.getQuantile() == 0.999999);
  CHECK(legacy.getRegressionCutoff() == 1.0);
}

TEST_CASE("a calibrator without a feed is told") {
  CHECK_THROWS_AS(trt::Int8EntropyCalibrator2(trt::CalibratorOptions{}), ConfigError);
}

static_assert(!std::is_move_constructible_v<trt::Int8EntropyCalibrator2>,
              "TensorRT holds a calibrator's address");

TEST_CASE("batches go to the device, and a device that is missing is told after the build") {
  const Folder folder;
  for (const char* name : {"a.npy", "b.npy", "c.npy"}) folder.sample(name, 9);
  trt::Int8EntropyCalibrator2 calibrator(options_of(folder, std::nullopt));
  nvinfer1::IInt8Calibrator& seen_by_tensorrt = calibrator;
  std::size_t length = 1;
  CHECK(seen_by_tensorrt.readCalibrationCache(length) == nullptr);
  CHECK(length == 0);
  void* binding = nullptr;
  const char* name = "image";
  int batches = 0;
  while (seen_by_tensorrt.getBatch(&binding, &name, 1)) ++batches;
  if (has_gpu()) {
    CHECK(batches == 1);  // the third sample makes no whole batch
    seen_by_tensorrt.writeCalibrationCache(kCache.data(), kCache.size());
    CHECK(calibrator.check() == kCache);
  } else {
    CHECK(batches == 0);
    CHECK_THROWS_AS(calibrator.check(), BackendError);
    CHECK_THROWS_WITH(calibrator.check(), Catch::Contains("CUDA could not reserve 7680 bytes"));
  }
}

namespace {

// An ONNX model of one Relu, "image" float32 [2, 3, 16, 20].
std::string relu_model() {
  constexpr std::string_view kHex =
      "08073a560a130a05696d6167651201791a0172220452656c751201675a1f0a05696d61676512160a140801"
      "12100a0208020a0208030a0208100a020814621b0a017912160a14080112100a0208020a0208030a020810"
      "0a02081442040a00100d";
  std::string bytes;
  for (std::size_t at = 0; at < kHex.size(); at += 2) {
    bytes += static_cast<char>(std::stoi(std::string(kHex.substr(at, 2)), nullptr, 16));
  }
  return bytes;
}

// Gives `count` single samples, then nothing.
NextSample frames(int count) {
  return [count, k = 0]() mutable -> std::optional<Sample> {
    if (k == count) return std::nullopt;
    return Sample{
        Tensor::of("image", {3, 16, 20}, std::vector<float>(960, static_cast<float>(++k)))};
  };
}

}  // namespace

TEST_CASE("an engine is calibrated and built with samples of a function") {
  if (!has_gpu()) return;
  const Folder folder;
  folder.write("m.onnx", relu_model());
  trt::Logger logger;
  trt::CalibrateAndBuildOptions options;
  const auto built = [&](NextSample samples, const std::string& images = "") {
    options.samples = std::move(samples);
    return trt::calibrate_and_build(folder / "m.onnx", images, folder / "m.cache", options, logger);
  };
  const trt::BuildResult first = built(frames(5));
  CHECK_FALSE(first.reused);
  CHECK(first.feed->size() == 2);
  CHECK(first.notes.back().find("the last 1 of 5 samples fill none") != std::string::npos);
  CHECK(read_cache(folder / "m.cache").scales().front().first == "image");
  CHECK(built(frames(5)).reused);
  CHECK(built(nullptr).reused);  // nothing to compare but the model
  CHECK_FALSE(built(frames(4)).reused);
  CHECK_THROWS_WITH(built(frames(4), "photos"), Catch::Contains("got both with photos; give one"));
  const auto broken = []() -> std::optional<Sample> { throw std::out_of_range("mine"); };
  CHECK_THROWS_AS(built(broken), std::out_of_range);
}

#endif

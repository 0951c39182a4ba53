// TensorRT's int8 calibrators (up to TensorRT 10.16), fed with images, arrays or a function's samples:
//
//   calib8::trt::Int8EntropyCalibrator2 calibrator({feed});
//   std::string cache = builder.calibrate(calibrator);     // calib8::trt::Builder, or, by hand:
//
//   config->setInt8Calibrator(&calibrator);
//   ... build ...
//   std::string cache = calibrator.check();                // throws what went wrong in a callback
//
// TensorRT 11 has no calibrators: build from the model with Q/DQ nodes instead.
#pragma once

#include <NvInfer.h>

#if NV_TENSORRT_MAJOR < 11

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "calib8/binding_values.hpp"
#include "calib8/calibration_job.hpp"
#include "calib8/errors.hpp"
#include "calib8/trt/cuda.hpp"

// TensorRT 10.1 and later call the calibrators deprecated; to use them is the purpose here.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace calib8::trt {

struct CalibratorOptions {
  std::shared_ptr<const Feed> feed;       // batches of the shape that TensorRT calibrates with; not
                                          // needed with a cache
  std::optional<std::string> cache = {};  // the text of a cache that fits; none: calibrate
  CalibrationJob::StoreCache store_cache =
      nullptr;  // receives a new cache before the engine is built
  // Input -> the network's type (numpy's name) if it differs from the feed's: int32 for a model's int64
  // before TensorRT 10.
  std::map<std::string, std::string> dtypes = {};
  double quantile = 0.999999;  // for the legacy calibrator only
  double regression_cutoff = 1.0;
};

// The base of the four calibrators. `Base` is TensorRT's interface.
template <class Base>
class Calibrator : public Base {
 public:
  explicit Calibrator(const CalibratorOptions& options)
      : job_(options.cache && !options.feed
                 ? CalibrationJob(*options.cache)
                 : CalibrationJob(
                       require_feed(options.feed),
                       [this](const Tensor& tensor) { return upload(tensor); }, options.cache,
                       options.store_cache)),
        dtypes_(options.dtypes) {}
  // TensorRT and the job hold its address.
  Calibrator(Calibrator&&) = delete;
  Calibrator& operator=(Calibrator&&) = delete;
  ~Calibrator() override = default;

  // With explicit batch dimensions the batch is part of the shape; TensorRT multiplies by this.
  std::int32_t getBatchSize() const noexcept override { return 1; }

  bool getBatch(void* bindings[], char const* names[], std::int32_t count) noexcept override {
    return job_.next(bindings, names, count);
  }

  void const* readCalibrationCache(std::size_t& length) noexcept override {
    return job_.read(length);
  }

  void writeCalibrationCache(void const* data, std::size_t length) noexcept override {
    job_.write(data, length);
  }

  // After the build: the cache that was used. Throws the error of a callback, or CalibrationError.
  std::string check() const { return job_.check(); }
  const CalibrationJob& job() const { return job_; }

 private:
  static const Feed& require_feed(const std::shared_ptr<const Feed>& feed) {
    if (feed) return *feed;
    throw ConfigError("a calibrator needs a feed, got none; give CalibratorOptions::feed");
  }

  void* upload(const Tensor& tensor) {
    const auto network_dtype = dtypes_.find(tensor.name);
    const std::vector<char> values = binding_values(
        tensor, network_dtype == dtypes_.end() ? tensor.dtype : network_dtype->second);
    void* memory = buffers_[tensor.name].reserve(values.size());
    trt::check(cudaMemcpy(memory, values.data(), values.size(), cudaMemcpyHostToDevice),
               "copy a calibration batch to the GPU");
    return memory;
  }

  std::map<std::string, DeviceBuffer> buffers_;  // one an input
  CalibrationJob job_;
  std::map<std::string, std::string> dtypes_;
};

using Int8EntropyCalibrator = Calibrator<nvinfer1::IInt8EntropyCalibrator>;
using Int8EntropyCalibrator2 = Calibrator<nvinfer1::IInt8EntropyCalibrator2>;
using Int8MinMaxCalibrator = Calibrator<nvinfer1::IInt8MinMaxCalibrator>;

class Int8LegacyCalibrator : public Calibrator<nvinfer1::IInt8LegacyCalibrator> {
 public:
  explicit Int8LegacyCalibrator(const CalibratorOptions& options)
      : Calibrator(options), quantile_(options.quantile), cutoff_(options.regression_cutoff) {}

  double getQuantile() const noexcept override { return quantile_; }
  double getRegressionCutoff() const noexcept override { return cutoff_; }
  void const* readHistogramCache(std::size_t& length) noexcept override {
    length = 0;
    return nullptr;
  }
  void writeHistogramCache(void const* /*data*/, std::size_t /*length*/) noexcept override {}

 private:
  double quantile_;
  double cutoff_;
};

}  // namespace calib8::trt

#pragma GCC diagnostic pop

#endif  // NV_TENSORRT_MAJOR < 11

// The body of a calibrator's callbacks, independent of TensorRT; calibrators/tensorrt.py is the same for
// Python.
//
//   feed --samples--> next() --upload--> device buffer --address--> TensorRT
//
// TensorRT accepts no exceptions: an error in a callback is stored, the callback reports "no more
// data", and check() throws the error after the build.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "calib8/export.hpp"
#include "calib8/feed.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

class CalibrationJob {
 public:
  // Copies an input's values to memory that TensorRT reads and returns its address. May throw.
  using Upload = std::function<void*(const Tensor&)>;
  // Receives the new cache as soon as TensorRT has written it, long before the engine is built. May throw.
  using StoreCache = std::function<void(const std::string&)>;

  // `known_cache` is the text of a cache that fits: TensorRT then gets no batches. Without it TensorRT
  // calibrates with the feed's complete batches. Throws ConfigError: the feed has none.
  CalibrationJob(const Feed& feed, Upload upload, std::optional<std::string> known_cache,
                 StoreCache store_cache = nullptr);
  // With the text of a cache that fits, and no calibration data.
  explicit CalibrationJob(std::string known_cache);

  // The bodies of getBatch, readCalibrationCache and writeCalibrationCache.
  bool next(void* bindings[], const char* const names[], std::int32_t count) noexcept;
  const void* read(std::size_t& length) noexcept;
  void write(const void* data, std::size_t length) noexcept;

  // After the build: the cache that was used, known or new. Throws the error of a callback, or
  // CalibrationError with the text of problem().
  std::string check() const;
  // Throws the error of a callback, if there was one.
  void rethrow() const;
  // A sentence on what TensorRT did wrong, such as too few batches; "" if nothing.
  std::string problem() const;
  // Whether TensorRT asked for a batch.
  bool has_started() const { return request_count_ > 0; }

  int batch() const { return feed_ ? feed_->batch() : 1; }

 private:
  bool next_address(void* bindings[], const char* const names[], std::int32_t count);
  void check_names(const char* const names[], std::int32_t count) const;

  std::optional<Feed> feed_;  // none if the job has a known cache and no feed
  Upload upload_;
  StoreCache store_cache_;
  std::optional<std::string> known_cache_;
  std::optional<std::string> new_cache_;
  std::unique_ptr<Stream<Sample>> stream_;
  std::exception_ptr error_;
  std::size_t request_count_ = 0;
  std::size_t batch_count_ = 0;
  bool is_finished_ = false;
};

}  // namespace calib8
CALIB8_EXPORT_END

// What every TensorRT calibrator does when TensorRT calls, without TensorRT; as
// calibrators/tensorrt.py does it for Python.
//
//   feed --samples--> next() --upload--> device buffer --address--> TensorRT
//
// TensorRT runs with exceptions off: whatever goes wrong in a callback is kept, the callback says
// "no more data", and check() throws it once the build is over.
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
  // Copies an input's values to where TensorRT reads them; gives that address. May throw.
  using Upload = std::function<void*(const Tensor&)>;
  // Takes the new cache as soon as TensorRT has it, which is long before the engine is. May throw.
  using StoreCache = std::function<void(const std::string&)>;

  // `known_cache` is the text of a cache that fits: TensorRT then gets no batches. Without one it
  // calibrates with the feed's whole batches; throws ConfigError where the feed has none.
  CalibrationJob(const Feed& feed, Upload upload, std::optional<std::string> known_cache,
                 StoreCache store_cache = nullptr);
  // With the text of a cache that fits, and nothing to calibrate with.
  explicit CalibrationJob(std::string known_cache);

  // The bodies of getBatch, readCalibrationCache and writeCalibrationCache.
  bool next(void* bindings[], const char* const names[], std::int32_t count) noexcept;
  const void* read(std::size_t& length) noexcept;
  void write(const void* data, std::size_t length) noexcept;

  // After the build: the cache in force, known or new. Throws what a callback threw, or
  // CalibrationError: what problem() says.
  std::string check() const;
  // Throws what a callback threw, if one did.
  void rethrow() const;
  // What went wrong between TensorRT and this job, in one sentence; "" if nothing.
  std::string problem() const;
  // Whether TensorRT asked for a batch.
  bool has_started() const { return request_count_ > 0; }

  int batch() const { return feed_ ? feed_->batch() : 1; }

 private:
  bool next_address(void* bindings[], const char* const names[], std::int32_t count);
  void check_names(const char* const names[], std::int32_t count) const;

  std::optional<Feed> feed_;  // none where the cache is known and no feed was given
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

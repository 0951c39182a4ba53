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
  using Keep = std::function<void(const std::string&)>;

  // `known` is the text of a cache that fits: TensorRT then gets no batches. Without one it
  // calibrates with the feed's whole batches; throws ConfigError where the feed has none.
  CalibrationJob(const Feed& feed, Upload upload, std::optional<std::string> known,
                 Keep keep = nullptr);
  // With the text of a cache that fits, and nothing to calibrate with.
  explicit CalibrationJob(std::string known);

  // The bodies of getBatch, readCalibrationCache and writeCalibrationCache.
  bool next(void* bindings[], const char* const names[], std::int32_t count) noexcept;
  const void* read(std::size_t& length) noexcept;
  void write(const void* data, std::size_t length) noexcept;

  // After the build: the cache in force, known or new. Throws what a callback threw, or
  // CalibrationError: what trouble() says.
  std::string check() const;
  // Throws what a callback threw, if one did.
  void rethrow() const;
  // What went wrong between TensorRT and this job, in one sentence; "" if nothing.
  std::string trouble() const;
  // Whether TensorRT asked for a batch.
  bool begun() const { return asked_ > 0; }

  int batch() const { return feed_ ? feed_->batch() : 1; }

 private:
  bool next_address(void* bindings[], const char* const names[], std::int32_t count);
  void check_names(const char* const names[], std::int32_t count) const;

  std::optional<Feed> feed_;  // none where the cache is known and no feed was given
  Upload upload_;
  Keep keep_;
  std::optional<std::string> known_;
  std::optional<std::string> written_;
  std::unique_ptr<Stream<Sample>> stream_;
  std::exception_ptr error_;
  std::size_t asked_ = 0;
  std::size_t taken_ = 0;
  bool ended_ = false;
};

}  // namespace calib8
CALIB8_EXPORT_END

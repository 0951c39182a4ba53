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

#include "calib8/feed.hpp"

namespace calib8 {

class CalibrationJob {
 public:
  // Copies a sample to where TensorRT reads it; gives that address. May throw.
  using Upload = std::function<void*(const Sample&)>;

  // `known` is the text of a cache that fits; without one TensorRT calibrates anew.
  CalibrationJob(std::shared_ptr<const Feed> feed, std::string input, Upload upload,
                 std::optional<std::string> known);

  // The bodies of getBatch, readCalibrationCache and writeCalibrationCache.
  bool next(void* bindings[], const char* const names[], std::int32_t count) noexcept;
  const void* read(std::size_t& length) noexcept;
  void write(const void* data, std::size_t length) noexcept;

  // After the build: the cache in force, known or new. Throws what a callback threw, or
  // CalibrationError: TensorRT took fewer batches than the feed has, or wrote no cache.
  std::string check() const;

  int batch() const { return feed_->batch(); }

 private:
  bool next_address(void* bindings[], const char* const names[], std::int32_t count);

  std::shared_ptr<const Feed> feed_;
  std::string input_;
  Upload upload_;
  std::optional<std::string> known_;
  std::optional<std::string> written_;
  std::unique_ptr<Stream<Sample>> stream_;
  std::exception_ptr error_;
  std::size_t asked_ = 0;
  std::size_t taken_ = 0;
  bool ended_ = false;
};

}  // namespace calib8

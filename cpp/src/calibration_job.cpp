#include "calib8/calibration_job.hpp"

#include "calib8/errors.hpp"
#include "calib8/text.hpp"

namespace calib8 {

CalibrationJob::CalibrationJob(const Feed& feed, std::string input, Upload upload,
                               std::optional<std::string> known, Keep keep)
    : feed_(known ? feed : feed.whole_batches()),
      input_(std::move(input)),
      upload_(std::move(upload)),
      keep_(std::move(keep)),
      known_(std::move(known)) {}

CalibrationJob::CalibrationJob(std::string known) : known_(std::move(known)) {}

bool CalibrationJob::next(void* bindings[], const char* const names[],
                          std::int32_t count) noexcept {
  ++asked_;
  try {
    return next_address(bindings, names, count);
  } catch (...) {
    if (!error_) error_ = std::current_exception();
    ended_ = true;
    return false;
  }
}

bool CalibrationJob::next_address(void* bindings[], const char* const names[], std::int32_t count) {
  if (ended_ || known_) return false;
  if (count != 1 || input_ != names[0]) {
    throw CalibrationError("images feed the one input " + text::repr(input_) +
                           ", TensorRT asks for " + std::to_string(count) + " from " +
                           (count > 0 ? text::repr(names[0]) : std::string("none")) +
                           "; give a model with one input");
  }
  if (!stream_) stream_ = feed_->samples();
  const std::optional<Sample> sample = stream_->next();
  if (!sample) {
    ended_ = true;
    return false;
  }
  bindings[0] = upload_(*sample);
  ++taken_;
  return true;
}

const void* CalibrationJob::read(std::size_t& length) noexcept {
  const std::optional<std::string>& cache = written_ ? written_ : known_;  // a second build has it
  length = cache ? cache->size() : 0;
  return cache ? cache->data() : nullptr;
}

void CalibrationJob::write(const void* data, std::size_t length) noexcept {
  try {  // a copy: the memory is TensorRT's and is gone after the call
    written_ = std::string(static_cast<const char*>(data), length);
    if (keep_ && !known_ && !error_ && trouble().empty()) keep_(*written_);
  } catch (...) {
    if (!error_) error_ = std::current_exception();
  }
}

std::string CalibrationJob::check() const {
  rethrow();
  const std::string wrong = trouble();
  if (!wrong.empty()) throw CalibrationError(wrong);
  return written_ ? *written_ : *known_;
}

void CalibrationJob::rethrow() const {
  if (error_) std::rethrow_exception(error_);
}

std::string CalibrationJob::trouble() const {
  if (known_) {
    return begun() ? "TensorRT must take the known cache, but refused it and asked for batches, of"
                     " which there are none; its first line must name this version and calibrator;"
                     " delete it to calibrate anew"
                   : "";
  }
  if (taken_ != feed_->size()) {
    return "TensorRT must see every batch, got " + std::to_string(taken_) + " of " +
           std::to_string(feed_->size()) + "; its scales are not usable";
  }
  if (!written_ || written_->empty()) {
    return "TensorRT took " + std::to_string(taken_) + " batches but wrote no calibration cache";
  }
  return "";
}

}  // namespace calib8

#include "calib8/calibration_job.hpp"

#include "calib8/errors.hpp"
#include "calib8/text.hpp"

namespace calib8 {

CalibrationJob::CalibrationJob(std::shared_ptr<const Feed> feed, std::string input, Upload upload,
                               std::optional<std::string> known)
    : feed_(std::move(feed)),
      input_(std::move(input)),
      upload_(std::move(upload)),
      known_(std::move(known)) {}

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

bool CalibrationJob::next_address(void* bindings[], const char* const names[],
                                  std::int32_t count) {
  if (ended_) return false;
  if (count != 1 || input_ != names[0]) {
    throw CalibrationError("images feed the one input " + text::repr(input_) + ", TensorRT asks for " +
                           std::to_string(count) + " from " +
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
  length = known_ ? known_->size() : 0;
  return known_ ? known_->data() : nullptr;
}

void CalibrationJob::write(const void* data, std::size_t length) noexcept {
  try {  // a copy: the memory is TensorRT's and is gone after the call
    written_ = std::string(static_cast<const char*>(data), length);
  } catch (...) {
    if (!error_) error_ = std::current_exception();
  }
}

std::string CalibrationJob::check() const {
  if (error_) std::rethrow_exception(error_);
  if (asked_ == 0 && known_) return written_.value_or(*known_);
  if (taken_ == 0 && known_) {
    throw CalibrationError(
        "TensorRT must take the known cache, but refused it and asked for batches, of which there"
        " are none; its first line must name this version and calibrator");
  }
  if (taken_ != feed_->size()) {
    throw CalibrationError("TensorRT must see every batch, got " + std::to_string(taken_) + " of " +
                           std::to_string(feed_->size()) +
                           "; its scales are not usable; see TensorRT's log above for why it"
                           " stopped");
  }
  if (!written_ || written_->empty()) {
    throw CalibrationError("TensorRT took " + std::to_string(taken_) +
                           " batches but wrote no calibration cache; see its log above");
  }
  return *written_;
}

}  // namespace calib8

#include "calib8/calibration_job.hpp"

#include <algorithm>
#include <set>

#include "calib8/errors.hpp"
#include "calib8/text.hpp"

namespace calib8 {

CalibrationJob::CalibrationJob(const Feed& feed, Upload upload, std::optional<std::string> known,
                               Keep keep)
    : feed_(known ? feed : feed.whole_batches()),
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
  check_names(names, count);
  if (!stream_) stream_ = feed_->samples();
  const std::optional<Sample> sample = stream_->next();
  if (!sample) {
    ended_ = true;
    return false;
  }
  for (std::int32_t k = 0; k < count; ++k) {
    const auto named = [&](const Tensor& tensor) { return tensor.name == names[k]; };
    bindings[k] = upload_(*std::find_if(sample->begin(), sample->end(), named));
  }
  ++taken_;
  return true;
}

void CalibrationJob::check_names(const char* const names[], std::int32_t count) const {
  const std::vector<std::string> asked(names, names + std::max(count, 0));
  const std::set<std::string> wanted(asked.begin(), asked.end());
  const std::set<std::string> fed(feed_->inputs().begin(), feed_->inputs().end());
  if (wanted == fed) return;
  throw CalibrationError("TensorRT must ask for the inputs that are fed, " +
                         text::repr(feed_->inputs()) + ", got " + text::repr(asked) +
                         "; feed every input of the model");
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

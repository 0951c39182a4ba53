#include "calib8/calibration_job.hpp"

#include <algorithm>
#include <set>

#include "calib8/errors.hpp"
#include "calib8/text.hpp"

namespace calib8 {

CalibrationJob::CalibrationJob(const Feed& feed, Upload upload,
                               std::optional<std::string> known_cache, StoreCache store_cache)
    : feed_(known_cache ? feed : feed.whole_batches()),
      upload_(std::move(upload)),
      store_cache_(std::move(store_cache)),
      known_cache_(std::move(known_cache)) {}

CalibrationJob::CalibrationJob(std::string known_cache) : known_cache_(std::move(known_cache)) {}

bool CalibrationJob::next(void* bindings[], const char* const names[],
                          std::int32_t count) noexcept {
  ++request_count_;
  try {
    return next_address(bindings, names, count);
  } catch (...) {
    if (!error_) error_ = std::current_exception();
    is_finished_ = true;
    return false;
  }
}

bool CalibrationJob::next_address(void* bindings[], const char* const names[], std::int32_t count) {
  if (is_finished_ || known_cache_) return false;
  check_names(names, count);
  if (!stream_) stream_ = feed_->samples();
  const std::optional<Sample> sample = stream_->next();
  if (!sample) {
    is_finished_ = true;
    return false;
  }
  for (std::int32_t k = 0; k < count; ++k) {
    const auto has_name = [&](const Tensor& tensor) { return tensor.name == names[k]; };
    bindings[k] = upload_(*std::find_if(sample->begin(), sample->end(), has_name));
  }
  ++batch_count_;
  return true;
}

void CalibrationJob::check_names(const char* const names[], std::int32_t count) const {
  const std::vector<std::string> requested_names(names, names + std::max(count, 0));
  const std::set<std::string> requested(requested_names.begin(), requested_names.end());
  const std::set<std::string> available(feed_->inputs().begin(), feed_->inputs().end());
  if (requested == available) return;
  throw CalibrationError("TensorRT must ask for the inputs that are fed, " +
                         text::repr(feed_->inputs()) + ", got " + text::repr(requested_names) +
                         "; feed every input of the model");
}

const void* CalibrationJob::read(std::size_t& length) noexcept {
  const std::optional<std::string>& cache =
      new_cache_ ? new_cache_ : known_cache_;  // a second build has it
  length = cache ? cache->size() : 0;
  return cache ? cache->data() : nullptr;
}

void CalibrationJob::write(const void* data, std::size_t length) noexcept {
  try {  // a copy: the memory is TensorRT's and is gone after the call
    new_cache_ = std::string(static_cast<const char*>(data), length);
    if (store_cache_ && !known_cache_ && !error_ && problem().empty()) store_cache_(*new_cache_);
  } catch (...) {
    if (!error_) error_ = std::current_exception();
  }
}

std::string CalibrationJob::check() const {
  rethrow();
  const std::string message = problem();
  if (!message.empty()) throw CalibrationError(message);
  return new_cache_ ? *new_cache_ : *known_cache_;
}

void CalibrationJob::rethrow() const {
  if (error_) std::rethrow_exception(error_);
}

std::string CalibrationJob::problem() const {
  if (known_cache_) {
    return has_started()
               ? "TensorRT must take the known cache, but refused it and asked for batches, of"
                 " which there are none; its first line must name this version and calibrator;"
                 " delete it to calibrate again"
               : "";
  }
  if (batch_count_ != feed_->size()) {
    return "TensorRT must see every batch, got " + std::to_string(batch_count_) + " of " +
           std::to_string(feed_->size()) + "; its scales are not usable";
  }
  if (!new_cache_ || new_cache_->empty()) {
    return "TensorRT took " + std::to_string(batch_count_) +
           " batches but wrote no calibration cache";
  }
  return "";
}

}  // namespace calib8

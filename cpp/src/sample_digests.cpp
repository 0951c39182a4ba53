#include "sample_digests.hpp"

namespace calib8 {

bool SampleDigests::has(std::size_t index) const {
  const std::lock_guard lock(mutex_);
  return digests_.count(index) > 0;
}

void SampleDigests::record(std::size_t index, const std::string& digest, const std::string& name) {
  const std::lock_guard lock(mutex_);
  const std::string& first_digest = digests_.emplace(index, digest).first->second;
  if (first_digest == digest) return;

  throw SampleChanged(name +
                      " changed while calib8 ran, so not all of the run used the same data; do not"
                      " change the data during a run, and run again");
}

std::string SampleDigests::at(std::size_t index) const {
  const std::lock_guard lock(mutex_);
  return digests_.at(index);
}

}  // namespace calib8

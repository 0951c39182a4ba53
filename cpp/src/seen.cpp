#include "seen.hpp"

namespace calib8 {

bool Seen::has(std::size_t index) const {
  const std::lock_guard lock(mutex_);
  return digests_.count(index) > 0;
}

void Seen::note(std::size_t index, const std::string& digest, const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (digests_.emplace(index, digest).first->second == digest) return;
  throw Changed(name +
                " changed while calib8 ran, so not all of the run used the same data; do not"
                " change the data during a run, and run again");
}

std::string Seen::of(std::size_t index) const {
  const std::lock_guard lock(mutex_);
  return digests_.at(index);
}

}  // namespace calib8

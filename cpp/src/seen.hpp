// Digests of samples: what was hashed is what is decoded, now and whenever it is read again;
// deploy/feed/file_list.py.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "calib8/errors.hpp"

namespace calib8 {

// A sample is no longer what it was when it was first read; never passed over as bad.
class Changed : public FeedError {
 public:
  using FeedError::FeedError;
};

// The digest of every sample, as it was first read; by any number of threads.
class Seen {
 public:
  bool has(std::size_t index) const;
  // Throws Changed: the sample, of this name in a message, was another one before.
  void note(std::size_t index, const std::string& digest, const std::string& name);
  // Of a sample that was read: 32 bytes.
  std::string of(std::size_t index) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::size_t, std::string> digests_;
};

}  // namespace calib8

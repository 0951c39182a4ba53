// The digest of each sample as it was first read: a later pass must read and decode the same bytes;
// deploy/feed/file_list.py.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "calib8/errors.hpp"

namespace calib8 {

// A sample is no longer what it was when it was first read. It is never skipped as a bad one.
class SampleChanged : public FeedError {
 public:
  using FeedError::FeedError;
};

// Thread-safe.
class SampleDigests {
 public:
  bool has(std::size_t index) const;
  // Records the digest of a sample, whose name is for the message. Throws SampleChanged where another
  // digest is recorded for it.
  void record(std::size_t index, const std::string& digest, const std::string& name);
  // The digest, 32 bytes, of a sample that was read.
  std::string at(std::size_t index) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::size_t, std::string> digests_;
};

}  // namespace calib8

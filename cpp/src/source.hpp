// Random access to samples of batch 1, and how they are called.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "calib8/feed.hpp"

namespace calib8 {

// A sample as it was read: the sha256 (32 bytes) of its bytes, and what makes the sample of these.
struct Raw {
  std::string digest;
  std::function<Sample()> decode;
};

class Source {
 public:
  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  virtual ~Source() = default;

  virtual std::size_t size() const = 0;
  virtual std::string name(std::size_t index) const = 0;
  // The same; in the middle of a sentence.
  virtual std::string description(std::size_t index) const = 0;
  virtual std::optional<int> label(std::size_t index) const = 0;
  // By any number of threads. Throws FeedError: it cannot be read; SampleChanged: it is another one now.
  virtual Raw load(std::size_t index) const = 0;
  virtual std::vector<std::string> notes() const { return {}; }
  // Whether each sample has the batch of the model.
  virtual bool has_batches() const { return false; }
};

}  // namespace calib8

// Calibration data: images or arrays, one sample at a time, decoded while the model runs;
// deploy/feed/feed.py. Sources: a folder, a list file ("path" or "path label") or one file, of images
// (if calib8 was built with OpenCV) or of arrays: .npy, .npz with one array an input (not compressed),
// .bin and .raw without a header. For a model with several inputs a folder may also hold one folder an
// input, whose files are matched by name. Or a function of the program that returns samples from
// memory:
//
//   const calib8::Feed feed([&]() -> std::optional<calib8::Sample> {
//     if (k == frames.size()) return std::nullopt;
//     return calib8::Sample{calib8::Tensor::of("image", {1, 3, 224, 224}, prepare(frames[k++]))};
//   }, spec, {});
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "calib8/export.hpp"
#include "calib8/images.hpp"
#include "calib8/preprocess.hpp"
#include "calib8/stream.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

// One input's values of a sample, in C order and this machine's byte order.
struct Tensor {
  std::string name;
  std::string dtype;                // numpy's name: float32, float16, int64, ...
  std::vector<std::int64_t> shape;  // first dimension the batch, where the input has one
  std::vector<char> bytes;

  // Makes a float32 tensor.
  static Tensor of(std::string name, std::vector<std::int64_t> shape,
                   const std::vector<float>& values);

  // The float32 values. Throws ConfigError: the tensor has another dtype.
  const float* floats() const;
};

// One sample: a tensor an input, in the order of the inputs.
using Sample = std::vector<Tensor>;

// Returns the next sample, or several as one batch: a tensor an input, with or without the batch
// dimension. Returns nothing at the end.
using NextSample = std::function<std::optional<Sample>()>;

struct FeedOptions {
  std::optional<Preprocess> preprocess;  // none: derived from the input, with a note; arrays are
                                         // never preprocessed
  bool skip_bad = false;                 // skip unreadable images and samples with NaN
  std::optional<std::size_t> limit;      // at most so many samples, spread evenly over all; from a
                                         // function, the first ones
  std::optional<int> batch;              // none: the batch that the input fixes, or 1
  std::optional<int> threads;            // decoding threads; none: one a core, at most 4
  int max_pixels = 50'000'000;           // of an image; decoding takes three bytes each
};

// Whether a source holds arrays, not images. Throws FeedError: it holds neither, or both.
bool holds_arrays(const std::filesystem::path& source);

// A copy shares the data of the original. Thread-safe: any number of threads may read one feed, each
// from its own samples() stream.
class Feed {
 public:
  // Throws FeedError: nothing to feed, or it does not fit the inputs; ConfigError: wrong options, or
  // images, and this calib8 was built without OpenCV.
  Feed(const std::filesystem::path& source, const std::vector<TensorSpec>& specs,
       const FeedOptions& options);
  Feed(const std::filesystem::path& source, const TensorSpec& spec, const FeedOptions& options);
  // Reads the function here, once and to its end (or the first `limit` samples), into a temporary
  // file. Samples are fed as they are, without preprocessing. Throws what the function throws;
  // FeedError: a sample that does not fit the inputs, none, or 100,000 without a limit and no end.
  Feed(const NextSample& next, const std::vector<TensorSpec>& specs, const FeedOptions& options);
  Feed(const NextSample& next, const TensorSpec& spec, const FeedOptions& options);

  // A stream of samples in the feed's order, which does not depend on the number of threads. Each thread
  // decodes at most two images ahead. The stream may outlive the feed.
  // next() throws FeedError if a sample is bad and skip_bad is not set, if all samples are bad, or if a
  // file has changed since it was first read.
  std::unique_ptr<Stream<Sample>> samples() const;

  // The same samples in complete batches only, as TensorRT requires: an incomplete last batch is left
  // out. Throws ConfigError: there is no complete batch.
  Feed whole_batches() const;

  std::size_t size() const;   // batches of the stream; samples known to be bad are not counted
  std::size_t count() const;  // images or rows; those known to be bad are not counted
  int batch() const;
  const std::optional<Preprocess>& preprocess() const;  // none for arrays
  const std::vector<std::string>& inputs() const;       // names
  std::optional<std::vector<int>> labels() const;  // one per image or row without the skipped ones
  std::vector<std::string> names() const;          // of the same images or rows
  std::vector<std::string> skipped() const;        // the reason for each skipped one
  std::vector<std::string> notes() const;          // sentences on how the feed was read

  // The digest and options of the data as JSON, equal to Python's. It covers the bytes as they were first
  // read, which are those that were decoded. Samples that no pass has read yet are read now; a skipped
  // image counts by its bytes. Throws FeedError: a file cannot be read, unless skip_bad is set.
  std::string manifest() const;

 private:
  struct State;
  Feed() = default;
  std::shared_ptr<State> state_;
  bool complete_batches_only_ = false;
};

}  // namespace calib8
CALIB8_EXPORT_END

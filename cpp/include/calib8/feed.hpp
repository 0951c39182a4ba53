// What a model is fed: images or arrays, one sample at a time, decoded beside the inference;
// deploy/feed/feed.py. Sources: a folder, a list file ("path" or "path label") or one file, of images
// (where calib8 was built with OpenCV) or of arrays: .npy, .npz with one array an input (not
// compressed), .bin and .raw without a header. Of several inputs a folder may also have one folder an
// input, whose files go together by name. Or a function of the program, which gives the samples that
// it made in memory:
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

  // One of float32.
  static Tensor of(std::string name, std::vector<std::int64_t> shape,
                   const std::vector<float>& values);

  // The values of float32. Throws ConfigError: they are of another dtype.
  const float* floats() const;
};

// One sample: a tensor an input, in the order of the inputs.
using Sample = std::vector<Tensor>;

// Returns the next sample, or several as one batch: a tensor an input, with or without the batch
// dimension. Returns nothing at the end.
using NextSample = std::function<std::optional<Sample>()>;

struct FeedOptions {
  std::optional<Preprocess> preprocess;  // none: taken from the input, and said in the notes; or
                                         // arrays are fed, which are fed as they are
  bool skip_bad = false;                 // go on without unreadable images and NaN
  std::optional<std::size_t> limit;      // at most so many, spread evenly over all; of a function,
                                         // the first ones
  std::optional<int> batch;              // none: what the input fixes, or 1
  std::optional<int> threads;            // that decode; none: one a core, at most 4
};

// Whether a source is of arrays, not of images. Throws FeedError: it is neither, or both.
bool holds_arrays(const std::filesystem::path& source);

// A copy is of the same feed. Thread-safe: any number of threads may read one feed, each from its own
// samples() stream.
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

  // A stream of samples in the feed's order, the same by any number of threads; of which each has
  // at most two pictures ahead. It outlives the feed safely.
  // next() throws FeedError on a bad sample, unless skip_bad; or where all were bad; or where a
  // file is no longer what it was when it was first read.
  std::unique_ptr<Stream<Sample>> samples() const;

  // The same images for a calibration: an incomplete last batch is left out, as TensorRT has it.
  // Throws ConfigError: there is no whole batch.
  Feed whole_batches() const;

  std::size_t size() const;   // samples the stream gives; known bad ones are not counted
  std::size_t count() const;  // images or rows fed; known bad ones are not counted
  int batch() const;
  const std::optional<Preprocess>& preprocess() const;  // none: of arrays
  const std::vector<std::string>& inputs() const;       // names
  std::optional<std::vector<int>> labels() const;  // one per image or row without the skipped ones
  std::vector<std::string> names() const;          // the same images or rows
  std::vector<std::string> skipped() const;        // why each bad one was left out
  std::vector<std::string> notes() const;          // how the feed was read, in sentences

  // What was fed, as JSON, equal to Python's: of the files' bytes (or the arrays') as they were first
  // read, so that it is of what was decoded. What no pass has read yet is read now; a picture that is skipped
  // counts by its bytes. Throws FeedError: a file cannot be read, unless skip_bad.
  std::string manifest() const;

 private:
  struct State;
  Feed() = default;
  std::shared_ptr<State> state_;
  bool whole_ = false;
};

}  // namespace calib8
CALIB8_EXPORT_END

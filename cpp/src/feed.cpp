#include "calib8/feed.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <system_error>

#include "array_file.hpp"
#include "arrays.hpp"
#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/pixels.hpp"
#include "calib8/text.hpp"
#include "headers.hpp"
#include "json_text.hpp"
#include "machine.hpp"
#include "prefetch.hpp"
#include "sample_digests.hpp"
#include "sampling.hpp"
#include "source.hpp"

namespace calib8 {
namespace {

namespace fs = std::filesystem;
using images::Picture;

constexpr int kMaxThreads = 1024;
constexpr std::uint64_t kLargePixels = 25'000'000;  // an image of more is decoded alone

// The first few.
std::string list_first_names(const std::vector<std::string>& names) {
  std::string listed_names;
  for (std::size_t k = 0; k < std::min<std::size_t>(5, names.size()); ++k) {
    listed_names += (listed_names.empty() ? "" : ", ") + names[k];
  }
  return listed_names +
         (names.size() > 5 ? " and " + std::to_string(names.size() - 5) + " more" : "");
}

// Pictures, or files of arrays.
struct Files {
  std::vector<Picture> files;
  std::string title;  // of all of them, in messages
  bool folder = false;
  std::vector<std::string> notes;
};

Files list_folder(const fs::path& folder) {
  const fs::path folder_path = folder.filename().empty() ? folder.parent_path() : folder;
  const std::string name = folder_path.filename().string();
  Files listing{images::find(folder, is_arrays), text::printable(name), true, {}};
  std::vector<Picture> pictures;
  for (const Picture& file : listing.files) {
    if (images::is_image(file.path)) pictures.push_back(file);
  }
  const std::size_t array_count = listing.files.size() - pictures.size();
  if (pictures.empty() || array_count == 0) return listing;
  listing.files = std::move(pictures);
  listing.notes.push_back(std::to_string(array_count) + " files of arrays among the images of " +
                          listing.title + " are not fed");
  return listing;
}

Files list_files(const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return list_folder(path);
  if (!fs::exists(path, error)) {
    throw FeedError(text::printable(path.string()) +
                    " does not exist; give a folder of images or arrays, a list file, or a file");
  }
  const std::string name = path.filename().string();
  if (images::is_image(path) || is_arrays(path)) {
    return {{{path, name, std::nullopt}}, text::printable(name), false, {}};
  }
  return {images::read_list(path), text::printable(path.string()), false, {}};
}

// Throws FeedError: some hold arrays, some are pictures.
bool are_all_arrays(const Files& listing) {
  std::vector<std::string> array_names;
  for (const Picture& file : listing.files) {
    if (is_arrays(file.path)) array_names.push_back(text::printable(file.name));
  }
  if (array_names.empty() || array_names.size() == listing.files.size())
    return !array_names.empty();
  throw FeedError(listing.title + " must be of images or of arrays, got " +
                  std::to_string(array_names.size()) + " of " +
                  std::to_string(listing.files.size()) +
                  " with arrays: " + list_first_names(array_names) + "; leave one kind out");
}

void check_files_exist(const std::vector<Picture>& pictures, const std::string& title) {
  std::vector<std::string> missing;
  std::error_code error;
  for (const Picture& picture : pictures) {
    if (!fs::exists(picture.path, error)) missing.push_back(text::printable(picture.name));
  }
  if (missing.empty()) return;
  throw FeedError("every image must exist, " + std::to_string(missing.size()) + " of " +
                  std::to_string(pictures.size()) + " in " + title +
                  " do not: " + list_first_names(missing) +
                  "; a line of a list is a path, relative to the list, with or without a class"
                  " number; correct the paths or links, or skip bad ones (skip_bad)");
}

void check_limit(const std::optional<std::size_t>& limit) {
  if (limit && *limit < 1) {
    throw ConfigError("limit must be 1 or more, got 0; leave it out to use all");
  }
}

std::vector<std::size_t> choose_samples(std::size_t count, const std::optional<std::size_t>& limit,
                                        std::vector<std::string>& notes) {
  check_limit(limit);
  const std::size_t sample_count = std::min(limit.value_or(count), count);
  if (sample_count < count) {
    notes.push_back(std::to_string(sample_count) + " of " + std::to_string(count) +
                    " samples are used, spread evenly over all");
  }
  return sample_indices(count, sample_count);
}

// The batch that the inputs fix, else the one that is asked for.
int resolve_batch(const Specs& specs, const FeedOptions& options) {
  const auto has_open_batch = [](const TensorSpec& spec) {
    return !spec.shape.empty() && !spec.shape.front().size;
  };
  const bool is_requested =
      options.batch && std::any_of(specs.begin(), specs.end(), has_open_batch);
  const std::int64_t batch = is_requested ? *options.batch : fixed_batch(specs);
  const auto fits_batch = [batch](const TensorSpec& spec) {
    return spec.shape.empty() || spec.shape.front().size.value_or(batch) >= 1;
  };
  const bool is_valid = batch >= 1 && batch <= std::numeric_limits<int>::max() &&
                        std::all_of(specs.begin(), specs.end(), fits_batch);
  if (!is_valid || (options.batch && *options.batch != batch)) {
    throw ConfigError("the batch must fit the input " + specs.front().describe() + ", got " +
                      std::to_string(options.batch ? *options.batch : batch) +
                      "; leave it out to take the model's own");
  }
  return static_cast<int>(batch);
}

std::size_t resolve_threads(const FeedOptions& options) {
  const int threads = options.threads.value_or(default_threads());
  if (threads < 1 || threads > kMaxThreads) {
    throw ConfigError("threads must be 1 to " + std::to_string(kMaxThreads) + ", got " +
                      std::to_string(threads) + "; leave them out for one a core, at most 4");
  }
  return static_cast<std::size_t>(threads);
}

std::string no_whole_batch_message(std::size_t count, int batch) {
  return "TensorRT calibrates in whole batches, got " + std::to_string(count) +
         " samples for batches of " + std::to_string(batch) +
         "; give more images or a smaller batch";
}

// (1, 3), or (1,): as Python shows a shape.
std::string format_tuple(const std::vector<std::int64_t>& shape) {
  const std::string sides = npy::format_shape(shape);
  return "(" + sides.substr(1, sides.size() - 2) + (shape.size() == 1 ? ",)" : ")");
}

// Throws FeedError: samples of one batch are of several shapes.
void check_shapes(const std::vector<Sample>& group, std::size_t input) {
  std::set<std::vector<std::int64_t>> shapes;
  for (const Sample& sample : group) shapes.insert(sample[input].shape);
  if (shapes.size() == 1) return;
  std::string shape_list;
  for (const auto& shape : shapes)
    shape_list += (shape_list.empty() ? "" : ", ") + format_tuple(shape);
  throw FeedError("samples of one batch must have one shape, got [" + shape_list + "] for " +
                  text::repr(group.front()[input].name) +
                  "; export the model with an open batch, or give all one size");
}

// Samples of batch 1 as one.
Sample join_samples(const std::vector<Sample>& group) {
  Sample batch = group.front();
  for (std::size_t input = 0; input < batch.size(); ++input) {
    check_shapes(group, input);
    Tensor& tensor = batch[input];
    for (std::size_t k = 1; k < group.size() && !tensor.shape.empty(); ++k) {
      const std::vector<char>& sample_bytes = group[k][input].bytes;
      tensor.shape.front() += group[k][input].shape.front();
      tensor.bytes.insert(tensor.bytes.end(), sample_bytes.begin(), sample_bytes.end());
    }
  }
  return batch;
}

class ImageSource final : public Source {
 public:
  ImageSource(std::vector<Picture> pictures, TensorSpec spec, Preprocess preprocess, int max_pixels)
      : pictures_(std::move(pictures)),
        spec_(std::move(spec)),
        preprocess_(std::move(preprocess)),
        max_pixels_(max_pixels) {}

  std::size_t size() const override { return pictures_.size(); }
  std::string name(std::size_t index) const override { return pictures_[index].name; }
  std::string description(std::size_t index) const override {
    return "image " + text::printable(pictures_[index].name);
  }
  std::optional<int> label(std::size_t index) const override { return pictures_[index].label; }

  Raw load(std::size_t index) const override {
    auto data = std::make_shared<std::string>(images::read(pictures_[index]));
    std::string digest = Sha256().update(*data).bytes();
    return {std::move(digest), [this, data, index] { return decoded(*data, index); }};
  }

 private:
  Sample decoded(const std::string& data, std::size_t index) const {
    const bool planes = preprocess_.layout != Layout::kNhwc;
    const std::int64_t channels = preprocess_.channels();
    const Size size = *preprocess_.size;
    std::vector<std::int64_t> shape{1, size.height, size.width, channels};
    if (planes) shape = {1, channels, size.height, size.width};
    const bool grey = preprocess_.color == Color::kGrey;
    const bool deep =
        grey && std::abs(preprocess_.scale * 255 - 1) > 1e-3;  // as in Python: all bits count
    std::unique_lock<std::mutex> large_image_lock(large_image_mutex_, std::defer_lock);
    const auto image_size = headers::read_size(data);
    if (image_size && image_size->pixels() > kLargePixels) large_image_lock.lock();
    const Pixels pixels = images::decode(data, pictures_[index].name, grey, deep, max_pixels_);
    const std::string title = text::printable(pictures_[index].name);
    return {Tensor::of(spec_.name, std::move(shape), apply(pixels, preprocess_, title))};
  }

  std::vector<Picture> pictures_;
  TensorSpec spec_;
  Preprocess preprocess_;
  int max_pixels_;
  mutable std::mutex large_image_mutex_;  // one large image is decoded at a time
};

}  // namespace

struct Feed::State {
  using Decoded = Prefetcher<std::optional<Sample>>;

  std::unique_ptr<const Source> source;
  std::vector<std::size_t> chosen;       // of the source's samples
  std::optional<Preprocess> preprocess;  // none: of arrays
  std::vector<std::string> inputs;
  int batch = 1;
  std::size_t threads = 1;
  bool skip_bad = false;
  std::vector<std::string> notes;
  mutable std::mutex mutex;
  std::map<std::size_t, std::string> skipped;
  SampleDigests first_digests;

  State(const Specs& specs, const FeedOptions& options) : skip_bad(options.skip_bad) {
    if (specs.empty()) {
      throw FeedError("a model must have an input to be fed, got none; check the model");
    }
    for (const TensorSpec& spec : specs) inputs.push_back(spec.name);
  }

  void use_arrays(std::unique_ptr<const Source> arrays, const Specs& specs,
                  const FeedOptions& options) {
    source = std::move(arrays);
    notes = source->notes();
    batch = resolve_batch(specs, options);
    if (source->has_batches()) batch = 1;
    chosen = choose_samples(source->size(), options.limit, notes);
  }

  std::size_t count() const {
    const std::lock_guard lock(mutex);
    return chosen.size() - skipped.size();
  }

  bool is_skipped(std::size_t index) const {
    const std::lock_guard lock(mutex);
    return skipped.count(index) > 0;
  }

  // A sample's bytes, which are those that were first seen.
  Raw load(std::size_t index) {
    const std::string name = source->description(chosen[index]);
    try {
      Raw raw = source->load(chosen[index]);
      first_digests.record(index, raw.digest, name);
      return raw;
    } catch (const SampleChanged&) {
      throw;
    } catch (const FeedError&) {
      first_digests.record(index, Sha256().bytes(), name);
      throw;
    }
  }

  // A sample, or nothing where an earlier pass found it bad; by any number of threads.
  std::optional<Sample> read(std::size_t index) {
    if (is_skipped(index)) return std::nullopt;
    return load(index).decode();
  }

  // The digests in the feed's order; what no pass has read yet is read now.
  std::vector<std::string> digests() {
    std::vector<std::string> all;
    for (std::size_t index = 0; index < chosen.size(); ++index) {
      if (!first_digests.has(index)) record_digest(index);
      all.push_back(first_digests.at(index));
    }
    return all;
  }

  void record_digest(std::size_t index) {
    try {
      load(index);
    } catch (const FeedError&) {
      if (!skip_bad) throw;
    }
  }

  // The next sample, or nothing where it is bad and bad ones are skipped.
  std::optional<Sample> take_good_sample(std::size_t index, Decoded& decoded) {
    try {
      return decoded.take();
    } catch (const SampleChanged&) {
      throw;
    } catch (const FeedError& error) {
      if (!skip_bad) {
        throw FeedError(std::string(error.what()) + "; " + std::to_string(chosen.size()) +
                        " were to be fed: correct or remove it, or skip bad ones"
                        " (skip_bad)");
      }
      const std::lock_guard lock(mutex);
      skipped[index] = error.what();
      return std::nullopt;
    }
  }

  void produce(const Stream<Sample>::Put& put, bool complete_batches_only) {
    std::vector<Sample> group;
    std::vector<Sample> first_samples;
    const auto batch_size = static_cast<std::size_t>(batch);
    Decoded decoded([this](std::size_t index) { return read(index); }, chosen.size(), threads);
    for (std::size_t index = 0; index < chosen.size(); ++index) {
      std::optional<Sample> sample = take_good_sample(index, decoded);
      if (!sample) continue;
      if (batch > 1 && first_samples.size() < batch_size) first_samples.push_back(*sample);
      group.push_back(std::move(*sample));
      if (group.size() < batch_size) continue;
      if (!put(join_samples(group))) return;
      group.clear();
    }
    if (count() == 0) {
      const std::lock_guard lock(mutex);
      throw FeedError("at least one sample must be good, all " + std::to_string(chosen.size()) +
                      " were skipped: " + skipped.begin()->second);
    }
    if (complete_batches_only && count() < batch_size)
      throw FeedError(no_whole_batch_message(count(), batch));
    if (group.empty() || complete_batches_only) return;
    for (std::size_t k = 0; group.size() < batch_size; ++k)
      group.push_back(first_samples[k % first_samples.size()]);
    put(join_samples(group));
  }
};

namespace {

std::unique_ptr<Source> open_arrays(const Files& listing, const Specs& specs,
                                    const FeedOptions& options) {
  if (options.preprocess) {
    throw ConfigError(
        "files of arrays are fed as they are, got preprocessing for them; leave it out, or feed"
        " images");
  }
  if (listing.folder) return array_folder(listing.files, specs, listing.title, options.skip_bad);
  std::error_code failed;  // a line of one file an input is no path
  if (listing.files.size() == 1 && !listing.files.front().label &&
      fs::exists(listing.files.front().path, failed)) {
    return array_file(listing.files.front().path, specs);
  }
  return array_files(listing.files, specs, listing.title, options.skip_bad);
}

Resolved resolve_preprocess(const Specs& specs, const FeedOptions& options) {
  if (specs.size() != 1) {
    std::string input_list;
    for (const TensorSpec& spec : specs)
      input_list += (input_list.empty() ? "" : ", ") + spec.describe();
    throw FeedError("images feed one input, the model has " + std::to_string(specs.size()) + ": " +
                    input_list + "; give a folder of .npz files with one array an input");
  }
  Resolved resolved = resolve(options.preprocess, specs.front());
  if (specs.front().dtype == "float32") return resolved;
  throw FeedError("images become float32, the input is " + specs.front().describe() +
                  "; feed it arrays from an .npy file");
}

}  // namespace

bool holds_arrays(const fs::path& source) { return are_all_arrays(list_files(source)); }

Tensor Tensor::of(std::string name, std::vector<std::int64_t> shape,
                  const std::vector<float>& values) {
  const auto* bytes = reinterpret_cast<const char*>(values.data());
  return {std::move(name), "float32", std::move(shape),
          std::vector<char>(bytes, bytes + values.size() * sizeof(float))};
}

const float* Tensor::floats() const {
  if (dtype == "float32") return reinterpret_cast<const float*>(bytes.data());
  throw ConfigError("values are read by their dtype, got " + dtype +
                    " for float32; read the bytes");
}

Feed::Feed(const fs::path& source, const TensorSpec& spec, const FeedOptions& options)
    : Feed(source, Specs{spec}, options) {}

Feed::Feed(const NextSample& next, const TensorSpec& spec, const FeedOptions& options)
    : Feed(next, Specs{spec}, options) {}

Feed::Feed(const NextSample& next, const Specs& specs, const FeedOptions& options)
    : state_(std::make_shared<State>(specs, options)) {
  check_limit(options.limit);
  if (!next) throw ConfigError("a feed needs a function that gives samples, got an empty one");
  if (options.preprocess) {
    throw ConfigError(
        "samples of a function are fed as they are, got preprocessing for them; leave it out");
  }
  state_->use_arrays(read_function(next, specs, options.limit), specs, options);
}

Feed::Feed(const fs::path& source, const Specs& specs, const FeedOptions& options)
    : state_(std::make_shared<State>(specs, options)) {
  State& state = *state_;
  Files listing = list_files(source);
  state.notes = listing.notes;
  const std::size_t threads = resolve_threads(options);
  if (are_all_arrays(listing)) {
    state.use_arrays(open_arrays(listing, specs, options), specs, options);
    return;
  }
  (void)images::decoder_version();  // throws where this calib8 decodes none
  if (options.max_pixels < 1 || options.max_pixels > images::kMaxPixels) {
    throw ConfigError("max_pixels must be 1 to " + std::to_string(images::kMaxPixels) + ", got " +
                      std::to_string(options.max_pixels) + "; leave it out for 50,000,000");
  }
  Resolved resolved = resolve_preprocess(specs, options);
  state.notes.insert(state.notes.end(), resolved.notes.begin(), resolved.notes.end());
  state.batch = resolve_batch(specs, options);
  state.chosen = choose_samples(listing.files.size(), options.limit, state.notes);
  if (!options.skip_bad) {
    std::vector<Picture> chosen_files;
    for (const std::size_t index : state.chosen) chosen_files.push_back(listing.files[index]);
    check_files_exist(chosen_files, listing.title);
  }
  state.threads = threads;  // arrays are not decoded: one thread reads them, in the file's order
  state.preprocess = resolved.preprocess;
  state.source = std::make_unique<ImageSource>(std::move(listing.files), specs.front(),
                                               std::move(resolved.preprocess), options.max_pixels);
}

std::unique_ptr<Stream<Sample>> Feed::samples() const {
  return std::make_unique<Stream<Sample>>(
      [state = state_, complete_only = complete_batches_only_](const Stream<Sample>::Put& put) {
        state->produce(put, complete_only);
      });
}

Feed Feed::whole_batches() const {
  if (count() < static_cast<std::size_t>(batch())) {
    throw ConfigError(no_whole_batch_message(count(), batch()));
  }
  Feed batches;
  batches.state_ = state_;
  batches.complete_batches_only_ = true;
  return batches;
}

std::size_t Feed::count() const { return state_->count(); }

std::size_t Feed::size() const {
  const auto batch = static_cast<std::size_t>(state_->batch);
  return (count() + (complete_batches_only_ ? 0 : batch - 1)) / batch;
}

int Feed::batch() const { return state_->batch; }

const std::optional<Preprocess>& Feed::preprocess() const { return state_->preprocess; }

const std::vector<std::string>& Feed::inputs() const { return state_->inputs; }

std::optional<std::vector<int>> Feed::labels() const {
  std::vector<int> labels;
  for (std::size_t k = 0; k < state_->chosen.size(); ++k) {
    const std::optional<int> label = state_->source->label(state_->chosen[k]);
    if (!label) return std::nullopt;
    if (!state_->is_skipped(k)) labels.push_back(*label);
  }
  return labels;
}

std::vector<std::string> Feed::names() const {
  std::vector<std::string> names;
  for (std::size_t k = 0; k < state_->chosen.size(); ++k) {
    if (!state_->is_skipped(k)) names.push_back(state_->source->name(state_->chosen[k]));
  }
  return names;
}

std::vector<std::string> Feed::skipped() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<std::string> reasons;
  for (const auto& [index, reason] : state_->skipped) reasons.push_back(reason);
  return reasons;
}

std::vector<std::string> Feed::notes() const {
  std::vector<std::string> notes = state_->notes;
  const std::vector<std::string> skip_reasons = skipped();
  if (!skip_reasons.empty()) {
    std::string note = std::to_string(skip_reasons.size()) + " skipped: ";
    for (std::size_t k = 0; k < std::min<std::size_t>(3, skip_reasons.size()); ++k) {
      note += (k > 0 ? "; " : "") + skip_reasons[k];
    }
    if (skip_reasons.size() > 3)
      note += " (and " + std::to_string(skip_reasons.size() - 3) + " more)";
    notes.push_back(note);
  }
  const std::size_t fed_count = size() * static_cast<std::size_t>(state_->batch);
  if (complete_batches_only_ && fed_count < count()) {
    notes.push_back("TensorRT calibrates in whole batches, of " + std::to_string(state_->batch) +
                    " samples here: the last " + std::to_string(count() - fed_count) + " of " +
                    std::to_string(count()) + " samples fill none and were left out");
  } else if (!complete_batches_only_ && fed_count > count()) {
    const std::size_t filler_count = fed_count - count();
    std::string filler_samples = "first " + std::to_string(filler_count) + " samples again";
    if (count() == 1) {
      filler_samples = "only sample again and again";
    } else if (filler_count > count()) {
      filler_samples = std::to_string(count()) + " samples that there are again and again";
    } else if (filler_count == 1) {
      filler_samples = "first sample again";
    }
    notes.push_back("the model's batch is " + std::to_string(state_->batch) +
                    ": the last one was filled with the " + filler_samples);
  }
  return notes;
}

std::string Feed::manifest() const {
  std::vector<std::string> digests = state_->digests();
  json_text::Json json;
  json["kind"] = state_->preprocess ? "images" : "arrays";
  json["count"] = state_->chosen.size();
  json["batch"] = state_->batch;
  json["skip_bad"] = state_->skip_bad;
  json["ordered_sha256"] = combine_digests(digests);
  if (state_->batch == 1) std::sort(digests.begin(), digests.end());
  json["sha256"] = combine_digests(digests);
  json["preprocess"] =
      state_->preprocess ? json_text::parse(state_->preprocess->to_json()) : json_text::Json();
  return json.dump();
}

}  // namespace calib8

#include "calib8/feed.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <system_error>

#include "ahead.hpp"
#include "array_file.hpp"
#include "arrays.hpp"
#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/pixels.hpp"
#include "calib8/text.hpp"
#include "json_text.hpp"
#include "machine.hpp"
#include "seen.hpp"
#include "source.hpp"
#include "strewn.hpp"

namespace calib8 {
namespace {

namespace fs = std::filesystem;
using images::Picture;

constexpr int kMostThreads = 1024;

// The first few.
std::string summary(const std::vector<std::string>& names) {
  std::string list;
  for (std::size_t k = 0; k < std::min<std::size_t>(5, names.size()); ++k) {
    list += (list.empty() ? "" : ", ") + names[k];
  }
  return list + (names.size() > 5 ? " and " + std::to_string(names.size() - 5) + " more" : "");
}

// Pictures, or files of arrays.
struct Files {
  std::vector<Picture> files;
  std::string title;  // of all of them, in messages
  bool folder = false;
  std::vector<std::string> notes;
};

Files in_folder(const fs::path& folder) {
  const fs::path last = folder.filename().empty() ? folder.parent_path() : folder;
  const std::string name = last.filename().string();
  Files found{images::find(folder, is_arrays), text::shown(name), true, {}};
  std::vector<Picture> pictures;
  for (const Picture& one : found.files) {
    if (images::is_image(one.path)) pictures.push_back(one);
  }
  const std::size_t left = found.files.size() - pictures.size();
  if (pictures.empty() || left == 0) return found;
  found.files = std::move(pictures);
  found.notes.push_back(std::to_string(left) + " files of arrays among the images of " +
                        found.title + " are not fed");
  return found;
}

Files files_of(const fs::path& path) {
  std::error_code failed;
  if (fs::is_directory(path, failed)) return in_folder(path);
  if (!fs::exists(path, failed)) {
    throw FeedError(text::shown(path.string()) +
                    " does not exist; give a folder of images or arrays, a list file, or a file");
  }
  const std::string name = path.filename().string();
  if (images::is_image(path) || is_arrays(path)) {
    return {{{path, name, std::nullopt}}, text::shown(name), false, {}};
  }
  return {images::read_list(path), text::shown(path.string()), false, {}};
}

// Throws FeedError: some hold arrays, some are pictures.
bool hold_arrays(const Files& given) {
  std::vector<std::string> held;
  for (const Picture& one : given.files) {
    if (is_arrays(one.path)) held.push_back(text::shown(one.name));
  }
  if (held.empty() || held.size() == given.files.size()) return !held.empty();
  throw FeedError(given.title + " must be of images or of arrays, got " +
                  std::to_string(held.size()) + " of " + std::to_string(given.files.size()) +
                  " with arrays: " + summary(held) + "; leave one kind out");
}

void check_present(const std::vector<Picture>& pictures, const std::string& title) {
  std::vector<std::string> missing;
  std::error_code failed;
  for (const Picture& picture : pictures) {
    if (!fs::exists(picture.path, failed)) missing.push_back(text::shown(picture.name));
  }
  if (missing.empty()) return;
  throw FeedError("every image must exist, " + std::to_string(missing.size()) + " of " +
                  std::to_string(pictures.size()) + " in " + title +
                  " do not: " + summary(missing) +
                  "; paths in a list are relative to it; correct the paths or links, or skip bad"
                  " ones (--skip-bad)");
}

void check_limit(const std::optional<std::size_t>& limit) {
  if (limit && *limit < 1) {
    throw ConfigError("limit must be 1 or more, got 0; leave it out to use all");
  }
}

std::vector<std::size_t> choose(std::size_t count, const std::optional<std::size_t>& limit,
                                std::vector<std::string>& notes) {
  check_limit(limit);
  const std::size_t most = std::min(limit.value_or(count), count);
  if (most < count) {
    notes.push_back(std::to_string(most) + " of " + std::to_string(count) +
                    " samples are used, spread evenly over all");
  }
  return some(count, most);
}

// The batch that the inputs fix, else the one that is asked for.
int batch_of(const Specs& specs, const FeedOptions& options) {
  const auto open = [](const TensorSpec& spec) {
    return !spec.shape.empty() && !spec.shape.front().size;
  };
  const bool asked = options.batch && std::any_of(specs.begin(), specs.end(), open);
  const std::int64_t own = asked ? *options.batch : fixed_batch(specs);
  const auto fits = [own](const TensorSpec& spec) {
    return spec.shape.empty() || spec.shape.front().size.value_or(own) >= 1;
  };
  const bool counted = own >= 1 && own <= std::numeric_limits<int>::max() &&
                       std::all_of(specs.begin(), specs.end(), fits);
  if (!counted || (options.batch && *options.batch != own)) {
    throw ConfigError("the batch must fit the input " + specs.front().describe() + ", got " +
                      std::to_string(options.batch ? *options.batch : own) +
                      "; leave it out to take the model's own");
  }
  return static_cast<int>(own);
}

std::size_t threads_of(const FeedOptions& options) {
  const int threads = options.threads.value_or(default_threads());
  if (threads < 1 || threads > kMostThreads) {
    throw ConfigError("threads must be 1 to " + std::to_string(kMostThreads) + ", got " +
                      std::to_string(threads) + "; leave them out for one a core, at most 4");
  }
  return static_cast<std::size_t>(threads);
}

std::string no_whole_batch(std::size_t count, int batch) {
  return "TensorRT calibrates in whole batches, got " + std::to_string(count) +
         " samples for batches of " + std::to_string(batch) +
         "; give more images or a smaller batch";
}

// (1, 3), or (1,): as Python shows a shape.
std::string tuple_of(const std::vector<std::int64_t>& shape) {
  const std::string sides = npy::shown(shape);
  return "(" + sides.substr(1, sides.size() - 2) + (shape.size() == 1 ? ",)" : ")");
}

// Throws FeedError: samples of one batch are of several shapes.
void check_shapes(const std::vector<Sample>& group, std::size_t input) {
  std::set<std::vector<std::int64_t>> shapes;
  for (const Sample& one : group) shapes.insert(one[input].shape);
  if (shapes.size() == 1) return;
  std::string listed;
  for (const auto& shape : shapes) listed += (listed.empty() ? "" : ", ") + tuple_of(shape);
  throw FeedError("samples of one batch must have one shape, got [" + listed + "] for " +
                  text::repr(group.front()[input].name) +
                  "; export the model with an open batch, or give all one size");
}

// Samples of batch 1 as one.
Sample join(const std::vector<Sample>& group) {
  Sample joined = group.front();
  for (std::size_t input = 0; input < joined.size(); ++input) {
    check_shapes(group, input);
    Tensor& tensor = joined[input];
    for (std::size_t k = 1; k < group.size() && !tensor.shape.empty(); ++k) {
      const std::vector<char>& next = group[k][input].bytes;
      tensor.shape.front() += group[k][input].shape.front();
      tensor.bytes.insert(tensor.bytes.end(), next.begin(), next.end());
    }
  }
  return joined;
}

class ImageSource final : public Source {
 public:
  ImageSource(std::vector<Picture> pictures, TensorSpec spec, Preprocess how)
      : pictures_(std::move(pictures)), spec_(std::move(spec)), how_(std::move(how)) {}

  std::size_t size() const override { return pictures_.size(); }
  std::string name(std::size_t index) const override { return pictures_[index].name; }
  std::string told(std::size_t index) const override {
    return "image " + text::shown(pictures_[index].name);
  }
  std::optional<int> label(std::size_t index) const override { return pictures_[index].label; }

  Raw load(std::size_t index) const override {
    auto data = std::make_shared<std::string>(images::read(pictures_[index]));
    std::string digest = Sha256().update(*data).bytes();
    return {std::move(digest), [this, data, index] { return decoded(*data, index); }};
  }

 private:
  Sample decoded(const std::string& data, std::size_t index) const {
    const bool planes = how_.layout != Layout::kNhwc;
    const std::int64_t channels = how_.channels();
    const Size size = *how_.size;
    std::vector<std::int64_t> shape{1, size.height, size.width, channels};
    if (planes) shape = {1, channels, size.height, size.width};
    const bool grey = how_.color == Color::kGrey;
    const bool deep =
        grey && std::abs(how_.scale * 255 - 1) > 1e-3;  // as in Python: all bits count
    const Pixels pixels = images::decode(data, pictures_[index].name, grey, deep);
    return {Tensor::of(spec_.name, std::move(shape), apply(pixels, how_))};
  }

  std::vector<Picture> pictures_;
  TensorSpec spec_;
  Preprocess how_;
};

}  // namespace

struct Feed::State {
  using Decoded = Ahead<std::optional<Sample>>;

  std::unique_ptr<const Source> source;
  std::vector<std::size_t> chosen;  // of the source's samples
  std::optional<Preprocess> how;    // none: of arrays
  std::vector<std::string> inputs;
  int batch = 1;
  std::size_t threads = 1;
  bool skip_bad = false;
  std::vector<std::string> notes;
  mutable std::mutex mutex;
  std::map<std::size_t, std::string> skipped;
  Seen seen;

  State(const Specs& specs, const FeedOptions& options) : skip_bad(options.skip_bad) {
    if (specs.empty()) {
      throw FeedError("a model must have an input to be fed, got none; check the model");
    }
    for (const TensorSpec& spec : specs) inputs.push_back(spec.name);
  }

  void feed_arrays(std::unique_ptr<const Source> arrays, const Specs& specs,
                   const FeedOptions& options) {
    source = std::move(arrays);
    notes = source->notes();
    batch = batch_of(specs, options);
    chosen = choose(source->size(), options.limit, notes);
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
    const std::string name = source->told(chosen[index]);
    try {
      Raw raw = source->load(chosen[index]);
      seen.note(index, raw.digest, name);
      return raw;
    } catch (const Changed&) {
      throw;
    } catch (const FeedError&) {
      seen.note(index, Sha256().bytes(), name);
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
      if (!seen.has(index)) hash(index);
      all.push_back(seen.of(index));
    }
    return all;
  }

  void hash(std::size_t index) {
    try {
      load(index);
    } catch (const FeedError&) {
      if (!skip_bad) throw;
    }
  }

  // The next sample, or nothing where it is bad and bad ones are skipped.
  std::optional<Sample> good(std::size_t index, Decoded& decoded) {
    try {
      return decoded.take();
    } catch (const Changed&) {
      throw;
    } catch (const FeedError& error) {
      if (!skip_bad) {
        throw FeedError(std::string(error.what()) + "; " + std::to_string(chosen.size()) +
                        " were to be fed: correct or remove it, or skip bad ones (--skip-bad)");
      }
      const std::lock_guard lock(mutex);
      skipped[index] = error.what();
      return std::nullopt;
    }
  }

  void produce(const Stream<Sample>::Put& put, bool whole) {
    std::vector<Sample> group;
    std::vector<Sample> first;
    const auto wanted = static_cast<std::size_t>(batch);
    Decoded decoded([this](std::size_t index) { return read(index); }, chosen.size(), threads);
    for (std::size_t index = 0; index < chosen.size(); ++index) {
      std::optional<Sample> one = good(index, decoded);
      if (!one) continue;
      if (batch > 1 && first.size() < wanted) first.push_back(*one);
      group.push_back(std::move(*one));
      if (group.size() < wanted) continue;
      if (!put(join(group))) return;
      group.clear();
    }
    if (count() == 0) {
      const std::lock_guard lock(mutex);
      throw FeedError("at least one sample must be good, all " + std::to_string(chosen.size()) +
                      " were skipped: " + skipped.begin()->second);
    }
    if (whole && count() < wanted) throw FeedError(no_whole_batch(count(), batch));
    if (group.empty() || whole) return;
    for (std::size_t k = 0; group.size() < wanted; ++k) group.push_back(first[k % first.size()]);
    put(join(group));
  }
};

namespace {

std::unique_ptr<Source> arrays_of(const Files& given, const Specs& specs,
                                  const FeedOptions& options) {
  if (options.preprocess) {
    throw ConfigError(
        "files of arrays are fed as they are, got preprocessing for them; leave it out, or feed"
        " images");
  }
  if (given.folder) return array_folder(given.files, specs, given.title, options.skip_bad);
  if (given.files.size() == 1 && !given.files.front().label) {
    return array_file(given.files.front().path, specs);
  }
  return array_files(given.files, specs, given.title, options.skip_bad);
}

Resolved resolved_for(const Specs& specs, const FeedOptions& options) {
  if (specs.size() != 1) {
    std::string all;
    for (const TensorSpec& spec : specs) all += (all.empty() ? "" : ", ") + spec.describe();
    throw FeedError("images feed one input, the model has " + std::to_string(specs.size()) + ": " +
                    all + "; give a folder of .npz files with one array an input");
  }
  Resolved found = resolve(options.preprocess, specs.front());
  if (specs.front().dtype == "float32") return found;
  throw FeedError("images become float32, the input is " + specs.front().describe() +
                  "; feed it arrays from an .npy file");
}

}  // namespace

bool holds_arrays(const fs::path& source) { return hold_arrays(files_of(source)); }

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
  state_->feed_arrays(array_function(next, specs, options.limit), specs, options);
}

Feed::Feed(const fs::path& source, const Specs& specs, const FeedOptions& options)
    : state_(std::make_shared<State>(specs, options)) {
  State& state = *state_;
  Files given = files_of(source);
  state.notes = given.notes;
  const std::size_t threads = threads_of(options);
  if (hold_arrays(given)) {
    state.feed_arrays(arrays_of(given, specs, options), specs, options);
    return;
  }
  (void)images::decoder_version();  // throws where this calib8 decodes none
  Resolved resolved = resolved_for(specs, options);
  state.notes.insert(state.notes.end(), resolved.notes.begin(), resolved.notes.end());
  state.batch = batch_of(specs, options);
  state.chosen = choose(given.files.size(), options.limit, state.notes);
  if (!options.skip_bad) {
    std::vector<Picture> own;
    for (const std::size_t index : state.chosen) own.push_back(given.files[index]);
    check_present(own, given.title);
  }
  state.threads = threads;  // arrays are not decoded: one thread reads them, in the file's order
  state.how = resolved.how;
  state.source =
      std::make_unique<ImageSource>(std::move(given.files), specs.front(), std::move(resolved.how));
}

std::unique_ptr<Stream<Sample>> Feed::samples() const {
  return std::make_unique<Stream<Sample>>(
      [state = state_, whole = whole_](const Stream<Sample>::Put& put) {
        state->produce(put, whole);
      });
}

Feed Feed::whole_batches() const {
  if (count() < static_cast<std::size_t>(batch())) {
    throw ConfigError(no_whole_batch(count(), batch()));
  }
  Feed whole;
  whole.state_ = state_;
  whole.whole_ = true;
  return whole;
}

std::size_t Feed::count() const { return state_->count(); }

std::size_t Feed::size() const {
  const auto batch = static_cast<std::size_t>(state_->batch);
  return (count() + (whole_ ? 0 : batch - 1)) / batch;
}

int Feed::batch() const { return state_->batch; }

const std::optional<Preprocess>& Feed::preprocess() const { return state_->how; }

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
  const std::vector<std::string> bad = skipped();
  if (!bad.empty()) {
    std::string list = std::to_string(bad.size()) + " skipped: ";
    for (std::size_t k = 0; k < std::min<std::size_t>(3, bad.size()); ++k) {
      list += (k > 0 ? "; " : "") + bad[k];
    }
    if (bad.size() > 3) list += " (and " + std::to_string(bad.size() - 3) + " more)";
    notes.push_back(list);
  }
  const std::size_t held = size() * static_cast<std::size_t>(state_->batch);
  if (whole_ && held < count()) {
    notes.push_back("TensorRT calibrates in whole batches, of " + std::to_string(state_->batch) +
                    " samples here: the last " + std::to_string(count() - held) + " of " +
                    std::to_string(count()) + " samples fill none and were left out");
  } else if (!whole_ && held > count()) {
    const std::size_t filler = held - count();
    std::string some = filler > 1 ? "first " + std::to_string(filler) + " samples" : "first sample";
    if (filler > count()) {
      some = count() > 1 ? std::to_string(count()) + " samples that there are" : "only sample";
    }
    notes.push_back("the model's batch is " + std::to_string(state_->batch) +
                    ": the last one was filled with the " + some + " again" +
                    (filler > count() ? " and again" : ""));
  }
  return notes;
}

std::string Feed::manifest() const {
  std::vector<std::string> digests = state_->digests();
  json_text::Json json;
  json["kind"] = state_->how ? "images" : "arrays";
  json["count"] = state_->chosen.size();
  json["batch"] = state_->batch;
  json["skip_bad"] = state_->skip_bad;
  json["ordered_sha256"] = combined(digests);
  if (state_->batch == 1) std::sort(digests.begin(), digests.end());
  json["sha256"] = combined(digests);
  json["preprocess"] = state_->how ? json_text::parse(state_->how->to_json()) : json_text::Json();
  return json.dump();
}

}  // namespace calib8

#include "calib8/feed.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <system_error>

#include "ahead.hpp"
#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/pixels.hpp"
#include "calib8/text.hpp"
#include "machine.hpp"
#include "seen.hpp"

namespace calib8 {
namespace {

namespace fs = std::filesystem;
using images::Picture;

constexpr int kMostThreads = 1024;

std::vector<Picture> pictures_of(const fs::path& path) {
  std::error_code failed;
  if (fs::is_directory(path, failed)) return images::find(path);
  if (!fs::exists(path, failed)) {
    throw FeedError(text::shown(path.string()) +
                    " does not exist; give a folder of images, a list file, an .npy or an .npz"
                    " file");
  }
  if (images::is_image(path)) return {{path, path.filename().string(), std::nullopt}};
  return images::read_list(path);
}

void check_present(const std::vector<Picture>& pictures, const fs::path& path) {
  std::vector<std::string> missing;
  std::error_code failed;
  for (const Picture& picture : pictures) {
    if (!fs::exists(picture.path, failed)) missing.push_back(text::shown(picture.name));
  }
  if (missing.empty()) return;
  std::string list;
  for (std::size_t k = 0; k < std::min<std::size_t>(5, missing.size()); ++k) {
    list += (list.empty() ? "" : ", ") + missing[k];
  }
  if (missing.size() > 5) list += " and " + std::to_string(missing.size() - 5) + " more";
  throw FeedError("every image must exist, " + std::to_string(missing.size()) + " of " +
                  std::to_string(pictures.size()) + " in " + text::shown(path.string()) +
                  " do not: " + list +
                  "; paths are relative to the list file; correct them, or skip bad ones"
                  " (--skip-bad)");
}

std::vector<Picture> choose(std::vector<Picture> all, const std::optional<std::size_t>& limit,
                            std::vector<std::string>& notes) {
  if (limit && *limit < 1) {
    throw ConfigError("limit must be 1 or more, got 0; leave it away to use all");
  }
  if (!limit || *limit >= all.size()) return all;
  notes.push_back(std::to_string(*limit) + " of " + std::to_string(all.size()) +
                  " samples are used, spread evenly over all");
  std::vector<Picture> chosen;
  for (std::size_t k = 0; k < *limit; ++k) chosen.push_back(all[k * all.size() / *limit]);
  return chosen;
}

int batch_of(const TensorSpec& spec, const FeedOptions& options) {
  const std::int64_t own = spec.shape.front().size.value_or(options.batch.value_or(1));
  const bool counted = own >= 1 && own <= std::numeric_limits<int>::max();
  if (!counted || (options.batch && *options.batch != own)) {
    throw ConfigError("the batch must fit the input " + spec.describe() + ", got " +
                      std::to_string(options.batch ? *options.batch : own) +
                      "; leave it away to take the model's own");
  }
  return static_cast<int>(own);
}

std::size_t threads_of(const FeedOptions& options) {
  const int threads = options.threads.value_or(default_threads());
  if (threads < 1 || threads > kMostThreads) {
    throw ConfigError("threads must be 1 to " + std::to_string(kMostThreads) + ", got " +
                      std::to_string(threads) + "; leave them away for one a core, at most 4");
  }
  return static_cast<std::size_t>(threads);
}

std::string no_whole_batch(std::size_t count, int batch) {
  return "TensorRT calibrates in whole batches, got " + std::to_string(count) +
         " samples for batches of " + std::to_string(batch) +
         "; give more images or a smaller batch";
}

Sample join(const std::vector<std::vector<float>>& group, const Preprocess& how) {
  Sample sample;
  const bool planes = how.layout != Layout::kNhwc;
  const auto batch = static_cast<std::int64_t>(group.size());
  sample.shape =
      planes ? std::vector<std::int64_t>{batch, how.channels(), how.size->height, how.size->width}
             : std::vector<std::int64_t>{batch, how.size->height, how.size->width, how.channels()};
  for (const std::vector<float>& one : group) {
    sample.data.insert(sample.data.end(), one.begin(), one.end());
  }
  return sample;
}

}  // namespace

struct Feed::State {
  using Decoded = Ahead<std::optional<std::vector<float>>>;

  std::vector<Picture> pictures;
  Preprocess how;
  int batch = 1;
  std::size_t threads = 1;
  bool skip_bad = false;
  std::vector<std::string> notes;
  mutable std::mutex mutex;
  std::map<std::size_t, std::string> skipped;
  Seen seen;

  std::size_t count() const {
    const std::lock_guard lock(mutex);
    return pictures.size() - skipped.size();
  }

  bool is_skipped(std::size_t index) const {
    const std::lock_guard lock(mutex);
    return skipped.count(index) > 0;
  }

  // A picture's bytes, which are those that were first seen.
  std::string load(std::size_t index) {
    const Picture& picture = pictures[index];
    std::string data;
    try {
      data = images::read(picture);
    } catch (const FeedError&) {
      seen.note(index, Sha256().bytes(), picture.name);
      throw;
    }
    seen.note(index, Sha256().update(data).bytes(), picture.name);
    return data;
  }

  // A picture's sample, or nothing where an earlier pass found it bad; by any number of threads.
  std::optional<std::vector<float>> read(std::size_t index) {
    if (is_skipped(index)) return std::nullopt;
    const std::string data = load(index);
    return apply(images::decode(data, pictures[index].name, how.color == Color::kGrey), how);
  }

  // The digests in the feed's order; what no pass has read yet is read now.
  std::vector<std::string> digests() {
    std::vector<std::string> all;
    for (std::size_t index = 0; index < pictures.size(); ++index) {
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
  std::optional<std::vector<float>> good(std::size_t index, Decoded& decoded) {
    try {
      return decoded.take();
    } catch (const Changed&) {
      throw;
    } catch (const FeedError& error) {
      if (!skip_bad) {
        throw FeedError(std::string(error.what()) + "; " + std::to_string(pictures.size()) +
                        " were to be fed: correct or remove it, or skip bad ones (--skip-bad)");
      }
      const std::lock_guard lock(mutex);
      skipped[index] = error.what();
      return std::nullopt;
    }
  }

  void produce(const Stream<Sample>::Put& put, bool whole) {
    std::vector<std::vector<float>> group;
    std::vector<std::vector<float>> first;
    const auto wanted = static_cast<std::size_t>(batch);
    Decoded decoded([this](std::size_t index) { return read(index); }, pictures.size(), threads);
    for (std::size_t index = 0; index < pictures.size(); ++index) {
      std::optional<std::vector<float>> one = good(index, decoded);
      if (!one) continue;
      if (batch > 1 && first.size() < wanted) first.push_back(*one);
      group.push_back(std::move(*one));
      if (group.size() < wanted) continue;
      if (!put(join(group, how))) return;
      group.clear();
    }
    if (count() == 0) {
      const std::lock_guard lock(mutex);
      throw FeedError("at least one sample must be good, all " + std::to_string(pictures.size()) +
                      " were skipped: " + skipped.begin()->second);
    }
    if (whole && count() < wanted) throw FeedError(no_whole_batch(count(), batch));
    if (group.empty() || whole) return;
    for (std::size_t k = 0; group.size() < wanted; ++k) group.push_back(first[k % first.size()]);
    put(join(group, how));
  }
};

Feed::Feed(const fs::path& source, const TensorSpec& spec, const FeedOptions& options)
    : state_(std::make_shared<State>()) {
  std::vector<Picture> all = pictures_of(source);
  Resolved resolved = resolve(options.preprocess, spec);
  if (spec.dtype != "float32") {
    throw FeedError("images become float32, the input is " + spec.describe() +
                    "; feed it arrays from an .npy file, by Python's calib8");
  }
  state_->notes = std::move(resolved.notes);
  state_->how = std::move(resolved.how);
  state_->batch = batch_of(spec, options);
  state_->threads = threads_of(options);
  state_->skip_bad = options.skip_bad;
  state_->pictures = choose(std::move(all), options.limit, state_->notes);
  if (!options.skip_bad) check_present(state_->pictures, source);
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

const Preprocess& Feed::preprocess() const { return state_->how; }

std::optional<std::vector<int>> Feed::labels() const {
  std::vector<int> labels;
  for (std::size_t k = 0; k < state_->pictures.size(); ++k) {
    if (!state_->pictures[k].label) return std::nullopt;
    if (!state_->is_skipped(k)) labels.push_back(*state_->pictures[k].label);
  }
  return labels;
}

std::vector<std::string> Feed::names() const {
  std::vector<std::string> names;
  for (std::size_t k = 0; k < state_->pictures.size(); ++k) {
    if (!state_->is_skipped(k)) names.push_back(state_->pictures[k].name);
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
    notes.push_back("the model's batch is " + std::to_string(state_->batch) +
                    ": the last one was filled with the first " + std::to_string(filler) +
                    " sample" + (filler > 1 ? "s" : "") + " again");
  }
  return notes;
}

std::string Feed::manifest() const {
  std::vector<std::string> digests = state_->digests();
  nlohmann::ordered_json json;
  json["kind"] = "images";
  json["count"] = state_->pictures.size();
  json["batch"] = state_->batch;
  json["skip_bad"] = state_->skip_bad;
  json["ordered_sha256"] = combined(digests);
  if (state_->batch == 1) std::sort(digests.begin(), digests.end());
  json["sha256"] = combined(digests);
  json["preprocess"] = nlohmann::ordered_json::parse(state_->how.to_json());
  return json.dump();
}

}  // namespace calib8

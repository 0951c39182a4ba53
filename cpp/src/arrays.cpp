#include "arrays.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>

#include "array_file.hpp"
#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/text.hpp"
#include "seen.hpp"

namespace calib8 {
namespace {

namespace fs = std::filesystem;

// Whether the first dimension of the input is a batch.
bool is_batch(const TensorSpec& spec, const Specs& specs) {
  if (spec.shape.empty()) return false;
  const std::optional<std::int64_t>& first = spec.shape.front().size;
  return !first || *first == 1 || *first == fixed_batch(specs);
}

std::string transpose_hint(const std::vector<std::int64_t>& dims, const TensorSpec& spec) {
  constexpr std::size_t kOrders[2][4] = {{0, 3, 1, 2}, {0, 2, 3, 1}};
  for (const auto& order : kOrders) {
    bool fits = dims.size() == 4 && spec.shape.size() == 4;
    for (std::size_t k = 1; fits && k < 4; ++k) {
      fits = spec.shape[k].size.value_or(dims[order[k]]) == dims[order[k]];
    }
    if (!fits) continue;
    std::string words;
    for (const std::size_t axis : order)
      words += (words.empty() ? "" : ", ") + std::to_string(axis);
    return "; turn it with .transpose(" + words + ")";
  }
  return "; give one array of this shape per sample, or a batch of them";
}

void check_array(const npy::Header& header, const TensorSpec& spec, const Specs& specs,
                 const std::string& where) {
  if (header.kind == 0 || header.dtype != spec.dtype) {
    const bool pixels = header.dtype == "uint8";
    throw FeedError(where + " must have the dtype of the input " + spec.describe() + ", got " +
                    text::shown(header.describe()) + "; convert it with .astype('" + spec.dtype +
                    "')" + (pixels ? "; pixels of 0..255 must be preprocessed first" : ""));
  }
  const std::size_t rank = spec.shape.size();
  const bool stacked = header.shape.size() == rank + 1;
  const std::vector<std::int64_t> dims(header.shape.begin() + (stacked ? 1 : 0),
                                       header.shape.end());
  bool fits = dims.size() == rank;
  for (std::size_t at = 0; fits && at < rank; ++at) {
    const bool counts = at == 0 && !stacked && is_batch(spec, specs);
    fits = counts || spec.shape[at].size.value_or(dims[at]) == dims[at];
  }
  if (fits) return;
  throw FeedError(where + " must fit the input " + spec.describe() + ", got " + header.describe() +
                  transpose_hint(dims, spec));
}

// How many samples a file holds. Throws FeedError: a dtype, rank or dimension that is not the
// input's, or counts that differ.
std::size_t rows(const Arrays& arrays, const Specs& specs, const std::string& where) {
  std::vector<std::pair<std::string, std::int64_t>> counts;
  for (const TensorSpec& spec : specs) {
    const npy::Header& header = arrays.at(spec.name).header();
    check_array(header, spec, specs, where);
    if (header.shape.size() > spec.shape.size() || is_batch(spec, specs)) {
      counts.emplace_back(spec.name, header.shape.front());
    }
  }
  const auto differs = [&counts](const auto& one) { return one.second != counts.front().second; };
  if (std::any_of(counts.begin(), counts.end(), differs)) {
    std::string listed;
    for (const auto& [name, count] : counts) {
      listed += (listed.empty() ? "" : ", ") + name + ": " + std::to_string(count);
    }
    throw FeedError("all inputs of " + where + " must have equally many samples, got " + listed);
  }
  return counts.empty() ? 1 : static_cast<std::size_t>(counts.front().second);
}

Tensor tensor_of(const StoredArray& array, const TensorSpec& spec, std::size_t row,
                 const Specs& specs) {
  const npy::Header& header = array.header();
  Tensor tensor{spec.name, spec.dtype, header.shape, {}};
  if (header.shape.size() > spec.shape.size()) {
    tensor.shape.erase(tensor.shape.begin());
  } else if (is_batch(spec, specs)) {
    tensor.shape.front() = 1;
  } else {
    tensor.bytes = array.whole();
    return tensor;
  }
  tensor.bytes = array.place(row);
  return tensor;
}

// Over the name, dtype, shape and values of every array.
std::string digest_of(const Sample& sample) {
  Sha256 digest;
  for (const Tensor& tensor : sample) {
    std::string head = tensor.name;
    head += '\0' + npy::descr_of(tensor.dtype);
    head += '\0' + npy::shown(tensor.shape);
    head += '\0';
    digest.update(head).update({tensor.bytes.data(), tensor.bytes.size()});
  }
  return digest.bytes();
}

// Of float16, float32 or float64: what has all bits of the exponent set.
template <class Bits>
std::size_t not_finite(const std::vector<char>& bytes, Bits exponent) {
  std::size_t bad = 0;
  for (std::size_t at = 0; at + sizeof(Bits) <= bytes.size(); at += sizeof(Bits)) {
    Bits bits = 0;
    std::memcpy(&bits, bytes.data() + at, sizeof bits);
    if ((bits & exponent) == exponent) ++bad;
  }
  return bad;
}

void check_finite(const Tensor& tensor, const std::string& where) {
  std::size_t bad = 0;
  if (tensor.dtype == "float16") bad = not_finite<std::uint16_t>(tensor.bytes, 0x7C00);
  if (tensor.dtype == "float32") bad = not_finite<std::uint32_t>(tensor.bytes, 0x7F800000);
  if (tensor.dtype == "float64") bad = not_finite<std::uint64_t>(tensor.bytes, 0x7FFULL << 52U);
  if (bad == 0) return;
  throw FeedError(where + " holds " + std::to_string(bad) + " NaN or Inf values for the input " +
                  text::repr(tensor.name));
}

// A file of all inputs ("" -> file), or one file an input.
using Part = std::map<std::string, fs::path>;

std::shared_ptr<const Held> held_of(const Part& part, const Specs& specs) {
  const auto only = part.find("");
  if (only != part.end()) return std::make_shared<Held>(read_arrays(only->second, specs));
  auto held = std::make_shared<Held>();
  for (const TensorSpec& spec : specs) {
    Held one = read_arrays(part.at(spec.name), {spec});
    held->arrays.merge(one.arrays);
  }
  return held;
}

std::string files_of(const Part& part, const Specs& specs) {
  if (part.count("") > 0) return text::shown(part.at("").filename().string());
  std::string words;
  for (const TensorSpec& spec : specs) {
    words += words.empty() ? "" : " and ";
    words += text::shown(part.at(spec.name).filename().string());
  }
  return words;
}

// Where the values of an input are in the temporary file of what a function gave.
struct Place {
  std::uint64_t at;
  std::vector<std::int64_t> shape;
};

class ArraySource final : public Source {
 public:
  Specs specs;
  std::shared_ptr<PlacedFile> store;      // null where there are parts
  std::vector<std::vector<Place>> items;  // in the store, each with its inputs in order
  std::vector<Part> parts;
  std::vector<std::size_t> ends;  // of each file, the samples up to its last
  std::string title;
  std::vector<std::string> called;  // of each file; empty where there is one alone
  std::vector<int> labels;          // empty where there are none
  bool cut = false;                 // whether more than the store has may have come

  std::size_t size() const override { return ends.empty() ? 0 : ends.back(); }

  std::string name(std::size_t index) const override {
    if (called.empty()) return "sample " + std::to_string(index) + " of " + title;
    const auto [where, row] = place(index);
    const std::size_t count = ends[where] - (index - row);
    return count == 1 ? called[where] : "sample " + std::to_string(row) + " of " + called[where];
  }

  std::string told(std::size_t index) const override { return name(index); }

  std::optional<int> label(std::size_t index) const override {
    return labels.empty() ? std::nullopt : std::optional<int>(labels[index]);
  }

  Raw load(std::size_t index) const override {
    const auto [where, row] = place(index);
    const std::shared_ptr<const Held> held = opened(where);
    auto sample = std::make_shared<Sample>();
    for (const TensorSpec& spec : specs) {
      sample->push_back(tensor_of(held->arrays.at(spec.name), spec, row, specs));
    }
    return {digest_of(*sample), [sample, name = name(index)] {
              for (const Tensor& tensor : *sample) check_finite(tensor, name);
              return std::move(*sample);
            }};
  }

  std::vector<std::string> notes() const override {
    if (!store) return {};
    return {title + " was read once into a temporary file (" + (cut ? "the first " : "") +
            std::to_string(size()) + " samples)"};
  }

  // The file that was opened last stays open: its samples are read one after the other.
  void keep(std::size_t where, std::shared_ptr<const Held> held) const {
    const std::lock_guard lock(mutex_);
    last_ = where;
    held_ = std::move(held);
  }

 private:
  std::pair<std::size_t, std::size_t> place(std::size_t index) const {
    const auto end = std::upper_bound(ends.begin(), ends.end(), index);
    const auto where = static_cast<std::size_t>(end - ends.begin());
    return {where, index - (where > 0 ? ends[where - 1] : 0)};
  }

  std::shared_ptr<const Held> stored(std::size_t where) const {
    auto held = std::make_shared<Held>();
    for (std::size_t k = 0; k < specs.size(); ++k) {
      const Place& place = items[where][k];
      npy::Header header = npy::of(specs[k].dtype, place.shape, UINT64_MAX);
      held->arrays.emplace(specs[k].name, StoredArray(store, std::move(header), place.at));
    }
    return held;
  }

  std::shared_ptr<const Held> opened(std::size_t where) const {
    if (store) return stored(where);
    {
      const std::lock_guard lock(mutex_);
      if (held_ && last_ == where) return held_;
    }
    const std::shared_ptr<const Held> held = held_of(parts[where], specs);
    const std::size_t count = ends[where] - (where > 0 ? ends[where - 1] : 0);
    if (rows(held->arrays, specs, called[where]) < count) {
      throw Changed(called[where] + " changed while calib8 ran; do not change it during a run");
    }
    keep(where, held);
    return held;
  }

  mutable std::mutex mutex_;
  mutable std::size_t last_ = 0;
  mutable std::shared_ptr<const Held> held_;
};

void check_labels(const Held& held, std::size_t count, const std::string& where) {
  if (!held.labels || held.labels->size() == count) return;
  throw FeedError(where + " must have one label per sample, got " +
                  std::to_string(held.labels->size()) + " for " + std::to_string(count));
}

// The file's samples are counted into the source. Throws FeedError: it does not fit.
std::shared_ptr<const Held> count_in(ArraySource& source, const Part& part) {
  const std::shared_ptr<const Held> held = held_of(part, source.specs);
  const std::string where = files_of(part, source.specs);
  const std::size_t count = rows(held->arrays, source.specs, where);
  check_labels(*held, count, where);
  source.parts.push_back(part);
  source.ends.push_back(source.size() + count);
  if (held->labels) {
    source.labels.insert(source.labels.end(), held->labels->begin(), held->labels->end());
  }
  return held;
}

void require_samples(const ArraySource& source) {
  if (source.size() == 0) throw FeedError(source.title + " must hold samples, got none");
}

std::unique_ptr<ArraySource> sourced(const std::vector<Part>& parts,
                                     const std::vector<std::string>& called, const Specs& specs,
                                     const std::string& title, bool skip_bad) {
  auto source = std::make_unique<ArraySource>();
  source->specs = specs;
  source->title = title;
  for (const std::string& one : called) source->called.push_back(text::shown(one));
  for (const Part& part : parts) {
    try {
      count_in(*source, part);
    } catch (const FeedError&) {
      if (!skip_bad) throw;
      source->parts.push_back(part);  // it says so again when it is its turn
      source->ends.push_back(source->size() + 1);
    }
  }
  require_samples(*source);
  if (source->labels.size() != source->size()) source->labels.clear();
  return source;
}

// One folder an input; files of one name are one item.
std::unique_ptr<Source> side_by_side(const std::vector<images::Picture>& files, const Specs& specs,
                                     const std::string& title, bool skip_bad) {
  std::map<std::string, Part> inside;  // name without suffix -> input -> file
  for (const images::Picture& one : files) {
    const std::size_t slash = one.name.find('/');
    const fs::path rest = fs::path(one.name.substr(slash + 1));
    inside[(rest.parent_path() / rest.stem()).string()][one.name.substr(0, slash)] = one.path;
  }
  std::vector<Part> parts;
  std::vector<std::string> stems;
  for (const TensorSpec& spec : specs) {
    std::vector<std::string> missing;
    for (const auto& [stem, part] : inside) {
      if (part.count(spec.name) == 0) missing.push_back(stem);
    }
    if (missing.empty()) continue;
    throw FeedError("every input's folder in " + title +
                    " must have files of the same names, got " + std::to_string(missing.size()) +
                    " missing in " + text::shown(spec.name) + ", the first " +
                    text::shown(missing.front()) + "; add them");
  }
  for (const auto& [stem, part] : inside) {
    stems.push_back(stem);
    parts.push_back(part);
  }
  return sourced(parts, stems, specs, title, skip_bad);
}

// The tensor of each input. Throws FeedError: others are there.
std::vector<const Tensor*> by_input(const Sample& sample, const Specs& specs,
                                    const std::string& where) {
  if (specs.size() == 1 && sample.size() == 1) return {&sample.front()};
  std::vector<const Tensor*> found;
  std::vector<std::string> wanted;
  std::vector<std::string> got;
  for (const TensorSpec& spec : specs) {
    const auto named = [&spec](const Tensor& tensor) { return tensor.name == spec.name; };
    const auto one = std::find_if(sample.begin(), sample.end(), named);
    if (one != sample.end()) found.push_back(&*one);
    wanted.push_back(spec.name);
  }
  if (found.size() == specs.size() && sample.size() == specs.size()) return found;
  for (const Tensor& tensor : sample) got.push_back(tensor.name);
  std::sort(got.begin(), got.end());
  throw FeedError(where + " must name the inputs " + text::repr(wanted) + ", got " +
                  text::repr(got) + "; name its arrays as the model does");
}

// Throws FeedError: the tensor has more or fewer bytes than its shape says.
npy::Header header_of(const Tensor& tensor, const std::string& where) {
  const std::uint64_t size = tensor.bytes.size();
  try {
    npy::Header header = npy::of(tensor.dtype, tensor.shape, size);
    if (header.kind == 0 || header.bytes == size) return header;
  } catch (const npy::Broken&) {  // too few
  }
  throw FeedError(where + " must hold as many bytes as its shape says, got " +
                  std::to_string(size) + " for " + tensor.dtype + " " + npy::shown(tensor.shape) +
                  "; fill Tensor::bytes");
}

// 100,000
std::string grouped(std::size_t number) {
  std::string digits = std::to_string(number);
  for (std::size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, ",");
  return digits;
}

constexpr std::size_t kMostSamples = 100'000;  // of a function without a limit

// Appends what a function gave to the source. Throws FeedError: it does not fit the inputs.
std::size_t keep_item(ArraySource& source, const Sample& sample) {
  const Specs& specs = source.specs;
  const std::string where = "item " + std::to_string(source.items.size()) + " of " + source.title;
  const std::vector<const Tensor*> tensors = by_input(sample, specs, where);
  std::uint64_t at = source.store->size();
  Arrays arrays;
  std::vector<Place> places;
  for (std::size_t k = 0; k < specs.size(); ++k) {
    npy::Header header = header_of(*tensors[k], where);
    if (header.shape.size() + 1 == specs[k].shape.size()) {
      header.shape.insert(header.shape.begin(), 1);
    }
    places.push_back({at, header.shape});
    arrays.emplace(specs[k].name, StoredArray(source.store, std::move(header), at));
    at += tensors[k]->bytes.size();
  }
  const std::size_t count = rows(arrays, specs, where);
  if (count == 0) throw FeedError(where + " must hold samples, got none");
  for (const Tensor* tensor : tensors) {
    source.store->append({tensor->bytes.data(), tensor->bytes.size()});
  }
  source.items.push_back(std::move(places));
  return count;
}

}  // namespace

std::unique_ptr<Source> array_function(const NextSample& next, const Specs& specs,
                                       const std::optional<std::size_t>& limit) {
  auto source = std::make_unique<ArraySource>();
  source->specs = specs;
  source->title = "the function";
  source->store = std::make_shared<PlacedFile>();
  while (!limit || source->size() < *limit) {
    const std::optional<Sample> sample = next();
    if (!sample) break;
    const std::size_t total = source->size() + keep_item(*source, *sample);
    source->ends.push_back(std::min(total, limit.value_or(total)));
    if (limit || total <= kMostSamples) continue;
    throw FeedError(source->title + " must end, got " + grouped(total) +
                    " samples and no end; set a maximum number of samples (FeedOptions::limit), and"
                    " the first ones are used");
  }
  if (source->size() == 0) throw FeedError(source->title + " must give samples, got none");
  source->cut = source->size() == limit;
  return source;
}

std::int64_t fixed_batch(const Specs& specs) {
  std::optional<std::int64_t> only;
  for (const TensorSpec& spec : specs) {
    if (spec.shape.empty()) continue;
    const std::int64_t first = spec.shape.front().size.value_or(0);
    if (first < 1 || (only && *only != first)) return 1;
    only = first;
  }
  return only.value_or(1);
}

std::unique_ptr<Source> array_file(const fs::path& path, const Specs& specs) {
  auto source = std::make_unique<ArraySource>();
  source->specs = specs;
  source->title = text::shown(path.filename().string());
  source->keep(0, count_in(*source, {{"", path}}));
  require_samples(*source);
  return source;
}

std::unique_ptr<Source> array_files(const std::vector<images::Picture>& files, const Specs& specs,
                                    const std::string& title, bool skip_bad) {
  std::vector<Part> parts;
  std::vector<std::string> names;
  for (const images::Picture& one : files) {
    parts.push_back({{"", one.path}});
    names.push_back(one.name);
  }
  std::unique_ptr<ArraySource> source = sourced(parts, names, specs, title, skip_bad);
  if (!files.front().label) return source;
  source->labels.clear();  // the list's are those of all samples of a file
  for (std::size_t k = 0; k < files.size(); ++k) {
    source->labels.resize(source->ends[k], files[k].label.value_or(0));
  }
  return source;
}

std::unique_ptr<Source> array_folder(const std::vector<images::Picture>& files, const Specs& specs,
                                     const std::string& title, bool skip_bad) {
  std::set<std::string> tops;
  std::set<std::string> inputs;
  for (const images::Picture& one : files) {
    const std::size_t slash = one.name.find('/');
    if (slash != std::string::npos) tops.insert(one.name.substr(0, slash));
  }
  for (const TensorSpec& spec : specs) inputs.insert(spec.name);
  if (specs.size() > 1 && tops == inputs) return side_by_side(files, specs, title, skip_bad);
  return array_files(files, specs, title, skip_bad);
}

}  // namespace calib8

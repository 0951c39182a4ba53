#include "arrays.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>

#include "array_file.hpp"
#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/text.hpp"
#include "sample_digests.hpp"

namespace calib8 {
namespace {

namespace fs = std::filesystem;

// Whether an input [3, H, W] is an image without a batch dimension.
bool is_unbatched_image(const TensorSpec& spec) {
  const auto is_side = [](const Dim& dim) { return dim.size.value_or(0) > 3; };
  return spec.shape.size() == 3 && spec.shape[0].size == 3 && is_side(spec.shape[1]) &&
         is_side(spec.shape[2]);
}

// Whether the first dimension of the input is a batch.
bool is_batch(const TensorSpec& spec, const Specs& specs) {
  if (spec.shape.empty()) return false;
  const std::optional<std::int64_t>& first = spec.shape.front().size;
  return !first || *first == 1 || *first == fixed_batch(specs);
}

// Whether a shape is that of a single sample of the input, without the batch dimension.
bool lacks_batch(const std::vector<std::int64_t>& shape, const TensorSpec& spec) {
  bool fits = shape.size() + 1 == spec.shape.size();
  for (std::size_t axis = 0; fits && axis < shape.size(); ++axis) {
    fits = spec.shape[axis + 1].size.value_or(shape[axis]) == shape[axis];
  }
  return fits;
}

std::string transpose_hint(const std::vector<std::int64_t>& dims, const TensorSpec& spec) {
  constexpr std::size_t kOrders[2][4] = {{0, 3, 1, 2}, {0, 2, 3, 1}};
  for (const auto& order : kOrders) {
    bool fits = dims.size() == 4 && spec.shape.size() == 4;
    for (std::size_t k = 1; fits && k < 4; ++k) {
      fits = spec.shape[k].size.value_or(dims[order[k]]) == dims[order[k]];
    }
    if (!fits) continue;
    std::string axis_list;
    for (const std::size_t axis : order)
      axis_list += (axis_list.empty() ? "" : ", ") + std::to_string(axis);
    return "; turn it with .transpose(" + axis_list + ")";
  }
  return "; give one array of this shape per sample, or a batch of them";
}

void check_array(const npy::Header& header, const TensorSpec& spec, const Specs& specs,
                 const std::string& file_name) {
  if (header.kind == 0 || header.dtype != spec.dtype) {
    const bool is_uint8 = header.dtype == "uint8";
    throw FeedError(file_name + " must have the dtype of the input " + spec.describe() + ", got " +
                    text::printable(header.describe()) + "; convert it with .astype('" +
                    spec.dtype + "')" +
                    (is_uint8 ? "; pixels of 0..255 must be preprocessed first" : ""));
  }
  const std::size_t rank = spec.shape.size();
  const bool stacked = header.shape.size() == rank + 1;
  const std::vector<std::int64_t> dims(header.shape.begin() + (stacked ? 1 : 0),
                                       header.shape.end());
  bool fits = dims.size() == rank;
  for (std::size_t axis = 0; fits && axis < rank; ++axis) {
    const bool is_batch_axis = axis == 0 && !stacked && is_batch(spec, specs);
    fits = is_batch_axis || spec.shape[axis].size.value_or(dims[axis]) == dims[axis];
  }
  if (fits) return;
  throw FeedError(file_name + " must fit the input " + spec.describe() + ", got " +
                  header.describe() + transpose_hint(dims, spec));
}

// The number of samples in a file. Throws FeedError: a dtype, rank or dimension that is not the
// input's, or counts that differ.
std::size_t count_rows(const Arrays& arrays, const Specs& specs, const std::string& file_name) {
  std::vector<std::pair<std::string, std::int64_t>> counts;
  for (const TensorSpec& spec : specs) {
    const npy::Header& header = arrays.at(spec.name).header();
    check_array(header, spec, specs, file_name);
    if (header.shape.size() > spec.shape.size() || is_batch(spec, specs)) {
      counts.emplace_back(spec.name, header.shape.front());
    }
  }
  const auto differs_from_first = [&counts](const auto& one) {
    return one.second != counts.front().second;
  };
  if (std::any_of(counts.begin(), counts.end(), differs_from_first)) {
    std::string count_list;
    for (const auto& [name, count] : counts) {
      count_list += (count_list.empty() ? "" : ", ") + name + ": " + std::to_string(count);
    }
    throw FeedError("all inputs of " + file_name + " must have equally many samples, got " +
                    count_list);
  }
  return counts.empty() ? 1 : static_cast<std::size_t>(counts.front().second);
}

// Whether an array has one dimension more than its input.
bool has_stacked_samples(const Arrays& arrays, const Specs& specs) {
  return std::any_of(specs.begin(), specs.end(), [&arrays](const TensorSpec& spec) {
    return arrays.at(spec.name).header().shape.size() > spec.shape.size();
  });
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
    tensor.bytes = array.all_values();
    return tensor;
  }
  tensor.bytes = array.slice(row);
  return tensor;
}

// Over the name, dtype, shape and values of every array.
std::string digest_of(const Sample& sample) {
  Sha256 digest;
  for (const Tensor& tensor : sample) {
    std::string header = tensor.name;
    header += '\0' + npy::descr_of(tensor.dtype);
    header += '\0' + npy::format_shape(tensor.shape);
    header += '\0';
    digest.update(header).update({tensor.bytes.data(), tensor.bytes.size()});
  }
  return digest.bytes();
}

// Count the float16, float32 or float64 values that are NaN or infinite: all bits of the exponent are set.
template <class Bits>
std::size_t count_not_finite(const std::vector<char>& bytes, Bits exponent) {
  std::size_t count = 0;
  for (std::size_t offset = 0; offset + sizeof(Bits) <= bytes.size(); offset += sizeof(Bits)) {
    Bits bits = 0;
    std::memcpy(&bits, bytes.data() + offset, sizeof bits);
    if ((bits & exponent) == exponent) ++count;
  }
  return count;
}

void require_finite(const Tensor& tensor, const std::string& file_name) {
  std::size_t bad_count = 0;
  if (tensor.dtype == "float16") bad_count = count_not_finite<std::uint16_t>(tensor.bytes, 0x7C00);
  if (tensor.dtype == "float32")
    bad_count = count_not_finite<std::uint32_t>(tensor.bytes, 0x7F800000);
  if (tensor.dtype == "float64")
    bad_count = count_not_finite<std::uint64_t>(tensor.bytes, 0x7FFULL << 52U);
  if (bad_count == 0) return;
  throw FeedError(file_name + " holds " + std::to_string(bad_count) +
                  " NaN or Inf values for the input " + text::repr(tensor.name));
}

// One file with all inputs ("" -> file), or one file an input (input -> file).
using FilesByInput = std::map<std::string, fs::path>;

std::shared_ptr<const FileArrays> read_file_arrays(const FilesByInput& files, const Specs& specs) {
  auto file_arrays = std::make_shared<FileArrays>();
  const auto single_file = files.find("");
  if (single_file != files.end()) {
    *file_arrays = read_arrays(single_file->second, specs);
  } else {
    for (const TensorSpec& spec : specs) {
      FileArrays input_arrays = read_arrays(files.at(spec.name), {spec});
      file_arrays->arrays.merge(input_arrays.arrays);
    }
  }
  for (const TensorSpec& spec : specs) {
    StoredArray& array = file_arrays->arrays.at(spec.name);
    if (is_batch(spec, specs) && lacks_batch(array.header().shape, spec)) array.add_batch();
  }
  return file_arrays;
}

std::string describe_files(const FilesByInput& files, const Specs& specs) {
  if (files.count("") > 0) return text::printable(files.at("").filename().string());
  std::string name_list;
  for (const TensorSpec& spec : specs) {
    name_list += name_list.empty() ? "" : " and ";
    name_list += text::printable(files.at(spec.name).filename().string());
  }
  return name_list;
}

// Where the values of one input lie in the temporary file with the samples of a function.
struct StoredValues {
  std::uint64_t offset;
  std::vector<std::int64_t> shape;
};

class ArraySource final : public Source {
 public:
  Specs specs;
  std::shared_ptr<RandomAccessFile> store;       // null where the samples are in files
  std::vector<std::vector<StoredValues>> items;  // in the store; one entry an input, in order
  std::vector<FilesByInput> file_groups;
  std::vector<std::size_t> ends;  // for each file, the number of samples up to its last one
  std::string title;
  std::vector<std::string> file_names;  // one a file; empty where there is only one file
  std::vector<int> labels;              // empty where there are none
  bool is_limited = false;              // whether the limit ended the reading
  bool is_stacked = false;              // whether samples have a batch dimension of their own

  std::size_t size() const override { return ends.empty() ? 0 : ends.back(); }

  std::string name(std::size_t index) const override {
    if (file_names.empty()) return "sample " + std::to_string(index) + " of " + title;
    const auto [file_index, row] = locate(index);
    const std::size_t count = ends[file_index] - (index - row);
    return count == 1 ? file_names[file_index]
                      : "sample " + std::to_string(row) + " of " + file_names[file_index];
  }

  std::string description(std::size_t index) const override { return name(index); }

  std::optional<int> label(std::size_t index) const override {
    return labels.empty() ? std::nullopt : std::optional<int>(labels[index]);
  }

  Raw load(std::size_t index) const override {
    const auto [file_index, row] = locate(index);
    const std::shared_ptr<const FileArrays> file_arrays = open_file(file_index);
    auto sample = std::make_shared<Sample>();
    for (const TensorSpec& spec : specs) {
      sample->push_back(tensor_of(file_arrays->arrays.at(spec.name), spec, row, specs));
    }
    return {digest_of(*sample), [sample, name = name(index)] {
              for (const Tensor& tensor : *sample) require_finite(tensor, name);
              return std::move(*sample);
            }};
  }

  std::vector<std::string> notes() const override {
    if (!store) return {};
    return {title + " was read once into a temporary file (" + (is_limited ? "the first " : "") +
            std::to_string(size()) + " samples)"};
  }

  bool has_batches() const override { return is_stacked; }

  // Keeps the file that was opened last open: its samples are read one after the other.
  void cache_file(std::size_t file_index, std::shared_ptr<const FileArrays> file_arrays) const {
    const std::lock_guard lock(mutex_);
    last_file_ = file_index;
    last_arrays_ = std::move(file_arrays);
  }

 private:
  std::pair<std::size_t, std::size_t> locate(std::size_t index) const {
    const auto end = std::upper_bound(ends.begin(), ends.end(), index);
    const auto file_index = static_cast<std::size_t>(end - ends.begin());
    return {file_index, index - (file_index > 0 ? ends[file_index - 1] : 0)};
  }

  std::shared_ptr<const FileArrays> open_stored_item(std::size_t file_index) const {
    auto file_arrays = std::make_shared<FileArrays>();
    for (std::size_t k = 0; k < specs.size(); ++k) {
      const StoredValues& values = items[file_index][k];
      npy::Header header = npy::make_header(specs[k].dtype, values.shape, UINT64_MAX);
      file_arrays->arrays.emplace(specs[k].name,
                                  StoredArray(store, std::move(header), values.offset));
    }
    return file_arrays;
  }

  std::shared_ptr<const FileArrays> open_file(std::size_t file_index) const {
    if (store) return open_stored_item(file_index);
    {
      const std::lock_guard lock(mutex_);
      if (last_arrays_ && last_file_ == file_index) return last_arrays_;
    }
    const std::shared_ptr<const FileArrays> file_arrays =
        read_file_arrays(file_groups[file_index], specs);
    const std::size_t count = ends[file_index] - (file_index > 0 ? ends[file_index - 1] : 0);
    if (count_rows(file_arrays->arrays, specs, file_names[file_index]) < count) {
      throw SampleChanged(file_names[file_index] +
                          " changed while calib8 ran; do not change it during a run");
    }
    cache_file(file_index, file_arrays);
    return file_arrays;
  }

  mutable std::mutex mutex_;
  mutable std::size_t last_file_ = 0;
  mutable std::shared_ptr<const FileArrays> last_arrays_;
};

void check_labels(const FileArrays& file_arrays, std::size_t count, const std::string& file_name) {
  if (!file_arrays.labels || file_arrays.labels->size() == count) return;
  throw FeedError(file_name + " must have one label per sample, got " +
                  std::to_string(file_arrays.labels->size()) + " for " + std::to_string(count));
}

// Adds the file's samples to the source. Throws FeedError: it does not fit the inputs.
std::shared_ptr<const FileArrays> add_file(ArraySource& source, const FilesByInput& files) {
  const std::shared_ptr<const FileArrays> file_arrays = read_file_arrays(files, source.specs);
  const std::string file_name = describe_files(files, source.specs);
  const std::size_t count = count_rows(file_arrays->arrays, source.specs, file_name);
  check_labels(*file_arrays, count, file_name);
  if (source.size() == 0) {
    source.is_stacked = has_stacked_samples(file_arrays->arrays, source.specs);
  }
  source.file_groups.push_back(files);
  source.ends.push_back(source.size() + count);
  if (file_arrays->labels) {
    source.labels.insert(source.labels.end(), file_arrays->labels->begin(),
                         file_arrays->labels->end());
  }
  return file_arrays;
}

void require_samples(const ArraySource& source) {
  if (source.size() == 0) throw FeedError(source.title + " must hold samples, got none");
}

std::unique_ptr<ArraySource> make_source(const std::vector<FilesByInput>& file_groups,
                                         const std::vector<std::string>& file_names,
                                         const Specs& specs, const std::string& title,
                                         bool skip_bad) {
  auto source = std::make_unique<ArraySource>();
  source->specs = specs;
  source->title = title;
  for (const std::string& name : file_names) source->file_names.push_back(text::printable(name));
  for (const FilesByInput& files : file_groups) {
    try {
      add_file(*source, files);
    } catch (const FeedError&) {
      if (!skip_bad) throw;
      source->file_groups.push_back(files);  // loading it throws the same error when it is its turn
      source->ends.push_back(source->size() + 1);
    }
  }
  require_samples(*source);
  if (source->labels.size() != source->size()) source->labels.clear();
  return source;
}

std::vector<std::string> split_words(std::string_view line) {
  std::vector<std::string> words;
  while (!line.empty()) {
    const auto [start, last_word] = text::split_last(line);
    words.emplace_back(last_word.empty() ? start : last_word);
    line = last_word.empty() ? last_word : start;
  }
  std::reverse(words.begin(), words.end());
  return words;
}

// A line of a list names the file of all inputs, or one file an input, separated by spaces.
FilesByInput files_of_line(const images::Picture& file, const Specs& specs) {
  const std::vector<std::string> names = split_words(file.name);
  std::error_code failed;
  if (names.size() == 1 || fs::exists(file.path, failed)) return {{"", file.path}};
  if (names.size() != specs.size()) {
    std::vector<std::string> input_names;
    for (const TensorSpec& spec : specs) input_names.push_back(spec.name);
    throw FeedError(text::printable(file.name) +
                    " must name one file of all inputs or one for each of " +
                    text::repr(input_names) + ", got " + std::to_string(names.size()));
  }
  const std::string path = file.path.string();
  const fs::path folder = path.substr(0, path.size() - file.name.size());
  FilesByInput files;
  for (std::size_t k = 0; k < specs.size(); ++k) files[specs[k].name] = folder / names[k];
  return files;
}

// One folder an input; files of one name are one item.
std::unique_ptr<Source> join_input_folders(const std::vector<images::Picture>& files,
                                           const Specs& specs, const std::string& title,
                                           bool skip_bad) {
  std::map<std::string, FilesByInput> files_by_stem;  // name without suffix -> input -> file
  for (const images::Picture& file : files) {
    const std::size_t slash = file.name.find('/');
    if (slash == std::string::npos) continue;  // it lies beside the folders
    const std::string input = file.name.substr(0, slash);
    const fs::path path_below = fs::path(file.name.substr(slash + 1));
    const std::string stem = (path_below.parent_path() / path_below.stem()).string();
    const auto [entry, is_first] = files_by_stem[stem].emplace(input, file.path);
    if (is_first) continue;
    throw FeedError("every input's folder in " + title +
                    " must have one file of a name, suffix aside, got " +
                    text::printable(entry->second.filename().string()) + " and " +
                    text::printable(file.path.filename().string()) + " in " +
                    text::printable(input) + "; remove one");
  }
  std::vector<FilesByInput> file_groups;
  std::vector<std::string> stems;
  for (const TensorSpec& spec : specs) {
    std::vector<std::string> missing;
    for (const auto& [stem, input_files] : files_by_stem) {
      if (input_files.count(spec.name) == 0) missing.push_back(stem);
    }
    if (missing.empty()) continue;
    throw FeedError("every input's folder in " + title +
                    " must have files of the same names, got " + std::to_string(missing.size()) +
                    " missing in " + text::printable(spec.name) + ", the first " +
                    text::printable(missing.front()) + "; add them");
  }
  for (const auto& [stem, input_files] : files_by_stem) {
    stems.push_back(stem);
    file_groups.push_back(input_files);
  }
  return make_source(file_groups, stems, specs, title, skip_bad);
}

// The tensor of each input. Throws FeedError: the sample has other tensors.
std::vector<const Tensor*> match_inputs(const Sample& sample, const Specs& specs,
                                        const std::string& file_name) {
  if (specs.size() == 1 && sample.size() == 1) return {&sample.front()};
  std::vector<const Tensor*> tensors;
  std::vector<std::string> input_names;
  std::vector<std::string> tensor_names;
  for (const TensorSpec& spec : specs) {
    const auto has_input_name = [&spec](const Tensor& tensor) { return tensor.name == spec.name; };
    const auto match = std::find_if(sample.begin(), sample.end(), has_input_name);
    if (match != sample.end()) tensors.push_back(&*match);
    input_names.push_back(spec.name);
  }
  if (tensors.size() == specs.size() && sample.size() == specs.size()) return tensors;
  for (const Tensor& tensor : sample) tensor_names.push_back(tensor.name);
  std::sort(tensor_names.begin(), tensor_names.end());
  throw FeedError(file_name + " must name the inputs " + text::repr(input_names) + ", got " +
                  text::repr(tensor_names) + "; name its arrays as the model does");
}

// Throws FeedError: the tensor has more or fewer bytes than its shape says.
npy::Header header_of(const Tensor& tensor, const std::string& file_name) {
  const std::uint64_t size = tensor.bytes.size();
  try {
    npy::Header header = npy::make_header(tensor.dtype, tensor.shape, size);
    if (header.kind == 0 || header.bytes == size) return header;
  } catch (const npy::Broken&) {  // too few
  }
  throw FeedError(file_name + " must hold as many bytes as its shape says, got " +
                  std::to_string(size) + " for " + tensor.dtype + " " +
                  npy::format_shape(tensor.shape) + "; fill Tensor::bytes");
}

constexpr std::size_t kMaxSamples = 100'000;  // of a function without a limit

// Appends what a function gave to the source. Throws FeedError: it does not fit the inputs.
std::size_t append_item(ArraySource& source, const Sample& sample) {
  const Specs& specs = source.specs;
  const std::string file_name =
      "item " + std::to_string(source.items.size()) + " of " + source.title;
  const std::vector<const Tensor*> tensors = match_inputs(sample, specs, file_name);
  std::uint64_t offset = source.store->size();
  Arrays arrays;
  std::vector<StoredValues> stored_values;
  for (std::size_t k = 0; k < specs.size(); ++k) {
    StoredArray array(source.store, header_of(*tensors[k], file_name), offset);
    if (lacks_batch(array.header().shape, specs[k])) array.add_batch();
    stored_values.push_back({offset, array.header().shape});
    arrays.emplace(specs[k].name, std::move(array));
    offset += tensors[k]->bytes.size();
  }
  const std::size_t count = count_rows(arrays, specs, file_name);
  if (count == 0) throw FeedError(file_name + " must hold samples, got none");
  if (source.items.empty()) source.is_stacked = has_stacked_samples(arrays, specs);
  for (const Tensor* tensor : tensors) {
    source.store->append({tensor->bytes.data(), tensor->bytes.size()});
  }
  source.items.push_back(std::move(stored_values));
  return count;
}

}  // namespace

std::unique_ptr<Source> read_function(const NextSample& next, const Specs& specs,
                                      const std::optional<std::size_t>& limit) {
  auto source = std::make_unique<ArraySource>();
  source->specs = specs;
  source->title = "the function";
  source->store = std::make_shared<RandomAccessFile>();
  while (!limit || source->size() < *limit) {
    const std::optional<Sample> sample = next();
    if (!sample) break;
    const std::size_t total = source->size() + append_item(*source, *sample);
    source->ends.push_back(std::min(total, limit.value_or(total)));
    if (limit || total <= kMaxSamples) continue;
    throw FeedError(source->title + " must end, got " + text::with_commas(total) +
                    " samples and no end; set a maximum number of samples (FeedOptions::limit), and"
                    " the first ones are used");
  }
  if (source->size() == 0) throw FeedError(source->title + " must give samples, got none");
  source->is_limited = source->size() == limit;
  return source;
}

std::int64_t fixed_batch(const Specs& specs) {
  std::set<std::int64_t> first_sizes;
  for (const TensorSpec& spec : specs) {
    if (spec.shape.size() < 2) continue;
    first_sizes.insert(is_unbatched_image(spec) ? 1 : spec.shape.front().size.value_or(1));
  }
  return first_sizes.size() == 1 ? std::max<std::int64_t>(*first_sizes.begin(), 1) : 1;
}

std::unique_ptr<Source> array_file(const fs::path& path, const Specs& specs) {
  auto source = std::make_unique<ArraySource>();
  source->specs = specs;
  source->title = text::printable(path.filename().string());
  source->cache_file(0, add_file(*source, {{"", path}}));
  require_samples(*source);
  return source;
}

std::unique_ptr<Source> array_files(const std::vector<images::Picture>& files, const Specs& specs,
                                    const std::string& title, bool skip_bad) {
  std::vector<FilesByInput> file_groups;
  std::vector<std::string> names;
  for (const images::Picture& file : files) {
    file_groups.push_back(files_of_line(file, specs));
    names.push_back(file.name);
  }
  std::unique_ptr<ArraySource> source = make_source(file_groups, names, specs, title, skip_bad);
  if (!files.front().label) return source;
  source->labels.clear();  // the list's are those of all samples of a file
  for (std::size_t k = 0; k < files.size(); ++k) {
    source->labels.resize(source->ends[k], files[k].label.value_or(0));
  }
  return source;
}

std::unique_ptr<Source> array_folder(const std::vector<images::Picture>& files, const Specs& specs,
                                     const std::string& title, bool skip_bad) {
  std::set<std::string> top_folders;
  std::set<std::string> input_names;
  for (const images::Picture& file : files) {
    const std::size_t slash = file.name.find('/');
    if (slash != std::string::npos) top_folders.insert(file.name.substr(0, slash));
  }
  for (const TensorSpec& spec : specs) input_names.insert(spec.name);
  if (specs.size() > 1 && top_folders == input_names)
    return join_input_folders(files, specs, title, skip_bad);
  return array_files(files, specs, title, skip_bad);
}

}  // namespace calib8

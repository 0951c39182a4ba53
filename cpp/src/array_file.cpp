#include "array_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <set>
#include <system_error>

#include "calib8/errors.hpp"
#include "calib8/text.hpp"
#include "zip.hpp"

namespace calib8 {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxArrays = std::size_t{1} << 12U;  // in an .npz: one an input
constexpr std::uint64_t kMaxBytes = std::uint64_t{16} << 30U;

std::string error_text(int code) { return std::generic_category().message(code); }

std::string suffix_of(const fs::path& path) { return text::lower(path.extension().string()); }

int open_regular(const fs::path& path) {
  struct ::stat status {};  // checked before it is opened, since opening a pipe waits for a writer
  if (::stat(path.c_str(), &status) != 0) throw FeedError(error_text(errno));
  if (!S_ISREG(status.st_mode)) throw FeedError("it is no regular file");
  const int handle = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (handle < 0) throw FeedError(error_text(errno));
  return handle;
}

int create_temporary() {
  std::string path = (fs::temp_directory_path() / "calib8-feed-XXXXXX").string();
  const int handle = ::mkstemp(path.data());
  if (handle < 0) throw FeedError("no temporary file can be made: " + error_text(errno));
  ::unlink(path.c_str());
  return handle;
}

npy::Header header_at(const RandomAccessFile& file, std::uint64_t offset, std::uint64_t size) {
  const std::size_t length = std::min<std::uint64_t>(size, npy::kMaxHeaderBytes);
  return npy::parse(file.read(offset, length), size);
}

StoredArray array_at(std::shared_ptr<const RandomAccessFile> file, std::uint64_t offset,
                     std::uint64_t size) {
  npy::Header header = header_at(*file, offset, size);
  offset += header.values_at;
  return {std::move(file), std::move(header), offset};
}

void insert_array(Arrays& arrays, const std::string& name, StoredArray array) {
  arrays.erase(name);
  arrays.emplace(name, std::move(array));
}

std::string without_suffix(const std::string& name) {
  const bool has_suffix = name.size() >= 4 && name.compare(name.size() - 4, 4, ".npy") == 0;
  return has_suffix ? name.substr(0, name.size() - 4) : name;
}

Arrays load_npz(const fs::path& path) {
  const auto file = std::make_shared<const RandomAccessFile>(path);
  const zip::ReadAt read_at = [&file](std::uint64_t offset, std::size_t size) {
    return file->read(offset, size);
  };
  Arrays arrays;
  for (const zip::Entry& entry : zip::entries(read_at, file->size(), kMaxArrays)) {
    insert_array(arrays, without_suffix(entry.name), array_at(file, entry.begin, entry.size));
  }
  return arrays;
}

Arrays load_npy(const fs::path& path) {
  const auto file = std::make_shared<const RandomAccessFile>(path);
  Arrays arrays;
  insert_array(arrays, "", array_at(file, 0, file->size()));
  return arrays;
}

// The values of one sample, of the input's own shape and dtype.
npy::Header header_of(const std::string& name, const TensorSpec& spec) {
  npy::Header header;
  header.dtype = spec.dtype;
  const std::string descr = npy::descr_of(spec.dtype);
  header.kind = descr.size() == 3 ? descr[1] : '\0';
  header.item = header.kind == 0 ? 0 : static_cast<std::size_t>(descr[2] - '0');
  std::uint64_t sample_bytes = header.item;
  bool is_stated = header.kind != 0 && !spec.shape.empty();
  header.shape.push_back(0);
  for (std::size_t k = 1; k < spec.shape.size(); ++k) {
    const std::int64_t side = spec.shape[k].size.value_or(0);
    is_stated =
        is_stated && side > 0 && sample_bytes <= kMaxBytes / static_cast<std::uint64_t>(side);
    sample_bytes *= static_cast<std::uint64_t>(side);
    header.shape.push_back(side);
  }
  if (!is_stated) {
    throw FeedError(name + " has no header, so the input must state its shape, got " +
                    spec.describe() + "; write .npy files, which say theirs");
  }
  header.bytes = sample_bytes;
  return header;
}

// Values without a header: of the input's dtype and shape, one sample after the other.
Arrays load_raw(const fs::path& path, const std::vector<TensorSpec>& specs) {
  const std::string name = text::printable(path.filename().string());
  if (specs.size() != 1) {
    throw FeedError(name + " holds the values of one input, the model has " +
                    std::to_string(specs.size()) +
                    "; put one subfolder per input, named as the input, into the folder");
  }
  npy::Header header = header_of(name, specs.front());
  const auto file = std::make_shared<const RandomAccessFile>(path);
  const std::uint64_t file_bytes = file->size();
  if (file_bytes == 0 || file_bytes % header.bytes != 0) {
    throw FeedError(name + " must hold complete samples of the input " + specs.front().describe() +
                    ", " + text::with_commas(header.bytes) + " bytes each, got " +
                    text::with_commas(file_bytes) + " bytes; check its shape and dtype");
  }
  header.shape.front() = static_cast<std::int64_t>(file_bytes / header.bytes);
  header.bytes = file_bytes;
  Arrays arrays;
  insert_array(arrays, "", {file, header, 0});
  return arrays;
}

std::int64_t integer_at(const npy::Header& header, const char* bytes) {
  std::uint64_t value = 0;
  for (std::size_t k = header.item; k-- > 0;) {
    value = value << 8U | static_cast<unsigned char>(bytes[k]);
  }
  const unsigned unused_bits = 64 - 8 * static_cast<unsigned>(header.item);
  if (header.kind == 'u') return value > INT64_MAX ? INT64_MAX : static_cast<std::int64_t>(value);
  return static_cast<std::int64_t>(value << unused_bits) >> unused_bits;
}

std::vector<int> labels_in(const std::string& key, const StoredArray& array) {
  const npy::Header& header = array.header();
  std::vector<int> labels;
  std::int64_t min_label = 0;
  bool fits = header.kind == 'i' || header.kind == 'u';
  if (fits) {
    const std::vector<char> bytes = array.all_values();
    for (std::size_t offset = 0; offset + header.item <= bytes.size(); offset += header.item) {
      const std::int64_t value = integer_at(header, bytes.data() + offset);
      fits = fits && value >= 0 && value <= std::numeric_limits<int>::max();
      min_label = std::min(min_label, value);
      labels.push_back(static_cast<int>(value));
    }
  }
  if (fits) return labels;
  const std::string kind = header.describe();
  const std::string rejected =
      min_label < 0 ? std::to_string(min_label) : kind.substr(0, kind.rfind(" ["));
  throw FeedError(text::repr(key) + " must be whole numbers from 0, got " + rejected +
                  "; number the classes in the order of the model's outputs, and leave out samples"
                  " without a class");
}

std::optional<std::vector<int>> take_labels(Arrays& arrays, const std::vector<TensorSpec>& specs) {
  for (const char* key : {"labels", "label", "targets", "target", "y"}) {
    const auto entry = arrays.find(key);
    const auto is_input = [key](const TensorSpec& spec) { return spec.name == key; };
    if (entry == arrays.end() || std::any_of(specs.begin(), specs.end(), is_input) ||
        entry->second.header().shape.size() > 1) {
      continue;
    }
    const StoredArray array = entry->second;
    arrays.erase(entry);
    return labels_in(key, array);
  }
  return std::nullopt;
}

// Arrays by input name; a single array is the single input's, whatever its name.
Arrays name_arrays(Arrays arrays, const std::vector<TensorSpec>& specs,
                   const std::string& file_name) {
  if (specs.size() == 1 && arrays.size() == 1) {
    Arrays named_arrays;
    named_arrays.emplace(specs.front().name, arrays.begin()->second);
    return named_arrays;
  }
  std::vector<std::string> input_names;
  std::vector<std::string> array_names;
  for (const TensorSpec& spec : specs) input_names.push_back(spec.name);
  for (const auto& [name, array] : arrays) array_names.push_back(name);
  if (std::set<std::string>(input_names.begin(), input_names.end()) ==
      std::set<std::string>(array_names.begin(), array_names.end())) {
    return arrays;
  }
  throw FeedError(file_name + " must hold exactly the inputs " + text::repr(input_names) +
                  ", got " + (arrays.count("") > 0 ? "one array" : text::repr(array_names)) +
                  "; write numpy.savez with one array per input");
}

[[noreturn]] void refuse_file(const fs::path& path, const std::string& reason) {
  throw FeedError(text::printable(path.string()) + " cannot be read as plain numpy arrays: " +
                  reason + "; write it with numpy.save or numpy.savez");
}

void check_can_open(const fs::path& path) {
  try {
    const RandomAccessFile file(path);
  } catch (const FeedError& error) {
    refuse_file(path, error.what());
  }
}

}  // namespace

RandomAccessFile::RandomAccessFile(const fs::path& path)
    : name_(text::printable(path.filename().string())), handle_(open_regular(path)) {}

RandomAccessFile::RandomAccessFile() : name_("a temporary file"), handle_(create_temporary()) {}

RandomAccessFile::~RandomAccessFile() { ::close(handle_); }

std::uint64_t RandomAccessFile::size() const {
  struct ::stat state {};
  if (::fstat(handle_, &state) != 0)
    throw FeedError(name_ + " cannot be read: " + error_text(errno));
  return static_cast<std::uint64_t>(state.st_size);
}

void RandomAccessFile::read(std::uint64_t offset, char* out, std::size_t size) const {
  while (size > 0) {
    const ssize_t read_bytes = ::pread(handle_, out, size, static_cast<off_t>(offset));
    if (read_bytes < 0 && errno == EINTR) continue;
    if (read_bytes <= 0) {
      throw FeedError(name_ + " cannot be read: " +
                      (read_bytes == 0 ? std::string("it ends too early") : error_text(errno)));
    }
    out += read_bytes;
    offset += static_cast<std::uint64_t>(read_bytes);
    size -= static_cast<std::size_t>(read_bytes);
  }
}

std::string RandomAccessFile::read(std::uint64_t offset, std::size_t size) const {
  std::string data(size, '\0');
  read(offset, data.data(), size);
  return data;
}

void RandomAccessFile::append(std::string_view data) {
  while (!data.empty()) {
    const ssize_t written = ::write(handle_, data.data(), data.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      throw FeedError("it must fit into a temporary file, got: " + error_text(errno) +
                      "; free some disk space, or set TMPDIR to another disk");
    }
    data.remove_prefix(static_cast<std::size_t>(written));
  }
}

std::vector<char> StoredArray::values(std::uint64_t begin, std::uint64_t size) const {
  std::vector<char> bytes(size);
  if (header_.fortran) {
    const std::vector<char>& array = in_c_order();
    std::copy_n(array.begin() + static_cast<std::ptrdiff_t>(begin), size, bytes.begin());
    return bytes;
  }

  file_->read(offset_ + begin, bytes.data(), bytes.size());
  if (!header_.swapped) return bytes;
  for (std::size_t offset = 0; offset < bytes.size(); offset += header_.item) {
    const auto value = bytes.begin() + static_cast<std::ptrdiff_t>(offset);
    std::reverse(value, value + static_cast<std::ptrdiff_t>(header_.item));
  }
  return bytes;
}

std::vector<char> StoredArray::slice(std::uint64_t index) const {
  const std::uint64_t slice_bytes =
      header_.bytes / static_cast<std::uint64_t>(header_.shape.front());
  return values(index * slice_bytes, slice_bytes);
}

std::vector<char> StoredArray::all_values() const { return values(0, header_.bytes); }

const std::vector<char>& StoredArray::in_c_order() const {
  std::call_once(c_order_->once, [this] {
    npy::Header flat_header = header_;
    flat_header.fortran = false;
    const std::vector<char> file_values = StoredArray(file_, flat_header, offset_).all_values();
    std::vector<char> c_values(file_values.size());

    const std::size_t rank = header_.shape.size();
    std::vector<std::int64_t> index(rank, 0);  // of the value in C order: the last axis fastest
    for (std::size_t target = 0; target < c_values.size(); target += header_.item) {
      std::uint64_t source = 0;
      for (std::size_t axis = rank; axis-- > 0;) {
        source = source * static_cast<std::uint64_t>(header_.shape[axis]) +
                 static_cast<std::uint64_t>(index[axis]);
      }
      std::copy_n(file_values.begin() + static_cast<std::ptrdiff_t>(source * header_.item),
                  header_.item, c_values.begin() + static_cast<std::ptrdiff_t>(target));

      for (std::size_t axis = rank; axis-- > 0;) {
        if (++index[axis] < header_.shape[axis]) break;
        index[axis] = 0;
      }
    }
    c_order_->values = std::move(c_values);
  });
  return c_order_->values;
}

bool is_arrays(const fs::path& path) {
  constexpr std::array<std::string_view, 4> kSuffixes{".bin", ".npy", ".npz", ".raw"};
  return std::find(kSuffixes.begin(), kSuffixes.end(), suffix_of(path)) != kSuffixes.end();
}

FileArrays read_arrays(const fs::path& path, const std::vector<TensorSpec>& specs) {
  const std::string suffix = suffix_of(path);
  const std::string file_name = text::printable(path.filename().string());
  FileArrays file_arrays;
  check_can_open(path);
  try {
    file_arrays.arrays = suffix == ".npz"   ? load_npz(path)
                         : suffix == ".npy" ? load_npy(path)
                                            : load_raw(path, specs);
  } catch (const npy::Broken& error) {
    refuse_file(path, error.what());
  } catch (const zip::Broken& error) {
    refuse_file(path, error.what());
  }
  file_arrays.labels = take_labels(file_arrays.arrays, specs);
  file_arrays.arrays = name_arrays(std::move(file_arrays.arrays), specs, file_name);
  return file_arrays;
}

}  // namespace calib8

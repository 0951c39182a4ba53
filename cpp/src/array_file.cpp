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

constexpr std::size_t kMostEntries = std::size_t{1} << 12U;  // arrays of an .npz: one an input
constexpr std::uint64_t kMostBytes = std::uint64_t{16} << 30U;

std::string reason(int code) { return std::generic_category().message(code); }

std::string suffix_of(const fs::path& path) { return text::lower(path.extension().string()); }

int opened(const fs::path& path) {
  struct ::stat state {};  // looked at before it is opened: to open a pipe is to wait for it
  if (::stat(path.c_str(), &state) != 0) throw FeedError(reason(errno));
  if (!S_ISREG(state.st_mode)) throw FeedError("it is no regular file");
  const int handle = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (handle < 0) throw FeedError(reason(errno));
  return handle;
}

int temporary() {
  std::string name = (fs::temp_directory_path() / "calib8-feed-XXXXXX").string();
  const int handle = ::mkstemp(name.data());
  if (handle < 0) throw FeedError("no temporary file can be made: " + reason(errno));
  ::unlink(name.c_str());
  return handle;
}

npy::Header header_at(const PlacedFile& file, std::uint64_t at, std::uint64_t size) {
  const std::size_t length = std::min<std::uint64_t>(size, npy::kLongest);
  return npy::parse(file.read(at, length), size);
}

StoredArray array_at(std::shared_ptr<const PlacedFile> file, std::uint64_t at, std::uint64_t size) {
  npy::Header header = header_at(*file, at, size);
  at += header.values_at;
  return {std::move(file), std::move(header), at};
}

void put(Arrays& arrays, const std::string& name, StoredArray array) {
  arrays.erase(name);
  arrays.emplace(name, std::move(array));
}

std::string without_suffix(const std::string& name) {
  const bool has = name.size() >= 4 && name.compare(name.size() - 4, 4, ".npy") == 0;
  return has ? name.substr(0, name.size() - 4) : name;
}

Arrays load_npz(const fs::path& path) {
  const auto file = std::make_shared<const PlacedFile>(path);
  const zip::ReadAt read = [&file](std::uint64_t at, std::size_t size) {
    return file->read(at, size);
  };
  Arrays arrays;
  for (const zip::Entry& entry : zip::entries(read, file->size(), kMostEntries)) {
    put(arrays, without_suffix(entry.name), array_at(file, entry.begin, entry.size));
  }
  return arrays;
}

Arrays load_npy(const fs::path& path) {
  const auto file = std::make_shared<const PlacedFile>(path);
  Arrays arrays;
  put(arrays, "", array_at(file, 0, file->size()));
  return arrays;
}

std::string with_commas(std::uint64_t number) {
  std::string digits = std::to_string(number);
  for (std::size_t at = digits.size(); at > 3;) digits.insert(at -= 3, ",");
  return digits;
}

// The values of one sample, of the input's own shape and dtype.
npy::Header header_of(const std::string& name, const TensorSpec& spec) {
  npy::Header header;
  header.dtype = spec.dtype;
  const std::string descr = npy::descr_of(spec.dtype);
  header.kind = descr.size() == 3 ? descr[1] : '\0';
  header.item = header.kind == 0 ? 0 : static_cast<std::size_t>(descr[2] - '0');
  std::uint64_t one = header.item;
  bool told = header.kind != 0 && !spec.shape.empty();
  header.shape.push_back(0);
  for (std::size_t k = 1; k < spec.shape.size(); ++k) {
    const std::int64_t side = spec.shape[k].size.value_or(0);
    told = told && side > 0 && one <= kMostBytes / static_cast<std::uint64_t>(side);
    one *= static_cast<std::uint64_t>(side);
    header.shape.push_back(side);
  }
  if (!told) {
    throw FeedError(name + " has no header, so the input must state its shape, got " +
                    spec.describe() + "; write .npy files, which say theirs");
  }
  header.bytes = one;
  return header;
}

// Values without a header: of the input's dtype and shape, one sample after the other.
Arrays load_raw(const fs::path& path, const std::vector<TensorSpec>& specs) {
  const std::string name = text::shown(path.filename().string());
  if (specs.size() != 1) {
    throw FeedError(name + " holds the values of one input, the model has " +
                    std::to_string(specs.size()) +
                    "; put one subfolder per input, named as the input, into the folder");
  }
  npy::Header header = header_of(name, specs.front());
  const auto file = std::make_shared<const PlacedFile>(path);
  const std::uint64_t got = file->size();
  if (got == 0 || got % header.bytes != 0) {
    throw FeedError(name + " must hold complete samples of the input " + specs.front().describe() +
                    ", " + with_commas(header.bytes) + " bytes each, got " + with_commas(got) +
                    " bytes; check its shape and dtype");
  }
  header.shape.front() = static_cast<std::int64_t>(got / header.bytes);
  header.bytes = got;
  Arrays arrays;
  put(arrays, "", {file, header, 0});
  return arrays;
}

std::int64_t whole_number(const npy::Header& header, const char* bytes) {
  std::uint64_t value = 0;
  for (std::size_t k = header.item; k-- > 0;) {
    value = value << 8U | static_cast<unsigned char>(bytes[k]);
  }
  const unsigned unused = 64 - 8 * static_cast<unsigned>(header.item);
  if (header.kind == 'u') return value > INT64_MAX ? INT64_MAX : static_cast<std::int64_t>(value);
  return static_cast<std::int64_t>(value << unused) >> unused;
}

std::vector<int> labels_in(const std::string& key, const StoredArray& array) {
  const npy::Header& header = array.header();
  std::vector<int> labels;
  std::int64_t least = 0;
  bool fits = header.kind == 'i' || header.kind == 'u';
  if (fits) {
    const std::vector<char> bytes = array.whole();
    for (std::size_t at = 0; at + header.item <= bytes.size(); at += header.item) {
      const std::int64_t value = whole_number(header, bytes.data() + at);
      fits = fits && value >= 0 && value <= std::numeric_limits<int>::max();
      least = std::min(least, value);
      labels.push_back(static_cast<int>(value));
    }
  }
  if (fits) return labels;
  const std::string kind = header.describe();
  const std::string got = least < 0 ? std::to_string(least) : kind.substr(0, kind.rfind(" ["));
  throw FeedError(text::repr(key) + " must be whole numbers from 0, got " + got +
                  "; number the classes in the order of the model's outputs, and leave out samples"
                  " without a class");
}

std::optional<std::vector<int>> take_labels(Arrays& arrays, const std::vector<TensorSpec>& specs) {
  for (const char* key : {"labels", "label", "y"}) {
    const auto found = arrays.find(key);
    const auto named = [key](const TensorSpec& spec) { return spec.name == key; };
    if (found == arrays.end() || std::any_of(specs.begin(), specs.end(), named) ||
        found->second.header().shape.size() != 1) {
      continue;
    }
    const StoredArray array = found->second;
    arrays.erase(found);
    return labels_in(key, array);
  }
  return std::nullopt;
}

// Arrays by input name; a single array is the single input's, whatever its name.
Arrays by_name(Arrays arrays, const std::vector<TensorSpec>& specs, const std::string& where) {
  if (specs.size() == 1 && arrays.size() == 1) {
    Arrays named;
    named.emplace(specs.front().name, arrays.begin()->second);
    return named;
  }
  std::vector<std::string> wanted;
  std::vector<std::string> got;
  for (const TensorSpec& spec : specs) wanted.push_back(spec.name);
  for (const auto& [name, array] : arrays) got.push_back(name);
  if (std::set<std::string>(wanted.begin(), wanted.end()) ==
      std::set<std::string>(got.begin(), got.end())) {
    return arrays;
  }
  throw FeedError(where + " must hold exactly the inputs " + text::repr(wanted) + ", got " +
                  (arrays.count("") > 0 ? "one array" : text::repr(got)) +
                  "; write numpy.savez with one array per input");
}

[[noreturn]] void unreadable(const fs::path& path, const std::string& why) {
  throw FeedError(text::shown(path.string()) + " cannot be read as plain numpy arrays: " + why +
                  "; write it with numpy.save or numpy.savez");
}

void check_opens(const fs::path& path) {
  try {
    const PlacedFile file(path);
  } catch (const FeedError& error) {
    unreadable(path, error.what());
  }
}

}  // namespace

PlacedFile::PlacedFile(const fs::path& path)
    : name_(text::shown(path.filename().string())), handle_(opened(path)) {}

PlacedFile::PlacedFile() : name_("a temporary file"), handle_(temporary()) {}

PlacedFile::~PlacedFile() { ::close(handle_); }

std::uint64_t PlacedFile::size() const {
  struct ::stat state {};
  if (::fstat(handle_, &state) != 0) throw FeedError(name_ + " cannot be read: " + reason(errno));
  return static_cast<std::uint64_t>(state.st_size);
}

void PlacedFile::read(std::uint64_t at, char* out, std::size_t size) const {
  while (size > 0) {
    const ssize_t got = ::pread(handle_, out, size, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      throw FeedError(name_ + " cannot be read: " +
                      (got == 0 ? std::string("it ends too early") : reason(errno)));
    }
    out += got;
    at += static_cast<std::uint64_t>(got);
    size -= static_cast<std::size_t>(got);
  }
}

std::string PlacedFile::read(std::uint64_t at, std::size_t size) const {
  std::string data(size, '\0');
  read(at, data.data(), size);
  return data;
}

void PlacedFile::append(std::string_view data) {
  while (!data.empty()) {
    const ssize_t written = ::write(handle_, data.data(), data.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      throw FeedError("it must fit into a temporary file, got: " + reason(errno) +
                      "; free some disk space, or set TMPDIR to another disk");
    }
    data.remove_prefix(static_cast<std::size_t>(written));
  }
}

std::vector<char> StoredArray::values(std::uint64_t from, std::uint64_t size) const {
  std::vector<char> bytes(size);
  if (header_.fortran) {
    const std::vector<char>& all = turned();
    std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(from), size, bytes.begin());
    return bytes;
  }
  file_->read(at_ + from, bytes.data(), bytes.size());
  if (header_.swapped) {
    for (std::size_t at = 0; at < bytes.size(); at += header_.item) {
      const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(at);
      std::reverse(first, first + static_cast<std::ptrdiff_t>(header_.item));
    }
  }
  return bytes;
}

std::vector<char> StoredArray::place(std::uint64_t index) const {
  const std::uint64_t one = header_.bytes / static_cast<std::uint64_t>(header_.shape.front());
  return values(index * one, one);
}

std::vector<char> StoredArray::whole() const { return values(0, header_.bytes); }

const std::vector<char>& StoredArray::turned() const {
  std::call_once(turned_->once, [this] {
    npy::Header flat = header_;
    flat.fortran = false;
    const std::vector<char> own = StoredArray(file_, flat, at_).whole();
    std::vector<char> turned(own.size());
    const std::size_t rank = header_.shape.size();
    std::vector<std::int64_t> place(rank, 0);  // of the value, the last index fastest
    for (std::size_t out = 0; out < turned.size(); out += header_.item) {
      std::uint64_t from = 0;
      for (std::size_t k = rank; k-- > 0;) {
        from = from * static_cast<std::uint64_t>(header_.shape[k]) +
               static_cast<std::uint64_t>(place[k]);
      }
      std::copy_n(own.begin() + static_cast<std::ptrdiff_t>(from * header_.item), header_.item,
                  turned.begin() + static_cast<std::ptrdiff_t>(out));
      for (std::size_t k = rank; k-- > 0;) {
        if (++place[k] < header_.shape[k]) break;
        place[k] = 0;
      }
    }
    turned_->values = std::move(turned);
  });
  return turned_->values;
}

bool is_arrays(const fs::path& path) {
  constexpr std::array<std::string_view, 4> kSuffixes{".bin", ".npy", ".npz", ".raw"};
  return std::find(kSuffixes.begin(), kSuffixes.end(), suffix_of(path)) != kSuffixes.end();
}

Held read_arrays(const fs::path& path, const std::vector<TensorSpec>& specs) {
  const std::string kind = suffix_of(path);
  const std::string where = text::shown(path.filename().string());
  Held held;
  check_opens(path);
  try {
    held.arrays = kind == ".npz"   ? load_npz(path)
                  : kind == ".npy" ? load_npy(path)
                                   : load_raw(path, specs);
  } catch (const npy::Broken& error) {
    unreadable(path, error.what());
  } catch (const zip::Broken& error) {
    unreadable(path, error.what());
  }
  held.labels = take_labels(held.arrays, specs);
  held.arrays = by_name(std::move(held.arrays), specs, where);
  return held;
}

}  // namespace calib8

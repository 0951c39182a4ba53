// One file of arrays: .npy, .npz, or .bin and .raw without a header; deploy/feed/array_files.py.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "calib8/feed.hpp"
#include "npy.hpp"

namespace calib8 {

// A regular file that is read at offsets, by any number of threads.
class RandomAccessFile {
 public:
  // Throws FeedError: it cannot be opened, or is no regular file.
  explicit RandomAccessFile(const std::filesystem::path& path);
  // An empty temporary file without a name.
  RandomAccessFile();
  RandomAccessFile(const RandomAccessFile&) = delete;
  RandomAccessFile& operator=(const RandomAccessFile&) = delete;
  ~RandomAccessFile();

  std::uint64_t size() const;
  // Throws FeedError where the file ends before, or cannot be read.
  void read(std::uint64_t offset, char* out, std::size_t size) const;
  std::string read(std::uint64_t offset, std::size_t size) const;
  void append(std::string_view data);

 private:
  std::string name_;
  int handle_;
};

// An array in a file; its values are read when they are asked for.
class StoredArray {
 public:
  // The values begin at `offset` in the file.
  StoredArray(std::shared_ptr<const RandomAccessFile> file, npy::Header header,
              std::uint64_t offset)
      : file_(std::move(file)), header_(std::move(header)), offset_(offset) {}

  const npy::Header& header() const { return header_; }
  // The same values with a first dimension of 1 more.
  void add_batch() { header_.shape.insert(header_.shape.begin(), 1); }
  // Values in C order and this machine's byte order, of one index along the first axis, or all of them.
  // Throws FeedError: the file cannot be read any more.
  std::vector<char> slice(std::uint64_t index) const;
  std::vector<char> all_values() const;

 private:
  std::vector<char> values(std::uint64_t begin, std::uint64_t size) const;
  // The values of an array in Fortran's order, put into C order once.
  const std::vector<char>& in_c_order() const;

  struct COrderValues {
    std::once_flag once;
    std::vector<char> values;
  };

  std::shared_ptr<const RandomAccessFile> file_;
  npy::Header header_;
  std::uint64_t offset_;
  std::shared_ptr<COrderValues> c_order_ = std::make_shared<COrderValues>();
};

using Arrays = std::map<std::string, StoredArray>;

// The arrays of one file, and their labels where it has any.
struct FileArrays {
  Arrays arrays;  // by input
  std::optional<std::vector<int>> labels;
};

// Whether the suffix, in any case, is one that is read as arrays.
bool is_arrays(const std::filesystem::path& path);

// The arrays of a file by input. Throws FeedError: it is damaged, holds objects, or does not have
// the inputs.
FileArrays read_arrays(const std::filesystem::path& path, const std::vector<TensorSpec>& specs);

}  // namespace calib8

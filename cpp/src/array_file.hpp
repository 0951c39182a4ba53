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

// A regular file that is read in places, by any number of threads.
class PlacedFile {
 public:
  // Throws FeedError: it cannot be opened, or is no regular file.
  explicit PlacedFile(const std::filesystem::path& path);
  // An empty one without a name.
  PlacedFile();
  PlacedFile(const PlacedFile&) = delete;
  PlacedFile& operator=(const PlacedFile&) = delete;
  ~PlacedFile();

  std::uint64_t size() const;
  // Throws FeedError where the file ends before, or cannot be read.
  void read(std::uint64_t at, char* out, std::size_t size) const;
  std::string read(std::uint64_t at, std::size_t size) const;
  void append(std::string_view data);

 private:
  std::string name_;
  int handle_;
};

// An array in a file; its values are read when they are asked for.
class StoredArray {
 public:
  // From `at` on in the file.
  StoredArray(std::shared_ptr<const PlacedFile> file, npy::Header header, std::uint64_t at)
      : file_(std::move(file)), header_(std::move(header)), at_(at) {}

  const npy::Header& header() const { return header_; }
  // Values in C order and this machine's byte order, of one place along the first axis or of all.
  // Throws FeedError: the file cannot be read any more.
  std::vector<char> place(std::uint64_t index) const;
  std::vector<char> whole() const;

 private:
  std::vector<char> values(std::uint64_t from, std::uint64_t size) const;
  // A file in Fortran's order, put into C's once.
  const std::vector<char>& turned() const;

  struct Turned {
    std::once_flag once;
    std::vector<char> values;
  };

  std::shared_ptr<const PlacedFile> file_;
  npy::Header header_;
  std::uint64_t at_;
  std::shared_ptr<Turned> turned_ = std::make_shared<Turned>();
};

using Arrays = std::map<std::string, StoredArray>;

// What a file holds.
struct Held {
  Arrays arrays;  // by input
  std::optional<std::vector<int>> labels;
};

// Whether the suffix, in any case, is one that is read as arrays.
bool is_arrays(const std::filesystem::path& path);

// The arrays of a file by input. Throws FeedError: it is damaged, holds objects, or does not have
// the inputs.
Held read_arrays(const std::filesystem::path& path, const std::vector<TensorSpec>& specs);

}  // namespace calib8

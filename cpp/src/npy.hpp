// numpy's .npy format: what its header tells of the values behind it.
//
//   \x93NUMPY  major minor  length  {'descr': '<f4', 'fortran_order': False, 'shape': (8, 3), }  values
//
// Source: numpy.org, "NEP 1: A simple file format for NumPy arrays".
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace calib8::npy {

// Bytes that are no array of plain numbers, and why, in half a sentence.
class Broken : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Header {
  std::string dtype;     // numpy's name: float32, int64, ...; what the file says where it has none
  char kind = 0;         // f, i, u or b; 0 where the values are no plain numbers
  std::size_t item = 0;  // bytes of a value
  bool swapped = false;  // in the other byte order than this machine's
  bool fortran = false;  // the first index runs fastest
  std::vector<std::int64_t> shape;
  std::uint64_t values_at = 0;  // offset of the first value
  std::uint64_t bytes = 0;      // of all values

  std::string describe() const;  // ">f4 [8, 3]"
};

inline constexpr std::size_t kMaxHeaderBytes =
    12 + 10000;  // bytes before the values, as numpy has it

// Of the file's first bytes, up to kMaxHeaderBytes of them, of a file of `size` bytes. Throws Broken.
Header parse(std::string_view head, std::uint64_t size);

// Of values of this dtype and shape that have `size` bytes. Throws Broken: they are fewer.
Header make_header(const std::string& dtype, const std::vector<std::int64_t>& shape,
                   std::uint64_t size);

// "<f4" of float32 as this machine holds it: numpy's dtype.str.
std::string descr_of(const std::string& dtype);

// [8, 3]
std::string format_shape(const std::vector<std::int64_t>& shape);

}  // namespace calib8::npy

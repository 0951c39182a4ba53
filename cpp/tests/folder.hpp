// A temporary folder that goes with the test, and pictures and arrays to put in it.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>
#include <vector>

#include "calib8/files.hpp"

// An .npy file, as numpy.save writes it.
template <class Value>
std::string npy(const std::string& descr, const std::string& shape,
                const std::vector<Value>& values) {
  const std::string head =
      "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }\n";
  std::string data("\x93NUMPY\x01\0", 8);
  data += {static_cast<char>(head.size()), '\0'};
  return data + head +
         std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value));
}

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "calib8-test-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code failed;
    std::filesystem::remove_all(path_, failed);
  }

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

  void write(const std::string& name, const std::string& data) const {
    calib8::files::write(path_ / name, data);
  }

  // A picture of one colour (BGR), as PPM whatever its name; and its file's bytes.
  std::string picture(const std::string& name, int height, int width, int value) const {
    std::string data = "P6\n" + std::to_string(width) + " " + std::to_string(height) + "\n255\n";
    for (int k = 0; k < height * width; ++k) {
      for (const int channel : {value / 4, value / 2, value}) data += static_cast<char>(channel);
    }
    write(name, data);
    return data;
  }

  // An array of one value, float32 [1, 3, 16, 20].
  void sample(const std::string& name, float value) const {
    write(name, npy<float>("<f4", "(1, 3, 16, 20)", std::vector<float>(960, value)));
  }

 private:
  std::filesystem::path path_;
};

// A temporary folder that goes with the test, and pictures to put in it.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <opencv2/imgcodecs.hpp>
#include <string>

#include "calib8/files.hpp"

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

  // A picture of one colour (BGR), and its file's bytes.
  std::string picture(const std::string& name, int height, int width, int value) const {
    const cv::Mat pixels(height, width, CV_8UC3, cv::Scalar(value, value / 2, value / 4));
    std::vector<unsigned char> bytes;
    cv::imencode(std::filesystem::path(name).extension().string(), pixels, bytes);
    std::string data(bytes.begin(), bytes.end());
    write(name, data);
    return data;
  }

 private:
  std::filesystem::path path_;
};

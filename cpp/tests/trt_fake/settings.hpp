// Settings of the fake TensorRT and the fake CUDA, which tests give in the environment:
//
//   CALIB8_FAKE           what is to go wrong, words with commas between; each stands where it is asked
//   CALIB8_FAKE_TRACE     a file; every call of note is added to it, a line each
//   CALIB8_FAKE_BATCHES   a file; the bytes of every calibration batch are added to it
//   CALIB8_FAKE_INPUTS    a file; the bytes of every input of every run of an engine are added to it
//   CALIB8_FAKE_LIBRARY   the version that the library says it is, such as 8.6.3; default: the headers'
#pragma once

#include <cstdlib>
#include <fstream>
#include <string>

namespace fake {

inline std::string setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

inline bool asked(const std::string& word) {
  return ("," + setting("CALIB8_FAKE") + ",").find("," + word + ",") != std::string::npos;
}

inline void add_to(const char* file_setting, const char* data, std::size_t size) {
  const std::string path = setting(file_setting);
  if (path.empty()) return;
  std::ofstream(path, std::ios::app | std::ios::binary).write(data, static_cast<long>(size));
}

inline void trace(const std::string& line) {
  add_to("CALIB8_FAKE_TRACE", (line + "\n").data(), line.size() + 1);
}

}  // namespace fake

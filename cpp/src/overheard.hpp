// What a decoder says beside its pixels: the lines that libjpeg, libpng and libtiff print on stderr.
#pragma once

#include <string>
#include <vector>

namespace calib8 {

// While it lives, what this thread prints to the C library's stderr is kept and not shown; other
// threads print as ever. libjpeg tells of damage that way alone, and OpenCV passes nothing on; what
// older ones of it print on std::cerr themselves, which tells nothing more, is dropped.
// Where the C library's stderr is a constant (musl) nothing is heard, and all is shown.
class Overheard {
 public:
  Overheard();
  ~Overheard();
  Overheard(const Overheard&) = delete;
  Overheard& operator=(const Overheard&) = delete;

  // The lines so far, printable ASCII, without empty ones.
  std::vector<std::string> lines() const;

 private:
  std::string said_;
  std::string* before_ = nullptr;
};

}  // namespace calib8

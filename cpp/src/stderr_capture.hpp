// Captures what the decoders libjpeg, libpng and libtiff print on stderr beside their pixels.
#pragma once

#include <string>
#include <vector>

namespace calib8 {

// While it lives, it captures what this thread prints to the C library's stderr, which is then not
// shown; other threads print as ever. libjpeg reports damage on stderr only, and OpenCV passes none of
// it on. Text that older versions of OpenCV print on std::cerr themselves reports nothing more and is
// dropped. Where the C library's stderr is a constant (musl), nothing is captured and all is shown.
class StderrCapture {
 public:
  StderrCapture();
  ~StderrCapture();
  StderrCapture(const StderrCapture&) = delete;
  StderrCapture& operator=(const StderrCapture&) = delete;

  // The lines so far, printable ASCII, without empty ones.
  std::vector<std::string> lines() const;

 private:
  std::string text_;
  std::string* outer_text_ = nullptr;
};

}  // namespace calib8

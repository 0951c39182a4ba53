#include <algorithm>
#include <limits>
#include <new>
#include <opencv2/core/utility.hpp>
#include <opencv2/core/utils/logger.hpp>
#include <opencv2/imgcodecs.hpp>

#include "codec.hpp"
#include "exif.hpp"
#include "overheard.hpp"

namespace calib8::codec {
namespace {

// One thread, no messages of OpenCV on stderr, and none of Intel's IPP, with which pixels would
// depend on how OpenCV was built.
void settle_opencv() {
  static const bool kOnce = [] {
    cv::setNumThreads(1);
    cv::utils::logging::setLogLevel(cv::utils::logging::LOG_LEVEL_SILENT);
    return true;
  }();
  static_cast<void>(kOnce);
  cv::ipp::setUseIPP(false);  // a setting of the calling thread only
}

cv::Mat imdecode(std::string_view data, int flags) {
  const auto most = static_cast<std::size_t>(std::numeric_limits<int>::max());
  if (data.empty() || data.size() > most) return {};
  // OpenCV takes no const matrix header; imdecode only reads.
  auto* bytes = const_cast<char*>(data.data());
  const cv::Mat raw(1, static_cast<int>(data.size()), CV_8UC1, bytes);
  try {
    return cv::imdecode(raw, flags);
  } catch (const cv::Exception&) {
    return {};
  } catch (const std::bad_alloc&) {
    return {};
  }
}

}  // namespace

Decoded decode(std::string_view data, bool grey) {
  settle_opencv();
  const int flags = (grey ? cv::IMREAD_GRAYSCALE : cv::IMREAD_COLOR) |
                    (exif::reads(data) ? cv::IMREAD_IGNORE_ORIENTATION : 0);
  Decoded made;
  const Overheard ear;
  const cv::Mat mat = imdecode(data, flags);
  made.said = ear.lines();
  if (mat.empty()) return made;
  made.pixels = Pixels(mat.rows, mat.cols, mat.channels());
  for (int y = 0; y < mat.rows; ++y) {
    std::copy_n(mat.ptr<std::uint8_t>(y), made.pixels.row_bytes(), made.pixels.row(y));
  }
  return made;
}

std::string version() { return "OpenCV " + cv::getVersionString(); }

}  // namespace calib8::codec

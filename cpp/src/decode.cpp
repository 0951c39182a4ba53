// One picture's bytes to pixels, by OpenCV; no_images.cpp stands in its place where that is left out.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <new>
#include <opencv2/core/utility.hpp>
#include <opencv2/core/utils/logger.hpp>
#include <opencv2/imgcodecs.hpp>
#include <optional>

#include "calib8/errors.hpp"
#include "calib8/images.hpp"
#include "calib8/text.hpp"
#include "headers.hpp"
#include "stderr_capture.hpp"

namespace calib8::images {
namespace {

// One thread, no messages of OpenCV on stderr, and none of Intel's IPP, with which pixels would
// depend on how OpenCV was built.
void configure_opencv() {
  static const bool kOnce = [] {
    cv::setNumThreads(1);
    cv::utils::logging::setLogLevel(cv::utils::logging::LOG_LEVEL_SILENT);
    return true;
  }();
  static_cast<void>(kOnce);
  cv::ipp::setUseIPP(false);  // a setting of the calling thread only
}

struct Decoded {
  cv::Mat mat;                             // empty where it is no picture
  std::vector<std::string> decoder_lines;  // what the decoder printed
};

Decoded decode_with_opencv(std::string_view data, int flags) {
  Decoded picture;
  if (data.empty() || data.size() > std::numeric_limits<int>::max()) return picture;
  configure_opencv();
  // OpenCV takes no const matrix header; imdecode only reads.
  auto* bytes = const_cast<char*>(data.data());
  const cv::Mat raw(1, static_cast<int>(data.size()), CV_8UC1, bytes);
  const StderrCapture capture;
  try {
    picture.mat = cv::imdecode(raw, flags);
  } catch (const cv::Exception&) {
  } catch (const std::bad_alloc&) {
  }
  picture.decoder_lines = capture.lines();
  return picture;
}

// What libjpeg says of pixels; of a profile, a revision or a colour transform it says other things.
bool is_damage(const std::string& line) {
  const auto has = [&](const char* part) { return line.find(part) != std::string::npos; };
  const std::size_t corrupt = line.find("Corrupt JPEG data");
  const bool profile =
      corrupt != std::string::npos && line.compare(corrupt + 17, 9, ": bad ICC") == 0;
  return (corrupt != std::string::npos && !profile) || has("Premature end of JPEG") ||
         has("Inconsistent progression");
}

[[noreturn]] void refuse(std::string_view data, const std::string& name,
                         const std::string& reason) {
  throw FeedError("image " + text::printable(name) + " cannot be decoded (" +
                  std::to_string(data.size()) + " bytes, " + reason + ")");
}

// The upper 8 bits of pixels, scaled so that `white` becomes the largest value of their type.
cv::Mat scale_to_white(const cv::Mat& mat, double white) {
  const bool is_deep = mat.depth() == CV_16U;
  const double largest = is_deep ? 65535 : 255;
  cv::Mat scaled(mat.rows, mat.cols, CV_MAKETYPE(CV_8U, mat.channels()));
  for (int y = 0; y < mat.rows; ++y) {
    for (int x = 0; x < mat.cols * mat.channels(); ++x) {
      const unsigned value = is_deep ? mat.ptr<std::uint16_t>(y)[x] : mat.ptr<std::uint8_t>(y)[x];
      const double share = std::min<double>(value, white) / white;
      const auto pixel = static_cast<unsigned>(std::nearbyint(share * largest));
      scaled.ptr<std::uint8_t>(y)[x] = static_cast<std::uint8_t>(is_deep ? pixel >> 8U : pixel);
    }
  }
  return scaled;
}

void check_size(const headers::ImageSize& size, const std::string& name, int max_pixels) {
  const auto limit = static_cast<std::uint64_t>(std::clamp(max_pixels, 0, kMaxPixels));
  if (size.pixels() <= limit) return;
  throw FeedError("image " + text::printable(name) + " must have at most " +
                  text::with_commas(limit) + " pixels, got " + std::to_string(size.width) + "x" +
                  std::to_string(size.height) + "; give a smaller copy of it" +
                  (max_pixels < kMaxPixels ? ", or raise max_pixels" : ""));
}

}  // namespace

Pixels decode(std::string_view data, const std::string& name, bool grey, bool keep_depth,
              int max_pixels) {
  if (const auto size = headers::read_size(data)) check_size(*size, name, max_pixels);
  const std::string damage = headers::jpeg_damage(data);
  if (!damage.empty()) refuse(data, name, damage);
  const std::optional<std::uint64_t> white = headers::unscaled_white(data);
  const int flags = (grey ? cv::IMREAD_GRAYSCALE : cv::IMREAD_COLOR) |
                    (keep_depth || white ? cv::IMREAD_ANYDEPTH : 0);
  std::string changed;
  if (const auto offset = headers::tiff_alpha_offset(data)) {
    changed = data;
    changed.replace(*offset, 2, 2, '\0');
  }
  const Decoded picture = decode_with_opencv(changed.empty() ? data : changed, flags);
  cv::Mat mat = picture.mat;
  const headers::ImageSize decoded_size{static_cast<std::uint64_t>(mat.cols),
                                        static_cast<std::uint64_t>(mat.rows)};
  check_size(decoded_size, name, max_pixels);  // of a format whose header is not read
  for (const std::string& line : picture.decoder_lines) {
    if (!is_damage(line)) continue;
    throw FeedError("image " + text::printable(name) + " is damaged (" +
                    std::to_string(data.size()) + " bytes), its decoder says: " + line);
  }
  if (mat.empty()) {
    refuse(data, name,
           "damaged or of an unknown format" +
               (picture.decoder_lines.empty() ? "" : ": " + picture.decoder_lines.back()));
  }
  if (white && !(keep_depth && mat.depth() == CV_16U)) {
    mat = scale_to_white(mat, static_cast<double>(*white));
  }
  if (mat.depth() != CV_8U) {
    throw FeedError("image " + text::printable(name) +
                    " has more than 8 bits a pixel, which only calib8 for Python feeds; "
                    "calibrate there, or give pictures of 8 bits");
  }
  Pixels pixels(mat.rows, mat.cols, mat.channels());
  for (int y = 0; y < mat.rows; ++y) {
    std::copy_n(mat.ptr<std::uint8_t>(y), pixels.row_bytes(), pixels.row(y));
  }
  return pixels;
}

std::string decoder_version() { return "OpenCV " + cv::getVersionString(); }

}  // namespace calib8::images

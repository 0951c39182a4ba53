// Finds images on disk, reads lists of them and decodes them; deploy/feed/images.py, decoding.py.
//
// Decoding is OpenCV's imdecode of the whole file: 8 bits per channel (16-bit pictures keep their
// upper byte), alpha dropped, grey repeated to three channels where colour is asked for, EXIF
// orientation applied. A calib8 that was built without OpenCV (CALIB8_IMAGES=OFF) decodes nothing.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "calib8/export.hpp"
#include "calib8/pixels.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8::images {

inline constexpr int kMaxPixels = 1 << 28;  // of any image: 768 MB when decoded

// A file, its name in messages and digests, and its label if the list has one.
struct Picture {
  std::filesystem::path path;
  std::string name;
  std::optional<int> label;
};

// Whether the suffix, in any case, is that of an image format.
bool is_image(const std::filesystem::path& path);

// All pictures below a folder, and the files that `is_accepted_too` accepts, sorted by the bytes of their relative
// path; hidden ones are skipped, links to folders are not followed. Throws FeedError: there is none.
std::vector<Picture> find(const std::filesystem::path& folder,
                          bool (*is_accepted_too)(const std::filesystem::path&));

// A list file: one "path" or "path label" a line, paths relative to the list's folder; UTF-8 with
// or without a byte order mark, LF or CRLF, `#` comments, paths with spaces.
// Throws FeedError: not a text file, no line, or labels that are missing or no whole numbers.
std::vector<Picture> read_list(const std::filesystem::path& path);

// The bytes of the file. Throws FeedError: it is missing, unreadable or empty.
std::string read(const Picture& picture);

// File bytes -> uint8 BGR, or one channel. Throws FeedError: not a complete picture in a format that OpenCV
// reads, over `max_pixels` or 2^28 pixels, which the header tells before the pixels are decoded, or, where all
// bits count (`keep_depth`), more than 8 a pixel; ConfigError: this calib8 was built without OpenCV.
Pixels decode(std::string_view data, const std::string& name, bool grey, bool keep_depth = false,
              int max_pixels = kMaxPixels);

// The decoder with its version, such as "OpenCV 4.6.0": the pixels of an image may depend on it. Throws ConfigError: this calib8 was built without OpenCV.
std::string decoder_version();

}  // namespace calib8::images
CALIB8_EXPORT_END

// TensorRT's calibration cache: text in, CalibrationCache out, and back byte for byte.
//
//   TRT-8503-EntropyCalibration2        header: version label, algorithm of the calibrator
//   data: 3c008912                      tensor name, ": ", scale as float32 bits in hex
//   conv/Conv2D:0: 3c60dd38             a name may hold ":", so the line splits at the LAST ": "
//   (Unnamed Layer* 4) [Shuffle]_output: 0      no zero padding: zero is one digit
//
// The scale is amax / 127. The rules and the error messages equal those of
// deploy/calibration/trt_cache.py.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

inline constexpr std::string_view kEntropy2 = "EntropyCalibration2";
inline constexpr std::string_view kEntropy = "EntropyCalibration";
inline constexpr std::string_view kMinMax = "MinMaxCalibration";
inline constexpr std::string_view kLegacy = "LegacyCalibration";

// One line: the tensor's name, the hex digits as written, and the line end.
struct Entry {
  std::string name;
  std::string digits;
  std::string end = "\n";

  std::uint32_t bits()
      const;            // the float32 bit pattern; throws CacheError: digits that are not hex
  float scale() const;  // real value of one int8 step: amax / 127
  // The reason why a Q/DQ node cannot use this scale: "zero", "inf", "NaN", "negative"; or nothing.
  std::optional<std::string> flaw() const;
};

// The first line.
struct Header {
  std::string text;              // as written, without the line end
  std::optional<int> label;      // TensorRT's version label; none in the legacy form
  std::string algorithm;         // e.g. "EntropyCalibration2"
  std::optional<double> cutoff;  // in the legacy form only
  std::optional<double> quantile;
  std::string end = "\n";
};

using NamedScales = std::vector<std::pair<std::string, float>>;

struct CalibrationCache {
  Header header;
  std::vector<Entry> entries;  // in file order, duplicates included

  // Names that occur more than once, in order of first occurrence.
  std::vector<std::string> duplicates() const;
  // Tensor name -> scale in file order. Throws CacheError where one name has two scales.
  NamedScales scales() const;
  // The text; the exact inverse of parse_cache.
  std::string dump() const;
};

// Reads the text of a cache; `origin` names it in errors. Zero, infinite and NaN scales,
// duplicates and any order are accepted, since TensorRT writes them.
// Throws CacheError: not a TensorRT calibration cache (with its likely origin), or a broken one.
CalibrationCache parse_cache(std::string_view data, const std::string& origin);

// Reads a file. Throws CacheError.
CalibrationCache read_cache(const std::filesystem::path& path);

struct CacheOptions {
  std::string version;  // X.Y.Z of the TensorRT that will read it
  std::string algorithm = std::string(kEntropy2);
  double quantile = 0.999999;  // for the header of the legacy algorithm only
  double cutoff = 1.0;
};

// Make the cache that TensorRT reads from tensor names and scales, in order. Throws CacheError: no scales,
// a NaN or negative scale, or a name that no cache line can hold.
CalibrationCache cache_from_scales(const NamedScales& scales, const CacheOptions& options);

// The same entries under the header of another TensorRT version, and algorithm if given. The legacy
// form has no version label: without `algorithm` it is returned unchanged. Throws CacheError.
CalibrationCache relabel(const CalibrationCache& cache, const std::string& version,
                         const std::optional<std::string>& algorithm = std::nullopt);

// The version as TensorRT's label: 8.5.3 -> 8503, 10.14.1 -> 101401. Throws CacheError.
int version_label(const std::string& version);

// The version of a label: 8503 -> 8.5.3; the inverse of version_label.
std::string label_to_version(int label);

// A clause that says what a file that is not a cache most likely is.
std::string likely_origin(std::string_view data);

}  // namespace calib8
CALIB8_EXPORT_END

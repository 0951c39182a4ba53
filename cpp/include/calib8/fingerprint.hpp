// What a calibration was made from and who made it, so that a stale cache is told part by part;
// deploy/calibration/fingerprint.py. It is kept beside the cache, in CACHE.json, in the same form, so
// that a cache that one program made is used by the other.
//
//   made from   model, images, preprocessing, decoder     compared: another one is another calibration
//   made by     calib8 or TensorRT, version, method       told
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "calib8/export.hpp"
#include "calib8/model_identity.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

inline constexpr std::string_view kMadeByCalib8 = "calib8";
inline constexpr std::string_view kMadeByTensorrt = "TensorRT";

// Tables are JSON objects as text.
struct Fingerprint {
  ModelIdentity model;
  std::string images = "{}";      // {"count", "sha256", ...} of the feed; "{}" of no images
  std::string order;              // sha256 of the images' digests in their order
  std::string preprocess = "{}";  // the preprocessing, field by field
  std::string decoder =
      "{}";  // what made samples of files: probe_decoder() of calib8/decoder_probe.hpp
  std::string program = std::string(kMadeByTensorrt);
  std::string rule;             // how batches decide the range; "histogram": in any order
  std::string method;           // search; a calibrator of TensorRT as a cache's first line has it
  std::string numbers = "{}";   // calib8's own arithmetic, where it is not TensorRT's
  std::string versions = "{}";  // of the programs that took part

  // Throws CacheError: a table that is no JSON object.
  std::string to_json() const;
  // Reads Python's form of schema 4 too. Throws CacheError: missing or mistyped parts.
  static Fingerprint from_json(const std::string& json);

  // Part -> what changed from `old` to this one, as a sentence's end; empty if nothing did.
  std::map<std::string, std::string> changes_since(const Fingerprint& old) const;

  // Who made it: "calib8 0.1.0 by mse", "TensorRT 8.6.1 by EntropyCalibration2".
  std::string maker() const;
};

// Splits a feed's manifest into the images, order and preprocess parts, and tells the decoder.
// Throws FeedError: it is no manifest.
void set_feed(Fingerprint& fingerprint, const std::string& manifest);

// CACHE.json beside a cache.
std::filesystem::path sidecar(const std::filesystem::path& cache);

// Writes the cache and then its fingerprint, each atomically. Throws ExportError, or CacheError: a
// fingerprint without a model, method or version.
void save_calibration(const std::filesystem::path& cache, std::string_view text,
                      const Fingerprint& fingerprint);

// Node -> its output tensor, of the nodes whose values overflow float16.
using Float32Layers = std::map<std::string, std::string>;

// A cache with what stands beside it.
struct StoredCache {
  std::string text;
  Fingerprint fingerprint;
  Float32Layers float32_layers;  // by a build of Python's calib8 with --rest fp16; else empty
};

// Throws CacheError: a file is missing or broken, or not of the same writing as the other.
StoredCache read_stored_cache(const std::filesystem::path& cache);

// Why what is kept does not fit, part by part; "" where it does. Compared is what it was made from, as
// far as `now` says it (without images the model alone), and the images' order where it shows.
std::string describe_mismatch(const StoredCache& kept, const Fingerprint& now);

// Why the file there cannot be used again; nothing where it can.
std::optional<std::string> describe_mismatch(const std::filesystem::path& cache,
                                             const Fingerprint& fingerprint);

}  // namespace calib8
CALIB8_EXPORT_END

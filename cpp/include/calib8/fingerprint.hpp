// The inputs of a calibration and the program that made it, so that messages can say which part of an
// outdated cache differs; deploy/calibration/fingerprint.py. It is stored next to the cache, in
// CACHE.json, in the same form, so that each program can use the other's caches.
//
//   made from   model, images, preprocessing, decoder     compared: must be equal to use the cache
//   made by     calib8 or TensorRT, version, method       reported only
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
  std::string images = "{}";      // {"count", "sha256", ...} of the feed; "{}" without images
  std::string order;              // sha256 of the images' digests in their order
  std::string preprocess = "{}";  // the preprocessing, field by field
  std::string decoder = "{}";     // the image decoder: probe_decoder() of calib8/decoder_probe.hpp
  std::string program = std::string(kMadeByTensorrt);
  std::string rule;             // how batches decide the range; "histogram": in any order
  std::string method;           // search, or TensorRT's calibrator as named in a cache's first line
  std::string numbers = "{}";   // calib8's own arithmetic, where it is not TensorRT's
  std::string versions = "{}";  // of the programs involved

  // Throws CacheError: a table is not a JSON object.
  std::string to_json() const;
  // Reads Python's form of schema 4 too. Throws CacheError: missing or mistyped parts.
  static Fingerprint from_json(const std::string& json);

  // Part -> a clause on the change from `old` to this one; empty if they are equal.
  std::map<std::string, std::string> changes_since(const Fingerprint& old) const;

  // The program that made it: "calib8 0.1.0 by mse", "TensorRT 8.6.1 by EntropyCalibration2".
  std::string maker() const;
};

// Sets the images, order and preprocess parts from a feed's manifest, and the decoder.
// Throws FeedError: the text is not a manifest.
void set_feed(Fingerprint& fingerprint, const std::string& manifest);

// The path CACHE.json of a cache's fingerprint.
std::filesystem::path sidecar(const std::filesystem::path& cache);

// Writes the cache and then its fingerprint, each atomically. Throws ExportError, or CacheError: the
// fingerprint lacks the model, method or version.
void save_calibration(const std::filesystem::path& cache, std::string_view text,
                      const Fingerprint& fingerprint);

// Node -> its output tensor, for the nodes whose values overflow float16.
using Float32Layers = std::map<std::string, std::string>;

// A cache with its fingerprint and note.
struct StoredCache {
  std::string text;
  Fingerprint fingerprint;
  Float32Layers float32_layers;  // written by Python's calib8 build --rest fp16; else empty
};

// Throws CacheError: a file is missing or damaged, or the two were not written together.
StoredCache read_stored_cache(const std::filesystem::path& cache);

// Sentences on the parts of the cache's fingerprint that differ from `now`; "" if the cache can be used.
// Compares the inputs that `now` has (without images only the model), and the order of the images if the
// range rule depends on it.
std::string describe_mismatch(const StoredCache& stored, const Fingerprint& now);

// The reason why the cache file cannot be used again; nothing if it can.
std::optional<std::string> describe_mismatch(const std::filesystem::path& cache,
                                             const Fingerprint& fingerprint);

}  // namespace calib8
CALIB8_EXPORT_END

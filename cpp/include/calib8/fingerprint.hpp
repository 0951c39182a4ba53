// What a calibration was made from, so that a stale cache is told from a fitting one, part by part;
// deploy/calibration/fingerprint.py. It is kept beside the cache, in CACHE.json, in the same form.
//
// The model's part is the sha256 of the file here, and of what the graph computes there: a cache
// made by the one program is never taken for fitting by the other.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

// Tables are JSON objects as text.
struct Fingerprint {
  std::string model;       // sha256 of the model's file
  std::string images;      // {"count", "sha256", ...} of the feed, whatever the order and the names
  std::string order;       // sha256 of the images' digests in their order
  std::string preprocess;  // the preprocessing, field by field
  std::string rule;        // how batches decide the range
  std::string versions;    // what computed the scales
  std::string method;

  // Throws CacheError: a table that is no JSON object.
  std::string to_json() const;
  // Throws CacheError: missing or mistyped parts.
  static Fingerprint from_json(const std::string& json);

  // Part -> what changed from `old` to this one, as a sentence's end; empty if nothing did.
  std::map<std::string, std::string> changes_since(const Fingerprint& old) const;
  // The changes as one sentence in the order of the parts, or nothing.
  std::string changes_sentence(const Fingerprint& old) const;
};

// Splits a feed's manifest into the images, order and preprocess parts. Throws FeedError: it is none.
void set_feed(Fingerprint& fingerprint, const std::string& manifest);

// CACHE.json beside a cache.
std::filesystem::path sidecar(const std::filesystem::path& cache);

// Writes the cache and then its fingerprint, each atomically. Throws ExportError, or CacheError
// where a part of the fingerprint is missing.
void save_calibration(const std::filesystem::path& cache, std::string_view text,
                      const Fingerprint& fingerprint);

// Why the file there cannot be used again; nothing where it can.
std::optional<std::string> unfit(const std::filesystem::path& cache,
                                 const Fingerprint& fingerprint);

}  // namespace calib8
CALIB8_EXPORT_END

#include "calib8/fingerprint.hpp"

#include <array>
#include <set>
#include <system_error>

#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/files.hpp"
#include "calib8/text.hpp"
#include "json_text.hpp"

namespace calib8 {
namespace {

using json_text::Json;
using json_text::parse;

struct Part {
  const char* key;
  const char* noun;
  std::string Fingerprint::*value;
  bool table;
};

// In the order in which changes are told.
constexpr std::array<Part, 7> kParts{
    {{"model", "the model (weights or graph)", &Fingerprint::model, false},
     {"images", "the images", &Fingerprint::images, true},
     {"order", "the order of the images", &Fingerprint::order, false},
     {"preprocess", "the preprocessing", &Fingerprint::preprocess, true},
     {"rule", "the range rule", &Fingerprint::rule, false},
     {"versions", "a version", &Fingerprint::versions, true},
     {"method", "the method", &Fingerprint::method, false}}};

Json value_of(const Fingerprint& fingerprint, const Part& part) {
  const std::string& text = fingerprint.*part.value;
  return part.table ? parse(text) : Json(text);
}

Json field(const Json& table, const std::string& key) {
  return table.contains(key) ? table[key] : Json();
}

// Whether two values are equal whatever the order of their keys.
bool equal(const Json& a, const Json& b) {
  return nlohmann::json::parse(a.dump()) == nlohmann::json::parse(b.dump());
}

// The fields that differ, short; digests are only said to differ.
std::string difference(const Json& before, const Json& now) {
  if (before.is_string()) {
    const auto old = before.get<std::string>();
    return old.size() == 64 ? "" : old + " -> " + now.get<std::string>();
  }
  std::set<std::string> keys;
  for (const auto& [key, value] : before.items()) keys.insert(key);
  for (const auto& [key, value] : now.items()) keys.insert(key);
  std::string words;
  for (const std::string& key : keys) {
    const Json old = field(before, key);
    const Json fresh = field(now, key);
    if (equal(old, fresh)) continue;
    const std::string from = json_text::str(old);
    const std::string to = json_text::str(fresh);
    words += words.empty() ? "" : ", ";
    words += key + (from.size() <= 40 && to.size() <= 40 ? " " + from + " -> " + to : "");
  }
  return words;
}

constexpr const char* kNotSound = " is not a fingerprint that this version of calib8 reads";
constexpr int kSchema = 2;

}  // namespace

std::string Fingerprint::to_json() const {
  Json json;
  for (const Part& part : kParts) {
    json[part.key] = value_of(*this, part);
    if (part.table && !json[part.key].is_object()) {
      throw CacheError(std::string("a fingerprint's ") + part.key + " is a JSON object, got " +
                       text::repr(text::head(this->*part.value, 60)) + "; fill it in");
    }
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Fingerprint Fingerprint::from_json(const std::string& json) {
  const Json data = parse(json);
  bool sound = data.is_object() && data.size() == kParts.size();
  for (const Part& part : kParts) {
    sound = sound && data.contains(part.key) &&
            (part.table ? data[part.key].is_object() : data[part.key].is_string());
  }
  if (!sound) {
    throw CacheError("a fingerprint needs the parts model, order, rule, method, images,"
                     " preprocess, versions");
  }
  Fingerprint made;
  for (const Part& part : kParts) {
    const Json& value = data[part.key];
    made.*part.value = part.table ? value.dump() : value.get<std::string>();
  }
  return made;
}

std::map<std::string, std::string> Fingerprint::changes_since(const Fingerprint& old) const {
  std::map<std::string, std::string> changed;
  for (const Part& part : kParts) {
    const Json before = value_of(old, part);
    const Json now = value_of(*this, part);
    if (equal(before, now)) continue;
    const std::string detail = difference(before, now);
    changed[part.key] =
        std::string(part.noun) + " changed" + (detail.empty() ? "" : " (" + detail + ")");
  }
  return changed;
}

std::string Fingerprint::changes_sentence(const Fingerprint& old) const {
  const std::map<std::string, std::string> changed = changes_since(old);
  std::string sentence;
  for (const Part& part : kParts) {
    const auto found = changed.find(part.key);
    if (found == changed.end()) continue;
    sentence += (sentence.empty() ? "" : "; ") + found->second;
  }
  return sentence;
}

void set_feed(Fingerprint& fingerprint, const std::string& manifest) {
  Json images = parse(manifest);
  if (!images.is_object() || !field(images, "preprocess").is_object() ||
      !field(images, "ordered_sha256").is_string()) {
    throw FeedError("a fingerprint is made of a feed's manifest, got " +
                    text::repr(text::head(manifest, 60)) + "; give Feed::manifest()");
  }
  fingerprint.preprocess = images["preprocess"].dump();
  fingerprint.order = images["ordered_sha256"].get<std::string>();
  images.erase("preprocess");
  images.erase("ordered_sha256");
  fingerprint.images = images.dump();
}

std::filesystem::path sidecar(const std::filesystem::path& cache) {
  return cache.string() + ".json";
}

void save_calibration(const std::filesystem::path& cache, std::string_view text,
                      const Fingerprint& fingerprint) {
  Json document;
  document["schema"] = kSchema;
  document["fingerprint"] = parse(fingerprint.to_json());
  document["scales"] = Json::object();
  document["troubles"] = Json::object();
  document["sha256"] = {{"cache", Sha256().update(text).hex()}, {"statistics", ""}};
  files::write(cache, text);
  files::write(sidecar(cache), document.dump(1) + "\n");
}

std::optional<std::string> unfit(const std::filesystem::path& cache,
                                 const Fingerprint& fingerprint) {
  std::error_code failed;
  const std::filesystem::path beside = sidecar(cache);
  if (!std::filesystem::exists(cache, failed)) return cache.string() + " does not exist yet";
  if (!std::filesystem::exists(beside, failed)) {
    return cache.string() + " has no fingerprint beside it, so nothing tells what it was made from";
  }
  try {
    const Json document = parse(files::read(beside, files::kMostText));
    const bool sound = document.is_object() && field(document, "schema") == kSchema &&
                       field(document, "sha256").is_object() &&
                       document.contains("fingerprint");
    if (!sound) return beside.string() + kNotSound;
    if (field(document["sha256"], "cache") != Sha256().update(files::read(cache, files::kMostText)).hex()) {
      return cache.string() + " was changed after " + beside.filename().string() + " was written";
    }
    const auto old = Fingerprint::from_json(document["fingerprint"].dump());
    const std::string changes = fingerprint.changes_sentence(old);
    return changes.empty() ? std::nullopt : std::optional<std::string>(changes);
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace calib8

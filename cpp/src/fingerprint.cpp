#include "calib8/fingerprint.hpp"

#include <array>
#include <set>
#include <system_error>
#include <vector>

#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/files.hpp"
#include "calib8/probe.hpp"
#include "calib8/text.hpp"
#include "json_text.hpp"

namespace calib8 {
namespace {

using json_text::Json;
using json_text::parse;

struct Part {
  const char* key;
  const char* noun;  // "" for what is only told
  std::string Fingerprint::*value;
  bool table;
  bool made_by;
};

constexpr const char* kModel = "the model (weights or graph)";

// All but the model, in the order in which changes are told.
constexpr std::array<Part, 9> kParts{
    {{"images", "the images", &Fingerprint::images, true, false},
     {"order", "the order of the images", &Fingerprint::order, false, false},
     {"preprocess", "the preprocessing", &Fingerprint::preprocess, true, false},
     {"decoder", "the decoder", &Fingerprint::decoder, true, false},
     {"rule", "the range rule", &Fingerprint::rule, false, true},
     {"numbers", "a version", &Fingerprint::numbers, true, true},
     {"method", "the method", &Fingerprint::method, false, true},
     {"program", "", &Fingerprint::program, false, true},
     {"versions", "", &Fingerprint::versions, true, true}}};

Json value_of(const Fingerprint& fingerprint, const Part& part) {
  const std::string& text = fingerprint.*part.value;
  if (!part.table) return Json(text);
  Json table = parse(text);
  if (!table.is_object()) {
    throw CacheError(std::string("a fingerprint's ") + part.key + " must be a JSON object, got " +
                     text::repr(text::head(text, 60)) + "; fill it in");
  }
  return table;
}

Json field(const Json& table, const std::string& key) {
  return table.contains(key) ? table[key] : Json();
}

// Whether two values are equal whatever the order of their keys.
bool equal(const Json& a, const Json& b) { return nlohmann::json(a) == nlohmann::json(b); }

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

constexpr const char* kLibrary = "library";  // of the decoder: its name, which only tells

// Whether two decoders make the same of pictures: by what they made of some, or by name.
bool same_decoder(const Json& before, const Json& now) {
  if (before.empty() || now.empty()) return true;  // of arrays, and the images say so
  std::size_t common = 0;
  for (const auto& [key, value] : before.items()) {
    if (key == kLibrary || !now.contains(key)) continue;
    if (!equal(value, now[key])) return false;
    ++common;
  }
  return common > 1 || equal(field(before, kLibrary), field(now, kLibrary));
}

constexpr int kSchema = 5;  // SCHEMA of deploy/calibration/store.py
constexpr int kOldest = 4;
constexpr std::size_t kDigits = 64;

// The model's identities as a table without those that are not known.
Json model_of(const ModelIdentity& model) {
  Json found = Json::object();
  if (!model.graph.empty()) found["graph"] = model.graph;
  if (!model.file.empty()) found["file"] = model.file;
  if (!model.weights.empty()) found["weights"] = model.weights;
  return found;
}

[[noreturn]] void lacking() {
  throw CacheError(
      "a fingerprint needs the parts model, images, order, preprocess, decoder of what"
      " it was made from and program, rule, method, numbers, versions of who made it");
}

std::string text_of(const Json& table, const char* key) {
  const Json value = field(table, key);
  if (!value.is_string()) lacking();
  return value.get<std::string>();
}

ModelIdentity identity_in(const Json& model) {
  if (!model.is_object()) lacking();
  for (const auto& [key, value] : model.items()) {
    if (!value.is_string()) lacking();
  }
  const auto known = [&model](const char* key) {
    return model.contains(key) ? model[key].get<std::string>() : std::string();
  };
  return {known("graph"), known("file"), known("weights")};
}

// The parts of schema 4, of which Python's was the only writer, as those of today.
Json halves_of(const Json& old) {
  const std::array<const char*, 7> parts{"images",     "method", "model",   "order",
                                         "preprocess", "rule",   "versions"};
  bool known = old.is_object() && old.size() == parts.size();
  for (const char* part : parts) known = known && old.contains(part);
  if (!known || !old["versions"].is_object()) lacking();
  Json decoder = Json::object();
  Json numbers = Json::object();
  Json versions = Json::object();
  for (const auto& [key, value] : old["versions"].items()) {
    if (key == "opencv") {
      decoder[kLibrary] = "OpenCV " + json_text::str(value);
    } else if (key == "decoding") {
      decoder[key] = value;
    } else {
      const bool number = key == "frontend" || key == "searches" || key == "statistics";
      (number ? numbers : versions)[key] = value;
    }
  }
  return {{"made_from",
           {{"model", {{"graph", old["model"]}}},
            {"images", old["images"]},
            {"order", old["order"]},
            {"preprocess", old["preprocess"]},
            {"decoder", decoder}}},
          {"made_by",
           {{"program", kMadeByCalib8},
            {"rule", old["rule"]},
            {"method", old["method"]},
            {"numbers", numbers},
            {"versions", versions}}}};
}

std::string seal(const std::string& digest) { return "\"this\": \"" + digest + "\""; }

// The document's text, with the sha256 of itself as it is without those digits.
std::string sealed(Json document) {
  document["sha256"]["this"] = "";
  std::string text = document.dump(1) + "\n";
  const std::string digest = Sha256().update(text).hex();
  const std::string empty = seal("");
  return text.replace(text.find(empty), empty.size(), seal(digest));
}

// Whether the document is as it was written; of schema 4 that is Python's to judge.
bool whole(const std::string& text, const Json& document) {
  if (document["schema"] == kOldest) return true;
  const Json digest = field(document["sha256"], "this");
  if (!digest.is_string() || digest.get<std::string>().size() != kDigits) return false;
  const std::string own = seal(digest.get<std::string>());
  const std::size_t at = text.find(own);
  if (at == std::string::npos || text.find(own, at + 1) != std::string::npos) return false;
  std::string without = text;
  without.replace(at, own.size(), seal(""));
  return Sha256().update(without).hex() == digest.get<std::string>();
}

Json document_of(const std::string& text, const std::filesystem::path& beside) {
  const Json document = parse(text);
  const Json schema = document.is_object() ? field(document, "schema") : Json();
  const bool sound = (schema == kSchema || schema == kOldest) && document.contains("fingerprint") &&
                     field(document, "sha256").is_object();
  if (!sound) {
    throw CacheError(beside.string() + " is not a fingerprint that this version of calib8 reads");
  }
  if (!whole(text, document)) {
    throw CacheError(beside.string() + " was changed after it was written");
  }
  return document;
}

Float32Layers float32_layers_in(const Json& document) {
  Float32Layers layers;
  const Json listed = field(document, "float32_layers");
  if (!listed.is_object()) return layers;
  for (const auto& [node, tensor] : listed.items()) {
    if (tensor.is_string()) layers[node] = tensor.get<std::string>();
  }
  return layers;
}

}  // namespace

std::string Fingerprint::to_json() const {
  Json from{{"model", model_of(model)}};
  Json by = Json::object();
  for (const Part& part : kParts) (part.made_by ? by : from)[part.key] = value_of(*this, part);
  return Json{{"made_from", from}, {"made_by", by}}.dump(-1, ' ', false,
                                                         Json::error_handler_t::replace);
}

Fingerprint Fingerprint::from_json(const std::string& json) {
  const Json given = parse(json);
  if (!given.is_object()) lacking();
  const Json data = given.contains("made_from") ? given : halves_of(given);
  const Json from = field(data, "made_from");
  const Json by = field(data, "made_by");
  if (!from.is_object() || !by.is_object() || from.size() + by.size() != kParts.size() + 1)
    lacking();
  Fingerprint made;
  made.model = identity_in(field(from, "model"));
  for (const Part& part : kParts) {
    const Json& half = part.made_by ? by : from;
    if (part.table && !field(half, part.key).is_object()) lacking();
    made.*part.value = part.table ? half[part.key].dump() : text_of(half, part.key);
  }
  return made;
}

std::map<std::string, std::string> Fingerprint::changes_since(const Fingerprint& old) const {
  std::map<std::string, std::string> changed;
  if (!same_model(old.model, model)) {
    const bool beside = !old.model.file.empty() && old.model.file == model.file;
    changed["model"] = std::string(kModel) + " changed" + (beside ? " (its external data)" : "");
  }
  for (const Part& part : kParts) {
    const Json before = value_of(old, part);
    const Json now = value_of(*this, part);
    const bool decoder = part.value == &Fingerprint::decoder;
    if (*part.noun == 0 || (decoder ? same_decoder(before, now) : equal(before, now))) continue;
    const std::string detail = difference(before, now);
    changed[part.key] =
        std::string(part.noun) + " changed" + (detail.empty() ? "" : " (" + detail + ")");
  }
  return changed;
}

std::string Fingerprint::by() const {
  const Json known = parse(versions);
  const char* key = program == kMadeByTensorrt ? "tensorrt" : "calib8";
  const Json version = known.is_object() ? field(known, key) : Json();
  return program + (version.is_null() ? "" : " " + json_text::str(version)) + " by " + method;
}

void set_feed(Fingerprint& fingerprint, const std::string& manifest) {
  Json images = parse(manifest);
  const bool arrays = images.is_object() && field(images, "preprocess").is_null();
  if (!images.is_object() || !(arrays || images["preprocess"].is_object()) ||
      !field(images, "ordered_sha256").is_string()) {
    throw FeedError("a fingerprint is made of a feed's manifest, got " +
                    text::repr(text::head(manifest, 60)) + "; give Feed::manifest()");
  }
  fingerprint.preprocess = arrays ? "{}" : images["preprocess"].dump();
  fingerprint.order = images["ordered_sha256"].get<std::string>();
  images.erase("preprocess");
  images.erase("ordered_sha256");
  fingerprint.images = images.dump();
  fingerprint.decoder = arrays ? "{}" : decoder();
}

std::filesystem::path sidecar(const std::filesystem::path& cache) {
  return cache.string() + ".json";
}

void save_calibration(const std::filesystem::path& cache, std::string_view text,
                      const Fingerprint& fingerprint) {
  if (model_of(fingerprint.model).empty() || fingerprint.method.empty() ||
      parse(fingerprint.versions).empty()) {
    throw CacheError(
        "a fingerprint must tell the model, the method and a version, got one"
        " without; fill it before it is saved");
  }
  Json document;
  document["schema"] = kSchema;
  document["fingerprint"] = parse(fingerprint.to_json());
  document["observations"] = Json::array();
  document["outliers"] = Json::array();
  document["sha256"] = {{"cache", Sha256().update(text).hex()}, {"statistics", ""}};
  files::write(cache, text);
  files::write(sidecar(cache), sealed(document));
}

Kept read_kept(const std::filesystem::path& cache) {
  std::error_code failed;
  const std::filesystem::path beside = sidecar(cache);
  if (!std::filesystem::exists(cache, failed)) {
    throw CacheError(cache.string() + " does not exist yet");
  }
  if (!std::filesystem::exists(beside, failed)) {
    throw CacheError(cache.string() +
                     " has no fingerprint beside it, so nothing tells what it was made from");
  }
  try {
    const Json document = document_of(files::read(beside, files::kMostText), beside);
    Kept kept{files::read(cache, files::kMostText), {}, float32_layers_in(document)};
    if (field(document["sha256"], "cache") != Sha256().update(kept.text).hex()) {
      throw CacheError(cache.string() + " was changed after " + beside.filename().string() +
                       " was written");
    }
    kept.fingerprint = Fingerprint::from_json(document["fingerprint"].dump());
    return kept;
  } catch (const FeedError& error) {
    throw CacheError(error.what());
  }
}

std::string unfit(const Kept& kept, const Fingerprint& now) {
  const Fingerprint& old = kept.fingerprint;
  const std::map<std::string, std::string> changed = now.changes_since(old);
  std::vector<std::string> compared{"model"};
  if (!parse(now.images).empty()) {
    compared.insert(compared.end(), {"images", "preprocess", "decoder"});
    if (old.rule != "histogram") compared.emplace_back("order");
  }
  std::string sentence;
  for (const std::string& part : compared) {
    const auto found = changed.find(part);
    if (found != changed.end()) sentence += (sentence.empty() ? "" : "; ") + found->second;
  }
  return sentence;
}

std::optional<std::string> unfit(const std::filesystem::path& cache,
                                 const Fingerprint& fingerprint) {
  try {
    const std::string changes = unfit(read_kept(cache), fingerprint);
    return changes.empty() ? std::nullopt : std::optional<std::string>(changes);
  } catch (const CacheError& error) {
    return error.what();
  }
}

}  // namespace calib8

#include "calib8/fingerprint.hpp"

#include <array>
#include <set>
#include <system_error>
#include <vector>

#include "calib8/decoder_probe.hpp"
#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/files.hpp"
#include "calib8/text.hpp"
#include "json_text.hpp"

namespace calib8 {
namespace {

using json_text::Json;
using json_text::parse;

struct FingerprintPart {
  const char* key;
  const char* noun;  // "" for a part that is reported, not compared
  std::string Fingerprint::*value;
  bool table;
  bool made_by;
};

constexpr std::size_t kSha256Digits = 64;
constexpr const char* kModel = "the model (weights or graph)";

// All parts but the model, in the order of the messages.
constexpr std::array<FingerprintPart, 9> kParts{
    {{"images", "the images", &Fingerprint::images, true, false},
     {"order", "the order of the images", &Fingerprint::order, false, false},
     {"preprocess", "the preprocessing", &Fingerprint::preprocess, true, false},
     {"decoder", "the decoder", &Fingerprint::decoder, true, false},
     {"rule", "the range rule", &Fingerprint::rule, false, true},
     {"numbers", "a version", &Fingerprint::numbers, true, true},
     {"method", "the method", &Fingerprint::method, false, true},
     {"program", "", &Fingerprint::program, false, true},
     {"versions", "", &Fingerprint::versions, true, true}}};

Json value_of(const Fingerprint& fingerprint, const FingerprintPart& part) {
  const std::string& text = fingerprint.*part.value;
  if (!part.table) return Json(text);
  Json table = parse(text);
  if (!table.is_object()) {
    throw CacheError(std::string("a fingerprint's ") + part.key + " must be a JSON object, got " +
                     text::repr(text::head(text, 60)) + "; fill it in");
  }
  return table;
}

Json value_or_null(const Json& table, const std::string& key) {
  return table.contains(key) ? table[key] : Json();
}

// Whether two values are equal whatever the order of their keys.
bool are_equal(const Json& a, const Json& b) { return nlohmann::json(a) == nlohmann::json(b); }

// The fields that differ, with short values; digests are named without their values.
std::string describe_difference(const Json& old_part, const Json& new_part) {
  if (old_part.is_string()) {
    const auto old_text = old_part.get<std::string>();
    const bool is_digest = old_text.size() == kSha256Digits;
    return is_digest ? "" : old_text + " -> " + new_part.get<std::string>();
  }

  std::set<std::string> keys;
  for (const auto& [key, value] : old_part.items()) keys.insert(key);
  for (const auto& [key, value] : new_part.items()) keys.insert(key);
  std::string text;
  for (const std::string& key : keys) {
    const Json old_value = value_or_null(old_part, key);
    const Json new_value = value_or_null(new_part, key);
    if (are_equal(old_value, new_value)) continue;

    const std::string from = json_text::str(old_value);
    const std::string to = json_text::str(new_value);
    const bool is_short = from.size() <= 40 && to.size() <= 40;
    text += text.empty() ? "" : ", ";
    text += key;
    if (is_short) text += " " + from + " -> " + to;
  }
  return text;
}

constexpr const char* kLibraryKey =
    "library";  // the decoder's name, used only where no digests can be compared

// Whether two decoders give equal pixels, by their digests of test pictures, else by name.
bool same_decoder(const Json& old_value, const Json& now) {
  if (old_value.empty() || now.empty())
    return true;  // a feed of arrays, which the images part compares
  std::size_t common_keys = 0;
  for (const auto& [key, value] : old_value.items()) {
    if (key == kLibraryKey || !now.contains(key)) continue;
    if (!are_equal(value, now[key])) return false;
    ++common_keys;
  }
  return common_keys > 1 ||
         are_equal(value_or_null(old_value, kLibraryKey), value_or_null(now, kLibraryKey));
}

constexpr int kSchema = 5;  // SCHEMA of deploy/calibration/store.py
constexpr int kOldestSchema = 4;

// The model's known digests as a table.
Json identity_json(const ModelIdentity& model) {
  Json json = Json::object();
  if (!model.graph.empty()) json["graph"] = model.graph;
  if (!model.file.empty()) json["file"] = model.file;
  if (!model.weights.empty()) json["weights"] = model.weights;
  return json;
}

[[noreturn]] void refuse_incomplete() {
  throw CacheError(
      "a fingerprint needs the parts model, images, order, preprocess, decoder of what"
      " it was made from and program, rule, method, numbers, versions of who made it");
}

std::string text_of(const Json& table, const char* key) {
  const Json value = value_or_null(table, key);
  if (!value.is_string()) refuse_incomplete();
  return value.get<std::string>();
}

ModelIdentity read_identity(const Json& model) {
  if (!model.is_object()) refuse_incomplete();
  for (const auto& [key, value] : model.items()) {
    if (!value.is_string()) refuse_incomplete();
  }
  const auto value_or_empty = [&model](const char* key) {
    return model.contains(key) ? model[key].get<std::string>() : std::string();
  };
  return {value_or_empty("graph"), value_or_empty("file"), value_or_empty("weights")};
}

// Convert the parts of schema 4, which only Python wrote, to those of today.
Json convert_schema_4(const Json& old) {
  const std::array<const char*, 7> keys{"images",     "method", "model",   "order",
                                        "preprocess", "rule",   "versions"};
  bool is_schema_4 = old.is_object() && old.size() == keys.size();
  for (const char* expected_key : keys) is_schema_4 = is_schema_4 && old.contains(expected_key);
  if (!is_schema_4 || !old["versions"].is_object()) refuse_incomplete();
  Json decoder = Json::object();
  Json numbers = Json::object();
  Json versions = Json::object();
  for (const auto& [key, value] : old["versions"].items()) {
    if (key == "opencv") {
      decoder[kLibraryKey] = "OpenCV " + json_text::str(value);
    } else if (key == "decoding") {
      decoder[key] = value;
    } else {
      const bool is_arithmetic = key == "frontend" || key == "searches" || key == "statistics";
      (is_arithmetic ? numbers : versions)[key] = value;
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

std::string seal_field(const std::string& digest) { return "\"this\": \"" + digest + "\""; }

// The document's text with its own sha256, which is taken with those digits empty.
std::string seal_document(Json document) {
  document["sha256"]["this"] = "";
  std::string text = document.dump(1) + "\n";
  const std::string digest = Sha256().update(text).hex();
  const std::string empty = seal_field("");
  return text.replace(text.find(empty), empty.size(), seal_field(digest));
}

// Whether the document is unchanged since it was written; for schema 4 only Python checks that.
bool is_unchanged(const std::string& text, const Json& document) {
  if (document["schema"] == kOldestSchema) return true;
  const Json digest = value_or_null(document["sha256"], "this");
  if (!digest.is_string() || digest.get<std::string>().size() != kSha256Digits) return false;
  const std::string sealed = seal_field(digest.get<std::string>());
  const std::size_t position = text.find(sealed);
  if (position == std::string::npos || text.find(sealed, position + 1) != std::string::npos)
    return false;
  std::string without = text;
  without.replace(position, sealed.size(), seal_field(""));
  return Sha256().update(without).hex() == digest.get<std::string>();
}

Json parse_document(const std::string& text, const std::filesystem::path& sidecar_path) {
  const Json document = parse(text);
  const Json schema = document.is_object() ? value_or_null(document, "schema") : Json();
  const bool is_valid = (schema == kSchema || schema == kOldestSchema) &&
                        document.contains("fingerprint") &&
                        value_or_null(document, "sha256").is_object();
  if (!is_valid) {
    throw CacheError(sidecar_path.string() +
                     " is not a fingerprint that this version of calib8 reads");
  }
  if (!is_unchanged(text, document)) {
    throw CacheError(sidecar_path.string() + " was changed after it was written");
  }
  return document;
}

Float32Layers read_float32_layers(const Json& document) {
  Float32Layers layers;
  const Json table = value_or_null(document, "float32_layers");
  if (!table.is_object()) return layers;
  for (const auto& [node, tensor] : table.items()) {
    if (tensor.is_string()) layers[node] = tensor.get<std::string>();
  }
  return layers;
}

}  // namespace

std::string Fingerprint::to_json() const {
  Json from_table{{"model", identity_json(model)}};
  Json by_table = Json::object();
  for (const FingerprintPart& part : kParts)
    (part.made_by ? by_table : from_table)[part.key] = value_of(*this, part);
  return Json{{"made_from", from_table}, {"made_by", by_table}}.dump(
      -1, ' ', false, Json::error_handler_t::replace);
}

Fingerprint Fingerprint::from_json(const std::string& json) {
  const Json parsed = parse(json);
  if (!parsed.is_object()) refuse_incomplete();
  const Json data = parsed.contains("made_from") ? parsed : convert_schema_4(parsed);
  const Json from_table = value_or_null(data, "made_from");
  const Json by_table = value_or_null(data, "made_by");
  if (!from_table.is_object() || !by_table.is_object() ||
      from_table.size() + by_table.size() != kParts.size() + 1)
    refuse_incomplete();
  Fingerprint fingerprint;
  fingerprint.model = read_identity(value_or_null(from_table, "model"));
  for (const FingerprintPart& part : kParts) {
    const Json& half = part.made_by ? by_table : from_table;
    if (part.table && !value_or_null(half, part.key).is_object()) refuse_incomplete();
    fingerprint.*part.value = part.table ? half[part.key].dump() : text_of(half, part.key);
  }
  return fingerprint;
}

std::map<std::string, std::string> Fingerprint::changes_since(const Fingerprint& old) const {
  std::map<std::string, std::string> changes;
  if (!same_model(old.model, model)) {
    const bool is_same_file = !old.model.file.empty() && old.model.file == model.file;
    changes["model"] =
        std::string(kModel) + " changed" + (is_same_file ? " (its external data)" : "");
  }
  for (const FingerprintPart& part : kParts) {
    const Json old_value = value_of(old, part);
    const Json now = value_of(*this, part);
    const bool is_decoder = part.value == &Fingerprint::decoder;
    if (*part.noun == 0 || (is_decoder ? same_decoder(old_value, now) : are_equal(old_value, now)))
      continue;
    const std::string detail = describe_difference(old_value, now);
    changes[part.key] =
        std::string(part.noun) + " changed" + (detail.empty() ? "" : " (" + detail + ")");
  }
  return changes;
}

std::string Fingerprint::maker() const {
  const Json version_table = parse(versions);
  const char* key = program == kMadeByTensorrt ? "tensorrt" : "calib8";
  const Json version = version_table.is_object() ? value_or_null(version_table, key) : Json();
  return program + (version.is_null() ? "" : " " + json_text::str(version)) + " by " + method;
}

void set_feed(Fingerprint& fingerprint, const std::string& manifest) {
  Json images = parse(manifest);
  const bool has_arrays = images.is_object() && value_or_null(images, "preprocess").is_null();
  if (!images.is_object() || !(has_arrays || images["preprocess"].is_object()) ||
      !value_or_null(images, "ordered_sha256").is_string()) {
    throw FeedError("a fingerprint is made of a feed's manifest, got " +
                    text::repr(text::head(manifest, 60)) + "; give Feed::manifest()");
  }
  fingerprint.preprocess = has_arrays ? "{}" : images["preprocess"].dump();
  fingerprint.order = images["ordered_sha256"].get<std::string>();
  images.erase("preprocess");
  images.erase("ordered_sha256");
  fingerprint.images = images.dump();
  fingerprint.decoder = has_arrays ? "{}" : probe_decoder();
}

std::filesystem::path sidecar(const std::filesystem::path& cache) {
  return cache.string() + ".json";
}

void save_calibration(const std::filesystem::path& cache, std::string_view text,
                      const Fingerprint& fingerprint) {
  if (identity_json(fingerprint.model).empty() || fingerprint.method.empty() ||
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
  files::write(sidecar(cache), seal_document(document));
}

StoredCache read_stored_cache(const std::filesystem::path& cache) {
  std::error_code failed;
  const std::filesystem::path sidecar_path = sidecar(cache);
  if (!std::filesystem::exists(cache, failed)) {
    throw CacheError(cache.string() + " does not exist yet");
  }
  if (!std::filesystem::exists(sidecar_path, failed)) {
    throw CacheError(cache.string() +
                     " has no fingerprint beside it, so nothing tells what it was made from");
  }
  try {
    const Json document =
        parse_document(files::read(sidecar_path, files::kMaxTextBytes), sidecar_path);
    StoredCache stored{files::read(cache, files::kMaxTextBytes), {}, read_float32_layers(document)};
    if (value_or_null(document["sha256"], "cache") != Sha256().update(stored.text).hex()) {
      throw CacheError(cache.string() + " was changed after " + sidecar_path.filename().string() +
                       " was written");
    }
    stored.fingerprint = Fingerprint::from_json(document["fingerprint"].dump());
    return stored;
  } catch (const FeedError& error) {
    throw CacheError(error.what());
  }
}

std::string describe_mismatch(const StoredCache& stored, const Fingerprint& now) {
  const Fingerprint& old = stored.fingerprint;
  const std::map<std::string, std::string> changed = now.changes_since(old);
  std::vector<std::string> compared_parts{"model"};
  if (!parse(now.images).empty()) {
    compared_parts.insert(compared_parts.end(), {"images", "preprocess", "decoder"});
    if (old.rule != "histogram") compared_parts.emplace_back("order");
  }
  std::string sentence;
  for (const std::string& part : compared_parts) {
    const auto change = changed.find(part);
    if (change != changed.end()) sentence += (sentence.empty() ? "" : "; ") + change->second;
  }
  return sentence;
}

std::optional<std::string> describe_mismatch(const std::filesystem::path& cache,
                                             const Fingerprint& fingerprint) {
  try {
    const std::string changes = describe_mismatch(read_stored_cache(cache), fingerprint);
    return changes.empty() ? std::nullopt : std::optional<std::string>(changes);
  } catch (const CacheError& error) {
    return error.what();
  }
}

}  // namespace calib8

// Answers questions of the Python tests, one JSON object a line in, one out: what does the C++
// library make of this file? An error is answered as {"error": kind, "message": text}.
#include <array>
#include <ctime>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "calib8/cache.hpp"
#include "calib8/decoder_probe.hpp"
#include "calib8/entropy.hpp"
#include "calib8/errors.hpp"
#include "calib8/feed.hpp"
#include "calib8/files.hpp"
#include "calib8/fingerprint.hpp"
#include "calib8/histogram.hpp"
#include "calib8/images.hpp"
#include "calib8/latency.hpp"
#include "calib8/pixels.hpp"
#include "calib8/searches.hpp"

namespace {

using Json = nlohmann::ordered_json;
using namespace calib8;

template <class T>
std::vector<T> array_of(const std::string& path) {
  const std::string bytes = files::read(path);
  std::vector<T> values(bytes.size() / sizeof(T));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(values.data()));
  return values;
}

// Bytes as hex: JSON holds no bytes that are no UTF-8.
std::string hex(const std::string& bytes) {
  std::string out;
  for (const char c : bytes) {
    constexpr char kDigits[] = "0123456789abcdef";
    const auto byte = static_cast<unsigned char>(c);
    out += {kDigits[byte >> 4U], kDigits[byte & 15U]};
  }
  return out;
}

Json scale_json(const Scale& scale) {
  return {{"lo", scale.lo},
          {"hi", scale.hi},
          {"amax", scale.amax},
          {"observed_min", scale.observed_min},
          {"observed_max", scale.observed_max},
          {"method", scale.method}};
}

Json cache(const Json& ask) {
  const std::string data = files::read(ask["path"].get<std::string>());
  const CalibrationCache parsed = parse_cache(data, ask["origin"].get<std::string>());
  Json entries = Json::array();
  for (const Entry& entry : parsed.entries) {
    entries.push_back({hex(entry.name), entry.bits(), entry.flaw() ? Json(*entry.flaw()) : Json()});
  }
  Json duplicates = Json::array();
  for (const std::string& name : parsed.duplicates()) duplicates.push_back(hex(name));
  return {{"label", parsed.header.label ? Json(*parsed.header.label) : Json()},
          {"algorithm", parsed.header.algorithm},
          {"round_trip", parsed.dump() == data},
          {"entries", entries},
          {"duplicates", duplicates},
          {"unique", parsed.scales().size()}};
}

Json write_cache(const Json& ask) {
  NamedScales scales;
  for (const Json& pair : ask["scales"]) {
    scales.emplace_back(pair[0].get<std::string>(), pair[1].get<float>());
  }
  CacheOptions options;
  options.version = ask["version"].get<std::string>();
  options.algorithm = ask["algorithm"].get<std::string>();
  return {{"text", cache_from_scales(scales, options).dump()}};
}

Json relabel_cache(const Json& ask) {
  const CalibrationCache parsed = parse_cache(ask["text"].get<std::string>(), "x");
  std::optional<std::string> algorithm;
  if (!ask["algorithm"].is_null()) algorithm = ask["algorithm"].get<std::string>();
  return {{"text", relabel(parsed, ask["version"].get<std::string>(), algorithm).dump()}};
}

// Batches of float32 -> counts and the entropy scale.
Json histogram(const Json& ask) {
  Histogram statistics = ask["base"].is_null() ? Histogram() : Histogram(ask["base"].get<double>());
  for (const Json& path : ask["batches"]) {
    const std::vector<float> values = array_of<float>(path.get<std::string>());
    statistics.observe(values.data(), values.size());
  }
  return {{"counts", statistics.counts()},
          {"full_range", statistics.full_range()},
          {"total", statistics.total()},
          {"infinite", statistics.infinite()},
          {"scale", scale_json(entropy::scale(statistics))}};
}

// Rows of float32, each of its own length -> the scales of every search.
Json scales(const Json& ask) {
  const auto values = array_of<float>(ask["path"].get<std::string>());
  const auto percents = ask["percents"].get<std::vector<double>>();
  Json result = Json::array();
  const float* next = values.data();
  for (const Json& size : ask["sizes"]) {
    Json row = Json::array();
    const auto count = size.get<std::size_t>();
    for (const std::string& name : Search::names()) {
      const bool by_share = name == "percentile";
      for (const double percent :
           by_share ? percents : std::vector<double>{percentiles::kPercent}) {
        const Search search(name, percent);
        Histogram statistics = search.start(next, count);
        statistics.observe(next, count);
        row.push_back(scale_json(search.scale(statistics)));
      }
    }
    result.push_back(row);
    next += count;
  }
  return {{"found", result}};
}

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// Rows of float32 of one size, read once -> CPU seconds of counting them again, and of each search.
// For benchmarks/counting_cost.py.
Json cost(const Json& ask) {
  static const auto values = array_of<float>(ask["path"].get<std::string>());
  const auto size = ask["size"].get<std::size_t>();
  static std::vector<Histogram> histograms(values.size() / size);
  double start = cpu_seconds();
  for (std::size_t row = 0; row < histograms.size(); ++row) {
    histograms[row].observe(values.data() + row * size, size);
  }
  Json seconds{{"count", cpu_seconds() - start}};
  for (const Json& name : ask["searches"]) {
    const Search search(name.get<std::string>());
    start = cpu_seconds();
    for (const Histogram& histogram : histograms) (void)search.scale(histogram);
    seconds[name.get<std::string>()] = cpu_seconds() - start;
  }
  return seconds;
}

Json search(const Json& ask) {
  Json thresholds = Json::array();
  const auto counts = array_of<std::int64_t>(ask["path"].get<std::string>());
  for (std::size_t k = 0; k + entropy::kBins <= counts.size(); k += entropy::kBins) {
    const auto begin = counts.begin() + static_cast<std::ptrdiff_t>(k);
    thresholds.push_back(entropy::search({begin, begin + entropy::kBins}));
  }
  return {{"found", thresholds}};
}

TensorSpec spec_of(const Json& ask) {
  TensorSpec spec{ask["name"].get<std::string>(), ask["dtype"].get<std::string>(), {}};
  for (const Json& dim : ask["shape"]) {
    if (dim.is_number()) {
      spec.shape.emplace_back(dim.get<std::int64_t>());
    } else {
      spec.shape.emplace_back(dim.is_null() ? std::string() : dim.get<std::string>());
    }
  }
  return spec;
}

std::vector<TensorSpec> specs_of(const Json& ask) {
  if (!ask.is_array()) return {spec_of(ask)};
  std::vector<TensorSpec> specs;
  for (const Json& spec : ask) specs.push_back(spec_of(spec));
  return specs;
}

// The scales of every search over the float32 values of all samples, by input.
Json scales_of(const Feed& feed) {
  std::map<std::string, std::map<std::string, Histogram>> histograms;
  const auto stream = feed.samples();
  while (const std::optional<Sample> sample = stream->next()) {
    for (const Tensor& tensor : *sample) {
      if (tensor.dtype != "float32") continue;
      const std::size_t count = tensor.bytes.size() / sizeof(float);
      for (const std::string& name : Search::names()) {
        const Histogram empty = Search(name).start(tensor.floats(), count);
        histograms[tensor.name]
            .try_emplace(name, empty)
            .first->second.observe(tensor.floats(), count);
      }
    }
  }
  Json result = Json::object();
  for (const auto& [tensor, by_search] : histograms) {
    for (const auto& [name, histogram] : by_search) {
      result[tensor][name] = scale_json(Search(name).scale(histogram));
    }
  }
  return result;
}

// The samples of files as a function gives them.
NextSample in_memory(const Json& ask) {
  const Feed files(ask["source"].get<std::string>(), specs_of(ask["spec"]), {});
  std::vector<Sample> samples;
  const auto stream = files.samples();
  while (std::optional<Sample> sample = stream->next()) samples.push_back(std::move(*sample));
  return [samples = std::move(samples), k = std::size_t{0}]() mutable -> std::optional<Sample> {
    if (k == samples.size()) return std::nullopt;
    return samples[k++];
  };
}

// All samples to a file, and everything that the feed says of itself.
Json feed(const Json& ask) {
  FeedOptions options;
  if (!ask["preset"].is_null()) options.preprocess = preset(ask["preset"].get<std::string>());
  if (!ask["options"].is_null()) options.preprocess = Preprocess::from_json(ask["options"].dump());
  options.skip_bad = ask["skip_bad"].get<bool>();
  if (!ask["limit"].is_null()) options.limit = ask["limit"].get<std::size_t>();
  if (ask.contains("threads") && !ask["threads"].is_null()) {
    options.threads = ask["threads"].get<int>();
  }
  const bool memory = ask.value("memory", false);
  const auto specs = specs_of(ask.contains("to") ? ask["to"] : ask["spec"]);
  const Feed opened = memory ? Feed(in_memory(ask), specs, options)
                             : Feed(ask["source"].get<std::string>(), specs, options);
  std::ofstream out(ask["out"].get<std::string>(), std::ios::binary);
  const auto stream = opened.samples();
  Json shapes = Json::array();
  while (const std::optional<Sample> sample = stream->next()) {
    for (const Tensor& tensor : *sample) {
      out.write(tensor.bytes.data(), static_cast<std::streamsize>(tensor.bytes.size()));
      shapes.push_back(tensor.shape);
    }
  }
  const auto labels = opened.labels();
  Json result{{"shapes", shapes},
              {"size", opened.size()},
              {"labels", labels ? Json(*labels) : Json()},
              {"names", opened.names()},
              {"skipped", opened.skipped()},
              {"notes", opened.notes()},
              {"manifest", Json::parse(opened.manifest())}};
  if (ask.value("scales", false)) result["scales"] = scales_of(opened);
  return result;
}

void write_raw(const Json& ask, const void* data, std::size_t size) {
  std::ofstream out(ask["out"].get<std::string>(), std::ios::binary);
  out.write(static_cast<const char*>(data), static_cast<std::streamsize>(size));
}

// The pixels of one file.
Json decode(const Json& ask) {
  const std::string name = ask["name"].get<std::string>();
  const std::string data = images::read({ask["path"].get<std::string>(), name, std::nullopt});
  const int max_pixels = ask.value("max_pixels", images::kMaxPixels);
  const Pixels pixels = images::decode(data, name, ask["grey"].get<bool>(), false, max_pixels);
  write_raw(ask, pixels.data.data(), pixels.data.size());
  return {{"shape", {pixels.height, pixels.width, pixels.channels}}};
}

Json apply_preprocess(const Json& ask) {
  const auto shape = ask["shape"].get<std::array<int, 3>>();
  Pixels pixels(shape[0], shape[1], shape[2]);
  pixels.data = array_of<std::uint8_t>(ask["path"].get<std::string>());
  const std::vector<float> values = apply(pixels, Preprocess::from_json(ask["options"].dump()));
  write_raw(ask, values.data(), values.size() * sizeof(float));
  return {{"count", values.size()}};
}

Json list(const Json& ask) {
  Json result = Json::array();
  for (const images::Picture& picture : images::read_list(ask["path"].get<std::string>())) {
    result.push_back({picture.name, picture.label ? Json(*picture.label) : Json()});
  }
  return {{"pictures", result}};
}

Json presets_json(const Json& /*ask*/) {
  Json all = Json::object();
  for (const auto& [name, preprocess] : presets()) all[name] = Json::parse(preprocess.to_json());
  return all;
}

Json preprocess(const Json& ask) {
  return Json::parse(Preprocess::from_json(ask["options"].dump()).to_json());
}

Json latency(const Json& ask) {
  std::vector<DeviceTimes> device;
  for (const Json& row : ask["device"]) device.push_back({row[0], row[1], row[2], row[3]});
  const auto host = ask["host"].get<std::vector<double>>();
  return Json::parse(Latency::of(host, device, 3).to_json());
}

Json changes(const Json& ask) {
  const Fingerprint now = Fingerprint::from_json(ask["now"].dump());
  const Fingerprint old = Fingerprint::from_json(ask["old"].dump());
  return {{"changes", now.changes_since(old)},
          {"same", nlohmann::json::parse(now.to_json()) == nlohmann::json(ask["now"])}};
}

Json identity(const Json& ask) {
  const ModelIdentity identity = identity_of(ask["path"].get<std::string>());
  return {{"graph", identity.graph}, {"file", identity.file}, {"weights", identity.weights}};
}

// What stands beside a cache, and whether it fits.
Json stored_cache(const Json& ask) {
  const StoredCache stored = read_stored_cache(ask["path"].get<std::string>());
  Json out{{"by", stored.fingerprint.maker()}, {"text", stored.text}};
  if (!stored.float32_layers.empty()) out["float32_layers"] = stored.float32_layers;
  if (ask.contains("now"))
    out["unfit"] = describe_mismatch(stored, Fingerprint::from_json(ask["now"].dump()));
  return out;
}

Json save(const Json& ask) {
  save_calibration(ask["path"].get<std::string>(), ask["text"].get<std::string>(),
                   Fingerprint::from_json(ask["fingerprint"].dump()));
  return {{"saved", true}};
}

Json answer(const Json& ask) {
  const std::string op = ask["op"].get<std::string>();
  if (op == "cache") return cache(ask);
  if (op == "write") return write_cache(ask);
  if (op == "relabel") return relabel_cache(ask);
  if (op == "histogram") return histogram(ask);
  if (op == "cost") return cost(ask);
  if (op == "search") return search(ask);
  if (op == "scales") return scales(ask);
  if (op == "feed") return feed(ask);
  if (op == "decode") return decode(ask);
  if (op == "apply") return apply_preprocess(ask);
  if (op == "list") return list(ask);
  if (op == "presets") return presets_json(ask);
  if (op == "preprocess") return preprocess(ask);
  if (op == "latency") return latency(ask);
  if (op == "changes") return changes(ask);
  if (op == "identity") return identity(ask);
  if (op == "typed") return {{"typed", is_typed(ask["path"].get<std::string>())}};
  if (op == "decoder") return Json::parse(probe_decoder());
  if (op == "kept") return stored_cache(ask);
  if (op == "save") return save(ask);
  throw std::invalid_argument("no such question: " + op);
}

const char* kind(const Error& error) {
  if (dynamic_cast<const CacheError*>(&error) != nullptr) return "CacheError";
  if (dynamic_cast<const FeedError*>(&error) != nullptr) return "FeedError";
  if (dynamic_cast<const ConfigError*>(&error) != nullptr) return "ConfigError";
  if (dynamic_cast<const CalibrationError*>(&error) != nullptr) return "CalibrationError";
  return "Error";
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    Json out;
    try {
      out = answer(Json::parse(line));
    } catch (const Error& error) {
      out = {{"error", kind(error)}, {"message", error.what()}};
    }
    std::cout << out.dump(-1, ' ', true, Json::error_handler_t::replace) << std::endl;
  }
}

// calib8-cache: calibration tables and preprocessing, without TensorRT.
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "arguments.hpp"
#include "calib8/cache.hpp"
#include "calib8/errors.hpp"
#include "calib8/feed.hpp"
#include "calib8/files.hpp"
#include "calib8/histogram.hpp"
#include "calib8/searches.hpp"
#include "calib8/text.hpp"
#include "feed_options.hpp"

namespace {

using namespace calib8;
using apps::Arguments;
using Json = nlohmann::ordered_json;
using ArgumentList = std::vector<std::string>;

constexpr const char* kHelp =
    "usage: calib8-cache COMMAND ...\n"
    "\n"
    "  show CACHE                    header and scales as JSON\n"
    "  diff CACHE OTHER              tensors whose scales differ; exit status 1 if any\n"
    "  relabel CACHE --version X.Y.Z [--algorithm NAME] -o OUT\n"
    "                                the same scales for another TensorRT version\n"
    "  calibrate --tensor NAME=FILE.f32 ... --version X.Y.Z -o OUT\n"
    "            [--method mse|minmax|percentile|entropy|entropy-tensorrt|legacy] [--percent P]\n"
    "                                calibration of raw float32 activations; a name may be\n"
    "                                repeated, one file a batch; mse unless told\n"
    "  feed IMAGES --input NAME:1x3x224x224[:DTYPE] ... -o OUT.f32\n"
    "                                preprocess images (folder or list) into raw float32, or\n"
    "                                write arrays (.npy, .npz, .raw, .bin) sample by sample; of\n"
    "                                several inputs one --input each\n";

void print(const Json& json) {
  std::cout << json.dump(2, ' ', false, Json::error_handler_t::replace) << "\n" << std::flush;
  if (!std::cout) throw ExportError("the result cannot be written to standard output");
}

int show(const ArgumentList& argument_list) {
  const Arguments arguments(argument_list, {}, {});
  arguments.expect({"CACHE"});
  const CalibrationCache cache = read_cache(arguments.positional()[0]);
  Json entries = Json::array();
  for (const Entry& entry : cache.entries) {
    Json row{{"name", entry.name}, {"hex", entry.digits}};
    const auto flaw = entry.flaw();
    row["scale"] = flaw && *flaw != "zero" ? Json() : Json(entry.scale());
    row["amax"] = flaw && *flaw != "zero" ? Json() : Json(double{entry.scale()} * 127);
    if (flaw) row["flaw"] = *flaw;
    entries.push_back(row);
  }
  const auto& label = cache.header.label;
  print({{"version", label ? Json(label_to_version(*label)) : Json()},
         {"algorithm", cache.header.algorithm},
         {"duplicates", cache.duplicates()},
         {"entries", entries}});
  return 0;
}

int diff(const ArgumentList& argument_list) {
  const Arguments arguments(argument_list, {}, {});
  arguments.expect({"CACHE", "OTHER"});
  std::map<std::string, std::pair<Json, Json>> scales_by_name;
  for (const auto& [name, scale] : read_cache(arguments.positional()[0]).scales()) {
    scales_by_name[name].first = scale;
  }
  for (const auto& [name, scale] : read_cache(arguments.positional()[1]).scales()) {
    scales_by_name[name].second = scale;
  }
  Json rows = Json::array();
  for (const auto& [name, scales] : scales_by_name) {
    if (scales.first == scales.second) continue;
    rows.push_back({{"name", name}, {"scale", scales.first}, {"other", scales.second}});
  }
  print({{"tensors", scales_by_name.size()}, {"differ", rows}});
  return rows.empty() ? 0 : 1;
}

std::string parse_version(const Arguments& arguments) {
  const std::string version = arguments.required("version");
  if (version_label(version) < version_label("11.0.0")) return version;
  throw CacheError("TensorRT up to 10 reads calibration caches, got " + version +
                   "; it takes a Q/DQ model (calib8 cache to-qdq makes one from a cache)");
}

int relabel_file(const ArgumentList& argument_list) {
  const Arguments arguments(argument_list, {"version", "algorithm", "out"}, {});
  arguments.expect({"CACHE"});
  const CalibrationCache cache = read_cache(arguments.positional()[0]);
  const auto relabelled = relabel(cache, parse_version(arguments), arguments.option("algorithm"));
  files::write(arguments.required("out"), relabelled.dump());
  return 0;
}

std::vector<float> read_floats(const std::string& path) {
  const std::string bytes = files::read(path);
  if (bytes.empty() || bytes.size() % sizeof(float) != 0) {
    throw FeedError(path + " must hold raw float32 values, got " + std::to_string(bytes.size()) +
                    " bytes; write it with numpy's tofile");
  }
  std::vector<float> values(bytes.size() / sizeof(float));
  std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(values.data()));
  return values;
}

// Calls `action`, and names the tensor in its errors.
template <typename Action>
auto with_tensor_name(const std::string& name, Action action) {
  try {
    return action();
  } catch (const CalibrationError& error) {
    throw CalibrationError("tensor " + text::repr(name) + ": " + error.what());
  }
}

using Tensors = std::vector<std::pair<std::string, Histogram>>;

// The histogram of this name, started by its first batch.
Histogram& find_or_start_histogram(Tensors& tensors, const std::string& name,
                                   const std::vector<float>& first_batch, const Search& search) {
  for (auto& [existing_name, histogram] : tensors) {
    if (existing_name == name) return histogram;
  }
  return tensors.emplace_back(name, search.start(first_batch.data(), first_batch.size())).second;
}

Search parse_search(const Arguments& arguments) {
  const std::string method = arguments.option("method").value_or("mse");
  const auto percent = arguments.option("percent");
  if (!percent) return Search(method);
  if (method != "percentile") {
    throw ConfigError("--percent is for --method percentile, got '" + method + "'; leave it out");
  }
  std::size_t parsed_characters = 0;
  double value = 0;
  try {
    value = std::stod(*percent, &parsed_characters);
  } catch (const std::exception&) {
    parsed_characters = std::string::npos;
  }
  if (parsed_characters != percent->size()) {
    throw ConfigError("--percent must be a number, got '" + *percent + "'");
  }
  return Search(method, value);
}

int calibrate(const ArgumentList& argument_list) {
  const Arguments arguments(argument_list, {"tensor", "version", "out", "method", "percent"}, {});
  arguments.expect({});
  const Search search = parse_search(arguments);
  Tensors tensors;
  for (const std::string& text : arguments.all("tensor")) {
    const std::size_t equals = text.rfind('=');
    if (equals == std::string::npos || equals == 0) {
      throw ConfigError("--tensor must read NAME=FILE.f32, got '" + text + "'");
    }
    const std::string name = text.substr(0, equals);
    const std::vector<float> values = read_floats(text.substr(equals + 1));
    with_tensor_name(name, [&] {
      Histogram& histogram = find_or_start_histogram(tensors, name, values, search);
      histogram.observe(values.data(), values.size());
    });
  }
  NamedScales scales;
  for (const auto& [name, histogram] : tensors) {
    const Histogram& values = histogram;
    scales.emplace_back(name,
                        with_tensor_name(name, [&] { return search.scale(values); }).symmetric());
  }
  const CacheOptions options{parse_version(arguments)};
  files::write(arguments.required("out"), cache_from_scales(scales, options).dump());
  return 0;
}

int feed(const ArgumentList& argument_list) {
  std::set<std::string> options = apps::kFeedOptions;
  options.insert("out");
  const Arguments arguments(argument_list, options, {"skip-bad"});
  arguments.expect({"IMAGES"});
  const Feed calibration_feed(arguments.positional()[0], apps::specs_of(arguments),
                              apps::feed_options(arguments));
  std::string bytes;
  const auto stream = calibration_feed.samples();
  while (const std::optional<Sample> sample = stream->next()) {
    for (const Tensor& tensor : *sample) bytes.append(tensor.bytes.data(), tensor.bytes.size());
  }
  files::write(arguments.required("out"), bytes);
  print({{"samples", calibration_feed.size()},
         {"notes", calibration_feed.notes()},
         {"manifest", Json::parse(calibration_feed.manifest())}});
  return 0;
}

int run(const std::string& command, const ArgumentList& argument_list) {
  static const std::map<std::string, int (*)(const ArgumentList&)> kCommands{
      {"show", show},
      {"diff", diff},
      {"relabel", relabel_file},
      {"calibrate", calibrate},
      {"feed", feed}};
  const auto entry = kCommands.find(command);
  if (entry == kCommands.end()) {
    throw ConfigError("'" + command + "' is no command; see calib8-cache --help");
  }
  return entry->second(argument_list);
}

}  // namespace

int main(int argc, char** argv) {
  const ArgumentList argument_list(argv + 1, argv + argc);
  const bool help = argument_list.empty() || std::find(argument_list.begin(), argument_list.end(),
                                                       "--help") != argument_list.end();
  if (help) {
    std::cout << kHelp << "\nOptions of feed:\n" << apps::kFeedHelp;
    return argument_list.empty() ? 2 : 0;
  }
  try {
    return run(argument_list.front(), {argument_list.begin() + 1, argument_list.end()});
  } catch (const std::exception& error) {
    std::cerr << "calib8-cache: " << error.what() << "\n";
    return 2;
  }
}

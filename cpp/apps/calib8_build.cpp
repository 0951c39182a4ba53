// calib8-build: model.onnx and images -> calibration cache, int8 TensorRT engine, latency report.
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "arguments.hpp"
#include "calib8/cache.hpp"
#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/feed.hpp"
#include "calib8/files.hpp"
#include "calib8/fingerprint.hpp"
#include "calib8/trt/builder.hpp"
#include "calib8/trt/cuda.hpp"
#include "calib8/trt/runner.hpp"
#include "feed_options.hpp"

namespace {

using namespace calib8;
using apps::Arguments;
using Json = nlohmann::ordered_json;

constexpr const char* kHelp =
    "usage: calib8-build MODEL.onnx [IMAGES] [options]\n"
    "\n"
    "Calibrates MODEL with IMAGES (a folder or a list file) and builds an int8 TensorRT engine.\n"
    "A model with Q/DQ nodes needs no images, and is the only kind that TensorRT 11 takes.\n"
    "\n"
    "  -o, --out FILE        the engine (default: MODEL.engine)\n"
    "  --cache FILE          the calibration cache (default: MODEL.cache); used again while its\n"
    "                        fingerprint, in FILE.json, fits model, images, method and version\n"
    "  --require-cache       fail where the cache does not fit\n"
    "  --trust-cache         use a cache that has no fingerprint\n"
    "  --calibrator NAME     entropy2 (default), entropy, minmax or legacy\n"
    "  --rest TYPE           fp16 (default) or fp32: what does not run in int8; until TensorRT 10\n"
    "  --batch N             batch for a model that leaves it open (default 1)\n"
    "  --size HxW            height and width for a model that leaves them open\n"
    "  --device N            the GPU, from 0 (default 0)\n"
    "  --json FILE           the report, in the form of Python's calib8\n"
    "  --duration S          seconds of measuring (default 3); 0: ten runs, not warmed up\n";

struct Plan {
  std::string model;
  std::string images;
  std::string engine;
  std::string cache;
  std::string calibrator;
  bool require_cache = false;
  bool trust_cache = false;
  std::optional<int> device;
  std::set<std::string> given;  // what was said of calibrating and precision
  FeedOptions feed;
  trt::BuildOptions build;
  trt::MeasureOptions measure;
  std::string json;
};

// What the report tells of the calibration.
struct Calibrated {
  Json feed;
  Json calibration;
  Json notes = Json::array();
};

Size parse_size(const std::string& text) {
  const apps::InputText parsed = apps::parse_input("size:" + text);
  if (parsed.dims.size() != 2 || text.find_first_not_of("0123456789x") != std::string::npos) {
    throw ConfigError("--size must read HxW, such as 224x224, got '" + text + "'");
  }
  return {std::stoi(parsed.dims[0]), std::stoi(parsed.dims[1])};
}

bool parse_rest(const std::string& text) {
  if (text == "fp16" || text == "fp32") return text == "fp16";
  throw ConfigError("--rest must be fp16 or fp32, got '" + text + "'");
}

// Those of the words that count only where TensorRT calibrates.
std::set<std::string> calibration_words(const Arguments& arguments) {
  std::set<std::string> given;
  if (arguments.positional().size() > 1) given.insert("IMAGES");
  for (const char* name : {"preprocess", "options", "limit", "cache", "calibrator"}) {
    if (arguments.option(name)) given.insert(std::string("--") + name);
  }
  for (const char* name : {"skip-bad", "require-cache", "trust-cache"}) {
    if (arguments.flag(name)) given.insert(std::string("--") + name);
  }
  return given;
}

Plan plan_of(const std::vector<std::string>& words) {
  std::set<std::string> options{"preprocess", "options", "limit", "out",    "cache", "calibrator",
                                "rest",       "batch",   "size",  "device", "json",  "duration"};
  const Arguments arguments(words, options, {"skip-bad", "require-cache", "trust-cache"});
  const std::vector<std::string>& given = arguments.positional();
  if (given.empty() || given.size() > 2) arguments.expect({"MODEL.onnx", "[IMAGES]"});
  Plan plan;
  plan.model = given[0];
  if (given.size() > 1) plan.images = given[1];
  plan.engine = arguments.option("out").value_or(plan.model + ".engine");
  plan.cache = arguments.option("cache").value_or(plan.model + ".cache");
  plan.calibrator = arguments.option("calibrator").value_or("entropy2");
  plan.require_cache = arguments.flag("require-cache");
  plan.trust_cache = arguments.flag("trust-cache");
  plan.feed = apps::feed_options(arguments);
  plan.given = calibration_words(arguments);
  plan.device = arguments.number("device", 0);
  plan.build.batch = arguments.number("batch", 1);
  if (const auto rest = arguments.option("rest")) {
    plan.build.fp16 = parse_rest(*rest);
#if NV_TENSORRT_MAJOR >= 11
    throw ConfigError("--rest is for TensorRT until 10, " + trt::version() +
                      " takes the types of the model's own nodes; leave it away");
#endif
  }
  if (const auto size = arguments.option("size")) plan.build.size = parse_size(*size);
  plan.measure.duration_s = arguments.decimal("duration").value_or(3);
  if (plan.measure.duration_s == 0) plan.measure.warmup_ms = 0;
  plan.json = arguments.option("json").value_or("");
  return plan;
}

#if NV_TENSORRT_MAJOR < 11

constexpr std::pair<const char*, std::string_view> kAlgorithms[] = {
    {"entropy2", kEntropy2}, {"entropy", kEntropy}, {"minmax", kMinMax}, {"legacy", kLegacy}};

std::string algorithm_of(const std::string& calibrator) {
  for (const auto& [name, algorithm] : kAlgorithms) {
    if (calibrator == name) return std::string(algorithm);
  }
  throw ConfigError("--calibrator must be one of entropy2, entropy, minmax, legacy, got '" +
                    calibrator + "'");
}

// TensorRT ignores a cache of another version or calibrator without a word: told here instead.
std::optional<std::string> header_unfit(const Plan& plan) {
  try {
    const Header header = read_cache(plan.cache).header;
    const std::string algorithm = algorithm_of(plan.calibrator);
    const bool labelled = header.label.has_value();
    if (header.algorithm == algorithm &&
        (!labelled || *header.label == version_label(trt::version()))) {
      return std::nullopt;
    }
    return plan.cache + " begins with " + header.text + ", not with the line of TensorRT " +
           trt::version() + " and " + algorithm;
  } catch (const CacheError& error) {
    return error.what();
  }
}

// Why the cache cannot be used, or nothing where it can.
std::optional<std::string> reason_to_calibrate(const Plan& plan, const Fingerprint& fingerprint) {
  const bool foreign = !std::filesystem::exists(sidecar(plan.cache));
  std::optional<std::string> reason;
  if (!(plan.trust_cache && foreign)) reason = unfit(plan.cache, fingerprint);
  if (!reason) reason = header_unfit(plan);
  if (reason && plan.require_cache) {
    throw CacheError("the cache must fit (--require-cache), but " + *reason +
                     "; leave --require-cache away to calibrate anew");
  }
  return reason;
}

// The cache, by TensorRT where the options know none, and the engine built by it.
template <class Calibrator>
std::string build_with(trt::Builder& builder, trt::CalibratorOptions options) {
  if (!options.cache) {
    Calibrator calibrator(options);
    options.cache = builder.calibrate(calibrator);
  }
  Calibrator calibrator(options);
  return builder.build(calibrator);
}

std::string build_calibrated(const Plan& plan, trt::Builder& builder,
                             const trt::CalibratorOptions& options) {
  if (plan.calibrator == "entropy") {
    return build_with<trt::Int8EntropyCalibrator>(builder, options);
  }
  if (plan.calibrator == "minmax") {
    return build_with<trt::Int8MinMaxCalibrator>(builder, options);
  }
  if (plan.calibrator == "legacy") {
    return build_with<trt::Int8LegacyCalibrator>(builder, options);
  }
  return build_with<trt::Int8EntropyCalibrator2>(builder, options);
}

std::string calibrated_engine(const Plan& plan, trt::Builder& builder, Calibrated& told) {
  if (plan.images.empty()) {
    throw ConfigError("a model without Q/DQ nodes is calibrated with images, got none; give a"
                      " folder or a list file");
  }
  algorithm_of(plan.calibrator);
  const TensorSpec spec = builder.calibration_input();
  const auto feed = std::make_shared<Feed>(
      Feed(plan.images, spec, plan.feed).whole_batches());
  Fingerprint fingerprint;
  fingerprint.model = Sha256().update(files::read(plan.model)).hex();
  set_feed(fingerprint, feed->manifest());
  fingerprint.rule = "tensorrt, whole batches of " + std::to_string(feed->batch());
  fingerprint.versions = Json{{"tensorrt", trt::version()}}.dump();
  fingerprint.method = plan.calibrator;
  const auto reason = reason_to_calibrate(plan, fingerprint);
  // at once, not after the hours that an engine may take: a build that fails then costs no cache
  const auto keep = [&](const std::string& cache) {
    save_calibration(plan.cache, cache, fingerprint);
  };
  trt::CalibratorOptions options{feed, spec.name, {}, keep};
  if (!reason) options.cache = files::read(plan.cache);
  std::string engine = build_calibrated(plan, builder, options);
  const Json manifest = Json::parse(feed->manifest());
  told.feed = {{"source", plan.images},
               {"samples", feed->count()},
               {"preprocess", manifest["preprocess"]},
               {"skipped", feed->skipped()},
               {"digest", manifest["sha256"]}};
  told.calibration = {{"method", plan.calibrator},
                      {"reused", !reason},
                      {"reason", reason.value_or("the cache fits")},
                      {"cache", plan.cache}};
  for (const std::string& note : feed->notes()) told.notes.push_back(note);
  return engine;
}

#else

std::string calibrated_engine(const Plan& plan, trt::Builder& /*builder*/, Calibrated& /*told*/) {
  throw ConfigError("TensorRT " + trt::version() + " has no calibrators and takes int8 from Q/DQ"
                    " nodes, " + plan.model + " has none; make them with Python's calib8 build"
                    " --target tensorrt");
}

#endif

Json report_of(const Plan& plan, const TensorSpec& spec, const Calibrated& told,
               const trt::Runner& runner, const Latency& latency) {
  const auto size = [](const std::string& path) { return std::filesystem::file_size(path); };
  Json report{{"schema", "calib8-report/2"},
              {"title", "calib8-build " + plan.model},
              {"model", {{"path", plan.model},
                         {"size_bytes", size(plan.model)},
                         {"inputs", Json::array({spec.describe()})}}}};
  if (!told.feed.is_null()) report["feed"] = told.feed;
  if (!told.calibration.is_null()) report["calibration"] = told.calibration;
  report["engines"] = Json::array({{{"label", "int8"},
                                    {"target", "tensorrt"},
                                    {"path", plan.engine},
                                    {"size_bytes", size(plan.engine)},
                                    {"load_ms", runner.load_ms()},
                                    {"latency", Json::parse(latency.to_json())}}});
  Json files = Json::array({{{"role", "engine"}, {"path", plan.engine}}});
  if (!told.calibration.is_null()) files.push_back({{"role", "cache"}, {"path", plan.cache}});
  report["files"] = files;
  report["notes"] = told.notes;
  return report;
}

std::string explicit_engine(const Plan& plan, trt::Builder& builder, Calibrated& told) {
  std::string unused;
  for (const std::string& word : plan.given) unused += (unused.empty() ? "" : ", ") + word;
  told.notes.push_back("int8 by the model's own Q/DQ nodes, not calibrated here" +
                       (unused.empty() ? "" : "; without effect: " + unused));
  return builder.build();
}

void run(const Plan& plan) {
  if (plan.device) trt::use_device(*plan.device);
  trt::Logger logger;
  Calibrated told;
  trt::Builder builder(plan.model, logger, plan.build);
  const TensorSpec spec = builder.input();
  const std::string engine = builder.has_qdq() ? explicit_engine(plan, builder, told)
                                               : calibrated_engine(plan, builder, told);
  files::write(plan.engine, engine);
  trt::Runner runner(engine, logger);
  const Latency latency = runner.measure(plan.measure);
  const Json report = report_of(plan, spec, told, runner, latency);
  if (!plan.json.empty()) files::write(plan.json, report.dump(1) + "\n");
  for (const Json& note : told.notes) std::cout << "note: " << note.get<std::string>() << "\n";
  std::cout << plan.engine << ": " << engine.size() << " bytes, latency p50 "
            << latency.latency.p50 << " ms, p99 " << latency.latency.p99 << " ms, "
            << latency.throughput_qps << " inferences a second\n";
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty() || std::find(words.begin(), words.end(), "--help") != words.end()) {
    std::cout << kHelp << apps::kFeedHelp;
    return words.empty() ? 2 : 0;
  }
  try {
    run(plan_of(words));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "calib8-build: " << error.what() << "\n";
    return 2;
  }
}

// calib8-build: model.onnx and images -> calibration cache, int8 TensorRT engine, latency report.
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "arguments.hpp"
#include "calib8/errors.hpp"
#include "calib8/feed.hpp"
#include "calib8/files.hpp"
#include "calib8/trt/build.hpp"
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
    "A cache that fits is used instead: calib8's of another machine, TensorRT's own, an earlier\n"
    "run's; then IMAGES may be left out. A model with Q/DQ nodes needs neither, and is the only\n"
    "kind that TensorRT 11 takes.\n"
    "\n"
    "  -o, --out FILE        the engine (default: MODEL.engine); used again while FILE.json fits\n"
    "  --rebuild             build even where the engine there fits\n"
    "  --cache FILE          the calibration cache (default: MODEL.cache); used again while what "
    "it\n"
    "                        was made from, in FILE.json, fits the model and the images given\n"
    "  --require-cache       fail where the cache does not fit\n"
    "  --trust-cache         use the cache as it is, whatever it was made from; never written\n"
    "  --calibrator NAME     entropy2 (default, but for a cache's own), entropy, minmax or legacy\n"
    "  --rest TYPE           fp16 (default), bf16 or fp32: what does not run in int8; until\n"
    "                        TensorRT 10, bf16 from 10 on; a typed model has its own types\n"
    "  --batch N             batch for a model that leaves it open (default 1)\n"
    "  --size HxW            height and width for a model that leaves them open\n"
    "  --opt-shapes NAME:DIMS  the shape of an input to tune and calibrate for, such as\n"
    "                        image:8x3x224x224; again for each input\n"
    "  --min-shapes, --max-shapes NAME:DIMS  the least and the largest (default: the same)\n"
    "  --workspace MIB       limit of scratch memory (default: TensorRT's own)\n"
    "  --timing-cache FILE   timings of tactics to use and to add to; the next build is faster;\n"
    "                        a file that TensorRT refuses as such stays as it is\n"
    "  --dla CORE            run on a DLA core, from 0, and on the GPU what it cannot run\n"
    "  --plugin LIBRARY      of plugins that the model needs, beside TensorRT's own; again for "
    "each\n"
    "  --device N            the GPU, from 0 (default 0)\n"
    "  --json FILE           the report, in the form of Python's calib8\n"
    "  --duration S          seconds of measuring (default 3); 0: ten runs, not warmed up\n";

struct Plan {
  std::string model;
  std::string images;
  std::string engine;
  std::string cache;
  std::optional<int> device;
  std::set<std::string> given;  // what was said of calibrating
  trt::CalibrateAndBuildOptions options;
  trt::MeasureOptions measure;
  std::string json;
};

Size parse_size(const std::string& text) {
  const apps::InputText parsed = apps::parse_input("size:" + text);
  if (parsed.dims.size() != 2 || text.find_first_not_of("0123456789x") != std::string::npos) {
    throw ConfigError("--size must read HxW, such as 224x224, got '" + text + "'");
  }
  return {std::stoi(parsed.dims[0]), std::stoi(parsed.dims[1])};
}

trt::Rest parse_rest([[maybe_unused]] const std::string& text) {
#if NV_TENSORRT_MAJOR >= 11
  throw ConfigError("--rest is for TensorRT until 10, " + trt::version() +
                    " takes the types of the model's own nodes; leave it out");
#else
  if (text == "fp16") return trt::Rest::kFp16;
  if (text == "bf16") return trt::Rest::kBf16;
  if (text == "fp32") return trt::Rest::kFp32;
  throw ConfigError("--rest must be fp16, bf16 or fp32, got '" + text + "'");
#endif
}

// "image:1x3x224x224", of one input, into its shapes.
void parse_shapes(const Arguments& arguments, const char* option, trt::Shape trt::Shapes::*place,
                  std::map<std::string, trt::Shapes>& shapes) {
  for (const std::string& text : arguments.all(option)) {
    const apps::InputText parsed = apps::parse_input(text);
    trt::Shape& shape = shapes[parsed.name].*place;
    shape.clear();
    for (const std::string& dim : parsed.dims) {
      if (dim.find_first_not_of("0123456789") != std::string::npos) {
        throw ConfigError(std::string("--") + option +
                          " must read NAME:DIMS with numbers, such as"
                          " image:1x3x224x224, got '" +
                          text + "'");
      }
      shape.push_back(std::stoi(dim));
    }
  }
}

// As trtexec has it: shapes that were not given are the best ones.
std::map<std::string, trt::Shapes> shapes_of(const Arguments& arguments) {
  std::map<std::string, trt::Shapes> shapes;
  parse_shapes(arguments, "min-shapes", &trt::Shapes::min, shapes);
  parse_shapes(arguments, "opt-shapes", &trt::Shapes::opt, shapes);
  parse_shapes(arguments, "max-shapes", &trt::Shapes::max, shapes);
  for (auto& [name, given] : shapes) {
    if (given.opt.empty()) {
      throw ConfigError("an input needs the shape to tune and calibrate for, got none for '" +
                        name + "'; give --opt-shapes");
    }
    if (given.min.empty()) given.min = given.opt;
    if (given.max.empty()) given.max = given.opt;
  }
  return shapes;
}

trt::BuildOptions build_options(const Arguments& arguments) {
  trt::BuildOptions build;
  build.batch = arguments.number("batch", 1);
  if (const auto rest = arguments.option("rest")) build.rest = parse_rest(*rest);
  if (const auto size = arguments.option("size")) build.size = parse_size(*size);
  build.shapes = shapes_of(arguments);
  const auto mib = static_cast<std::size_t>(arguments.number("workspace", 1).value_or(0));
  build.workspace_bytes = mib << 20U;
  build.timing_cache = arguments.option("timing-cache").value_or("");
  build.dla = arguments.number("dla", 0);
  build.plugins = arguments.all("plugin");
  return build;
}

// Those of the words that count only where TensorRT calibrates.
std::set<std::string> calibration_words(const Arguments& arguments) {
  std::set<std::string> given;
  if (arguments.positional().size() > 1) given.insert("IMAGES");
  for (const char* name : {"preprocess", "options", "limit", "threads", "cache", "calibrator"}) {
    if (arguments.option(name)) given.insert(std::string("--") + name);
  }
  for (const char* name : {"skip-bad", "require-cache", "trust-cache"}) {
    if (arguments.flag(name)) given.insert(std::string("--") + name);
  }
  return given;
}

const std::set<std::string> kOptions{
    "preprocess", "options", "limit",        "threads",    "out",        "cache",      "calibrator",
    "rest",       "batch",   "size",         "min-shapes", "opt-shapes", "max-shapes", "workspace",
    "plugin",     "dla",     "timing-cache", "device",     "json",       "duration"};
const std::set<std::string> kFlags{"skip-bad", "require-cache", "trust-cache", "rebuild"};

Plan plan_of(const std::vector<std::string>& words) {
  const Arguments arguments(words, kOptions, kFlags);
  const std::vector<std::string>& given = arguments.positional();
  if (given.empty() || given.size() > 2) arguments.expect({"MODEL.onnx", "[IMAGES]"});
  Plan plan;
  plan.model = given[0];
  if (given.size() > 1) plan.images = given[1];
  plan.engine = arguments.option("out").value_or(plan.model + ".engine");
  plan.cache = arguments.option("cache").value_or(plan.model + ".cache");
  plan.given = calibration_words(arguments);
  plan.device = arguments.number("device", 0);
  plan.options.feed = apps::feed_options(arguments);
  plan.options.build = build_options(arguments);
  plan.options.calibrator = arguments.option("calibrator").value_or("");
  plan.options.require_cache = arguments.flag("require-cache");
  plan.options.trust_cache = arguments.flag("trust-cache");
  plan.options.engine = plan.engine;
  plan.options.rebuild = arguments.flag("rebuild");
  plan.measure.duration_s = arguments.decimal("duration").value_or(3);
  if (plan.measure.duration_s == 0) plan.measure.warmup_ms = 0;
  plan.json = arguments.option("json").value_or("");
  return plan;
}

Json calibration_of(const Plan& plan, const trt::Built& built) {
  return {{"method", *built.method},
          {"reused", built.reused},
          {"reason", built.reason},
          {"cache", plan.cache}};
}

Json feed_of(const Plan& plan, const Feed& feed) {
  const Json manifest = Json::parse(feed.manifest());
  return {{"source", plan.images},
          {"samples", feed.count()},
          {"preprocess", manifest["preprocess"]},
          {"skipped", feed.skipped()},
          {"digest", manifest["sha256"]}};
}

Json report_of(const Plan& plan, const trt::Built& built, const trt::Runner& runner,
               const Latency& latency) {
  const auto size = [](const std::string& path) { return std::filesystem::file_size(path); };
  Json inputs = Json::array();
  for (const TensorSpec& one : built.inputs) inputs.push_back(one.describe());
  Json report{
      {"schema", "calib8-report/2"},
      {"title", "calib8-build " + plan.model},
      {"model", {{"path", plan.model}, {"size_bytes", size(plan.model)}, {"inputs", inputs}}}};
  if (built.feed) report["feed"] = feed_of(plan, *built.feed);
  if (built.method) report["calibration"] = calibration_of(plan, built);
  report["engines"] = Json::array({{{"label", "int8"},
                                    {"target", "tensorrt"},
                                    {"path", plan.engine},
                                    {"size_bytes", size(plan.engine)},
                                    {"load_ms", runner.load_ms()},
                                    {"latency", Json::parse(latency.to_json())}}});
  Json files = Json::array({{{"role", "engine"}, {"path", plan.engine}}});
  if (built.method) files.push_back({{"role", "cache"}, {"path", plan.cache}});
  report["files"] = files;
  report["notes"] = built.notes;
  return report;
}

// What counts only where TensorRT calibrates had no effect on a model with Q/DQ nodes.
std::string without_effect(const Plan& plan) {
  std::string unused;
  for (const std::string& word : plan.given) unused += (unused.empty() ? "" : ", ") + word;
  return "int8 by the model's own Q/DQ nodes, not calibrated here" +
         (unused.empty() ? "" : "; without effect: " + unused);
}

void run(const Plan& plan) {
  if (plan.device) trt::use_device(*plan.device);
  trt::Logger logger;
  trt::Built built =
      trt::calibrate_and_build(plan.model, plan.images, plan.cache, plan.options, logger);
  if (!built.method) built.notes.insert(built.notes.begin(), without_effect(plan));
  trt::Runner runner(built.engine, logger);
  const Latency latency = runner.measure(plan.measure);
  const Json report = report_of(plan, built, runner, latency);
  if (!plan.json.empty()) files::write(plan.json, report.dump(1) + "\n");
  if (built.method) std::cout << plan.cache << ": " << built.reason << "\n";
  for (const std::string& note : built.notes) std::cout << "note: " << note << "\n";
  std::cout << plan.engine << ": " << built.engine.size() << " bytes, latency p50 "
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

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

struct Job {
  std::string model;
  std::string images;
  std::string engine;
  std::string cache;
  std::optional<int> device;
  std::set<std::string> calibration_options;  // those given that concern calibration only
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

trt::FloatType parse_float_type([[maybe_unused]] const std::string& text) {
#if NV_TENSORRT_MAJOR >= 11
  throw ConfigError("--rest is for TensorRT until 10, " + trt::version() +
                    " takes the types of the model's own nodes; leave it out");
#else
  if (text == "fp16") return trt::FloatType::kFp16;
  if (text == "bf16") return trt::FloatType::kBf16;
  if (text == "fp32") return trt::FloatType::kFp32;
  throw ConfigError("--rest must be fp16, bf16 or fp32, got '" + text + "'");
#endif
}

// Reads "image:1x3x224x224" into that input's shapes.
void parse_shapes(const Arguments& arguments, const char* option, trt::Shape trt::Shapes::*member,
                  std::map<std::string, trt::Shapes>& shapes) {
  for (const std::string& text : arguments.all(option)) {
    const apps::InputText parsed = apps::parse_input(text);
    trt::Shape& shape = shapes[parsed.name].*member;
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

// As in trtexec, a minimum or maximum that is not given equals the optimum.
std::map<std::string, trt::Shapes> parse_all_shapes(const Arguments& arguments) {
  std::map<std::string, trt::Shapes> shapes;
  parse_shapes(arguments, "min-shapes", &trt::Shapes::min, shapes);
  parse_shapes(arguments, "opt-shapes", &trt::Shapes::opt, shapes);
  parse_shapes(arguments, "max-shapes", &trt::Shapes::max, shapes);
  for (auto& [name, input_shapes] : shapes) {
    if (input_shapes.opt.empty()) {
      throw ConfigError("an input needs the shape to tune and calibrate for, got none for '" +
                        name + "'; give --opt-shapes");
    }
    if (input_shapes.min.empty()) input_shapes.min = input_shapes.opt;
    if (input_shapes.max.empty()) input_shapes.max = input_shapes.opt;
  }
  return shapes;
}

trt::BuildOptions build_options(const Arguments& arguments) {
  trt::BuildOptions build;
  build.batch = arguments.number("batch", 1);
  if (const auto float_type = arguments.option("rest"))
    build.float_type = parse_float_type(*float_type);
  if (const auto size = arguments.option("size")) build.size = parse_size(*size);
  build.shapes = parse_all_shapes(arguments);
  const auto mib = static_cast<std::size_t>(arguments.number("workspace", 1).value_or(0));
  build.workspace_bytes = mib << 20U;
  build.timing_cache = arguments.option("timing-cache").value_or("");
  build.dla = arguments.number("dla", 0);
  build.plugins = arguments.all("plugin");
  return build;
}

// The names of the given options and arguments that have an effect only where TensorRT calibrates.
std::set<std::string> calibration_options_of(const Arguments& arguments) {
  std::set<std::string> names;
  if (arguments.positional().size() > 1) names.insert("IMAGES");
  for (const char* name :
       {"preprocess", "options", "limit", "threads", "max-pixels", "cache", "calibrator"}) {
    if (arguments.option(name)) names.insert(std::string("--") + name);
  }
  for (const char* name : {"skip-bad", "require-cache", "trust-cache"}) {
    if (arguments.flag(name)) names.insert(std::string("--") + name);
  }
  return names;
}

const std::set<std::string> kOptions{
    "preprocess", "options",   "limit",     "threads", "out",          "cache",
    "calibrator", "rest",      "batch",     "size",    "min-shapes",   "opt-shapes",
    "max-shapes", "workspace", "plugin",    "dla",     "timing-cache", "device",
    "json",       "duration",  "max-pixels"};
const std::set<std::string> kFlags{"skip-bad", "require-cache", "trust-cache", "rebuild"};

Job parse_job(const std::vector<std::string>& argument_list) {
  const Arguments arguments(argument_list, kOptions, kFlags);
  const std::vector<std::string>& positional = arguments.positional();
  if (positional.empty() || positional.size() > 2) arguments.expect({"MODEL.onnx", "[IMAGES]"});
  Job job;
  job.model = positional[0];
  if (positional.size() > 1) job.images = positional[1];
  job.engine = arguments.option("out").value_or(job.model + ".engine");
  job.cache = arguments.option("cache").value_or(job.model + ".cache");
  job.calibration_options = calibration_options_of(arguments);
  job.device = arguments.number("device", 0);
  job.options.feed = apps::feed_options(arguments);
  job.options.build = build_options(arguments);
  job.options.calibrator = arguments.option("calibrator").value_or("");
  job.options.require_cache = arguments.flag("require-cache");
  job.options.trust_cache = arguments.flag("trust-cache");
  job.options.engine = job.engine;
  job.options.rebuild = arguments.flag("rebuild");
  job.measure.duration_s = arguments.decimal("duration").value_or(3);
  if (job.measure.duration_s == 0) job.measure.warmup_ms = 0;
  job.json = arguments.option("json").value_or("");
  return job;
}

Json calibration_of(const Job& job, const trt::BuildResult& result) {
  return {{"method", *result.method},
          {"reused", result.reused},
          {"reason", result.reason},
          {"cache", job.cache}};
}

Json feed_of(const Job& job, const Feed& feed) {
  const Json manifest = Json::parse(feed.manifest());
  return {{"source", job.images},
          {"samples", feed.count()},
          {"preprocess", manifest["preprocess"]},
          {"skipped", feed.skipped()},
          {"digest", manifest["sha256"]}};
}

Json report_of(const Job& job, const trt::BuildResult& result, const trt::Runner& runner,
               const Latency& latency) {
  const auto size = [](const std::string& path) { return std::filesystem::file_size(path); };
  Json inputs = Json::array();
  for (const TensorSpec& spec : result.inputs) inputs.push_back(spec.describe());
  Json report{
      {"schema", "calib8-report/2"},
      {"title", "calib8-build " + job.model},
      {"model", {{"path", job.model}, {"size_bytes", size(job.model)}, {"inputs", inputs}}}};
  if (result.feed) report["feed"] = feed_of(job, *result.feed);
  if (result.method) report["calibration"] = calibration_of(job, result);
  report["engines"] = Json::array({{{"label", "int8"},
                                    {"target", "tensorrt"},
                                    {"path", job.engine},
                                    {"size_bytes", size(job.engine)},
                                    {"load_ms", runner.load_ms()},
                                    {"latency", Json::parse(latency.to_json())}}});
  Json files = Json::array({{{"role", "engine"}, {"path", job.engine}}});
  if (result.method) files.push_back({{"role", "cache"}, {"path", job.cache}});
  report["files"] = files;
  report["notes"] = result.notes;
  return report;
}

// The note for a model with Q/DQ nodes: options of the calibration had no effect.
std::string calibration_note(const Job& job) {
  std::string option_list;
  for (const std::string& option : job.calibration_options)
    option_list += (option_list.empty() ? "" : ", ") + option;
  return "int8 by the model's own Q/DQ nodes, not calibrated here" +
         (option_list.empty() ? "" : "; without effect: " + option_list);
}

void run(const Job& job) {
  if (job.device) trt::use_device(*job.device);
  trt::Logger logger;
  trt::BuildResult result =
      trt::calibrate_and_build(job.model, job.images, job.cache, job.options, logger);
  if (!result.method) result.notes.insert(result.notes.begin(), calibration_note(job));
  trt::Runner runner(result.engine, logger);
  const Latency latency = runner.measure(job.measure);
  const Json report = report_of(job, result, runner, latency);
  if (!job.json.empty()) files::write(job.json, report.dump(1) + "\n");
  if (result.method) std::cout << job.cache << ": " << result.reason << "\n";
  for (const std::string& note : result.notes) std::cout << "note: " << note << "\n";
  std::cout << job.engine << ": " << result.engine.size() << " bytes, latency p50 "
            << latency.latency.p50 << " ms, p99 " << latency.latency.p99 << " ms, "
            << latency.throughput_qps << " inferences a second\n";
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> argument_list(argv + 1, argv + argc);
  if (argument_list.empty() ||
      std::find(argument_list.begin(), argument_list.end(), "--help") != argument_list.end()) {
    std::cout << kHelp << apps::kFeedHelp;
    return argument_list.empty() ? 2 : 0;
  }
  try {
    run(parse_job(argument_list));
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "calib8-build: " << error.what() << "\n";
    return 2;
  }
}

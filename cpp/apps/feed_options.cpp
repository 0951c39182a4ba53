#include "feed_options.hpp"

#include "calib8/errors.hpp"
#include "calib8/files.hpp"

namespace calib8::apps {

FeedOptions feed_options(const Arguments& arguments) {
  FeedOptions options;
  const auto name = arguments.option("preprocess");
  const auto file = arguments.option("options");
  if (name && file) {
    throw ConfigError("--preprocess and --options say the same thing, got both; give one");
  }
  if (name) options.preprocess = preset(*name);
  if (file) options.preprocess = Preprocess::from_json(files::read(*file));
  options.skip_bad = arguments.flag("skip-bad");
  if (const auto limit = arguments.number("limit", 1)) {
    options.limit = static_cast<std::size_t>(*limit);
  }
  options.threads = arguments.number("threads", 1);
  options.max_pixels = arguments.number("max-pixels", 1).value_or(options.max_pixels);
  return options;
}

namespace {

// Cuts ":int64" off; float32 where there is none.
std::string take_dtype(std::string& text) {
  for (const char* dtype : {"float16", "float32", "float64", "int8", "int16", "int32", "int64",
                            "uint8", "uint16", "uint32", "uint64", "bool"}) {
    const std::string ending = std::string(":") + dtype;
    if (text.size() <= ending.size() || text.substr(text.size() - ending.size()) != ending)
      continue;
    text.resize(text.size() - ending.size());
    return dtype;
  }
  return "float32";
}

}  // namespace

std::vector<TensorSpec> specs_of(const Arguments& arguments) {
  (void)arguments.required("input");
  std::vector<TensorSpec> specs;
  for (std::string text : arguments.all("input")) {
    const std::string dtype = take_dtype(text);
    const InputText input = parse_input(text);
    TensorSpec spec{input.name, dtype, {}};
    for (const std::string& dim : input.dims) {
      const bool is_number = dim.find_first_not_of("0123456789") == std::string::npos;
      spec.shape.push_back(is_number ? Dim(std::stoi(dim)) : Dim(dim));
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

}  // namespace calib8::apps

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
  return options;
}

TensorSpec spec_of(const InputText& input) {
  TensorSpec spec{input.name, "float32", {}};
  for (const std::string& dim : input.dims) {
    const bool number = dim.find_first_not_of("0123456789") == std::string::npos;
    spec.shape.push_back(number ? Dim(std::stoi(dim)) : Dim(dim));
  }
  return spec;
}

}  // namespace calib8::apps

// TensorRT's own plugins (EfficientNMS_TRT and others), which models and engines may call for.
#pragma once

#include <string>

#include "calib8/trt/logger.hpp"

namespace calib8::trt {

// Loads libnvinfer_plugin once in a process. Where that fails most models do without, so it is no
// error: gives why, as the end of a sentence, or "".
std::string load_plugins(Logger& logger);

// Loads a library of plugins, which register themselves. Throws ConfigError.
void load_library(const std::string& path);

}  // namespace calib8::trt

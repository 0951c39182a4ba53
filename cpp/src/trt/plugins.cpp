#include "plugins.hpp"

#include <NvInfer.h>
#include <dlfcn.h>

#include <filesystem>
#include <system_error>

#include "calib8/errors.hpp"

namespace calib8::trt {
namespace {

// Opened by name and not linked: it is 30 MB, and needs cuBLAS and cuDNN with some versions.
std::string load_tensorrt_plugins(Logger& logger) {
  const std::string library = "libnvinfer_plugin.so." + std::to_string(NV_TENSORRT_MAJOR);
  void* handle = ::dlopen(library.c_str(), RTLD_LAZY);
  if (handle == nullptr) return std::string("; TensorRT's plugins are not loaded: ") + ::dlerror();
  using Init = bool (*)(void*, const char*);
  const auto init = reinterpret_cast<Init>(::dlsym(handle, "initLibNvInferPlugins"));
  if (init != nullptr && init(static_cast<nvinfer1::ILogger*>(&logger), "")) return "";
  return "; " + library + " did not register its plugins";
}

}  // namespace

void load_library(const std::string& path) {
  std::error_code error;
  const std::string file = std::filesystem::absolute(path, error).string();  // no search by name
  if (::dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr) return;
  const char* const reason = ::dlerror();
  throw ConfigError("a plugin library must load beside this TensorRT, got " +
                    std::string(reason == nullptr ? path : reason) + "; build it for this version");
}

std::string load_plugins(Logger& logger) {
  static const std::string missing = load_tensorrt_plugins(logger);
  return missing;
}

}  // namespace calib8::trt

#include "plugins.hpp"

#include <NvInfer.h>
#include <dlfcn.h>

namespace calib8::trt {
namespace {

// Opened by name and not linked: it is 30 MB, and needs cuBLAS and cuDNN with some versions.
std::string load(Logger& logger) {
  const std::string library = "libnvinfer_plugin.so." + std::to_string(NV_TENSORRT_MAJOR);
  void* handle = ::dlopen(library.c_str(), RTLD_LAZY);
  if (handle == nullptr) return std::string("; TensorRT's plugins are not loaded: ") + ::dlerror();
  using Init = bool (*)(void*, const char*);
  const auto init = reinterpret_cast<Init>(::dlsym(handle, "initLibNvInferPlugins"));
  if (init != nullptr && init(static_cast<nvinfer1::ILogger*>(&logger), "")) return "";
  return "; " + library + " did not register its plugins";
}

}  // namespace

std::string load_plugins(Logger& logger) {
  static const std::string missing = load(logger);
  return missing;
}

}  // namespace calib8::trt

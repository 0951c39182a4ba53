#include "engine_file.hpp"

#include <nlohmann/json.hpp>
#include <system_error>

#include "calib8/digest.hpp"
#include "calib8/errors.hpp"
#include "calib8/files.hpp"
#include "calib8/trt/cuda.hpp"

namespace calib8::trt {
namespace {

using Json = nlohmann::json;

constexpr const char* kDigestKey = "engine_sha256";

std::filesystem::path note_path(const std::filesystem::path& path) {
  return path.string() + ".json";
}

std::string note_text(const std::string& engine, const std::string& source) {
  Json note = Json::parse(source);
  note[kDigestKey] = Sha256().update(engine).hex();
  return note.dump(1) + "\n";
}

}  // namespace

std::optional<std::string> load_matching_engine(const std::filesystem::path& path,
                                                const std::string& source) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error) ||
      !std::filesystem::is_regular_file(note_path(path), error)) {
    return std::nullopt;
  }
  try {
    std::string engine = files::read(path);
    if (files::read(note_path(path)) == note_text(engine, source)) return engine;
  } catch (const Error&) {
    return std::nullopt;  // what cannot be read is built
  }
  return std::nullopt;
}

void save_engine(const std::filesystem::path& path, const std::string& engine,
                 const std::string& source) {
  files::write(path, engine);
  files::write(note_path(path), note_text(engine, source));
}

std::string gpu_name() {
  int device = 0;
  check(cudaGetDevice(&device), "say which GPU is in use");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "describe GPU " + std::to_string(device));
  return properties.name;
}

}  // namespace calib8::trt

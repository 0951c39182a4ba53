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

constexpr const char* kDigest = "engine_sha256";

std::filesystem::path note_of(const std::filesystem::path& path) { return path.string() + ".json"; }

std::string text_of(const std::string& engine, const std::string& made_from) {
  Json note = Json::parse(made_from);
  note[kDigest] = Sha256().update(engine).hex();
  return note.dump(1) + "\n";
}

}  // namespace

std::optional<std::string> fitting_engine(const std::filesystem::path& path,
                                          const std::string& made_from) {
  std::error_code failed;
  if (!std::filesystem::is_regular_file(path, failed) ||
      !std::filesystem::is_regular_file(note_of(path), failed)) {
    return std::nullopt;
  }
  try {
    std::string engine = files::read(path);
    if (files::read(note_of(path)) == text_of(engine, made_from)) return engine;
  } catch (const Error&) {
    return std::nullopt;  // what cannot be read is built
  }
  return std::nullopt;
}

void keep_engine(const std::filesystem::path& path, const std::string& engine,
                 const std::string& made_from) {
  files::write(path, engine);
  files::write(note_of(path), text_of(engine, made_from));
}

std::string gpu_name() {
  int device = 0;
  check(cudaGetDevice(&device), "say which GPU is in use");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "describe GPU " + std::to_string(device));
  return properties.name;
}

}  // namespace calib8::trt

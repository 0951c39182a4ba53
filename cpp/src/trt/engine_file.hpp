// An engine and, beside it, a note of what it was built from and of its sha256; deploy/files/manifest.py.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace calib8::trt {

// The engine there where it was built from exactly this (a JSON object) and is whole.
std::optional<std::string> load_matching_engine(const std::filesystem::path& path,
                                                const std::string& source);

// Writes the engine, then its note. Throws ExportError.
void save_engine(const std::filesystem::path& path, const std::string& engine,
                 const std::string& source);

// Name of the GPU that is in use. Throws BackendError.
std::string gpu_name();

}  // namespace calib8::trt

// Reads and writes complete files; a reader never sees a partly written one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8::files {

inline constexpr std::uintmax_t kMaxBytes = std::uintmax_t{16} << 30U;      // for any file
inline constexpr std::uintmax_t kMaxTextBytes = std::uintmax_t{64} << 20U;  // for a text file

// All bytes of a regular file. Throws FeedError: missing, unreadable, a pipe or a device, or larger than
// `max_bytes` bytes.
std::string read(const std::filesystem::path& path, std::uintmax_t max_bytes = kMaxBytes);

// Writes a temporary file in the same folder, calls fsync, and renames it once, so that a crash at any
// moment leaves either the old bytes or the new ones. Throws ExportError: it cannot be written, or is a pipe or a
// device.
void write(const std::filesystem::path& path, std::string_view data);

}  // namespace calib8::files
CALIB8_EXPORT_END

// Whole files, read and written so that no reader ever sees half of one.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace calib8::files {

// All bytes of a file. Throws FeedError: missing or unreadable.
std::string read(const std::filesystem::path& path);

// Writes by a temporary file in the same folder, fsync and one rename, so that a crash at any
// moment leaves the old bytes or the new ones. Throws ExportError.
void write(const std::filesystem::path& path, std::string_view data);

}  // namespace calib8::files

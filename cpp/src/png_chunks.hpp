// The chunks of a PNG: length, name, body, checksum.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace calib8::png_chunks {

constexpr std::string_view kSign{"\x89PNG\r\n\x1a\n", 8};

// What is wrong with them, empty where nothing is; checked here since libpng prints to stderr.
std::string fault(std::string_view data);

// The body of the first one of this name. The file must be without fault.
std::optional<std::string_view> body(std::string_view data, std::string_view name);

}  // namespace calib8::png_chunks

// What a file that is not a TensorRT calibration cache most likely is: the end of a sentence.
#include <array>

#include "calib8/cache.hpp"
#include "calib8/text.hpp"
#include "scan.hpp"

namespace calib8 {
namespace {

using std::string_view_literals::operator""sv;

struct Magic {
  std::string_view bytes;
  std::string_view clause;
};

constexpr std::string_view kUtf16 = "is UTF-16 text (a Windows redirect?); save it as plain UTF-8";
constexpr std::string_view kEngine = "is a TensorRT engine, not the cache it was built from";

constexpr std::array<Magic, 6> kMagic{{
    {"\xef\xbb\xbfTRT-"sv, "starts with a UTF-8 byte order mark; save it as UTF-8 without BOM"},
    {"\xff\xfe"sv, kUtf16},
    {"\xfe\xff"sv, kUtf16},
    {"version https://git-lfs"sv,
     "is a Git LFS pointer; run `git lfs pull` to get the file itself"},
    {"ptrt"sv, kEngine},
    {"ftrt"sv, kEngine},
}};

bool is_binary(std::string_view data) {
  for (const char c : data) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte <= 0x08 || (byte >= 0x0E && byte <= 0x1F)) return true;
  }
  return false;
}

std::string_view left_strip(std::string_view data) {
  const std::size_t begin = data.find_first_not_of(" \t\n\r\v\f");
  return begin == std::string_view::npos ? std::string_view{} : data.substr(begin);
}

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

// "name value" with a decimal number at the end.
bool is_onnxruntime_line(std::string_view line) {
  const std::size_t space = line.rfind(' ');
  if (space == std::string_view::npos || space < 1 || scan::is_white_space(line.front()))
    return false;
  std::string_view number = line.substr(space + 1);
  const auto skip_digits = [&number] {
    std::size_t count = 0;
    for (; !number.empty() && scan::is_digit(number.front()); ++count) number.remove_prefix(1);
    return count;
  };
  const auto skip_sign = [&number] {
    if (!number.empty() && (number.front() == '+' || number.front() == '-')) {
      number.remove_prefix(1);
    }
  };
  skip_sign();
  std::size_t count = skip_digits();
  if (!number.empty() && number.front() == '.') {
    number.remove_prefix(1);
    const std::size_t fraction = skip_digits();
    if (count == 0 && fraction == 0) return false;
    count += fraction;
  }
  if (count == 0) return false;
  if (!number.empty() && (number.front() == 'e' || number.front() == 'E')) {
    number.remove_prefix(1);
    skip_sign();
    if (skip_digits() == 0) return false;
  }
  return number.empty();
}

std::string quote_start(std::string_view line) { return text::repr_replaced(line.substr(0, 60)); }

// `record {`, with white space anywhere around.
bool is_amct_record(std::string_view data) {
  std::string_view remaining_text = left_strip(data);
  if (!starts_with(remaining_text, "record")) return false;
  remaining_text = left_strip(remaining_text.substr(6));
  return !remaining_text.empty() && remaining_text.front() == '{';
}

std::string text_origin(std::string_view data) {
  std::string_view first_line = data.substr(0, data.find('\n'));
  while (!first_line.empty() && first_line.back() == '\r') first_line.remove_suffix(1);
  const std::string_view start = left_strip(data);
  if (!start.empty() && (start.front() == '{' || start.front() == '[')) {
    return "is JSON (onnxruntime's calibration.json, or a table of another tool), which TensorRT"
           " itself cannot read";
  }
  if (is_amct_record(data)) return "looks like a quantization record of Ascend's AMCT";
  const std::size_t colon = first_line.rfind(": ");
  if (colon != std::string_view::npos && colon > 0 && scan::is_hex(first_line.substr(colon + 2))) {
    return "has entries but no header (it begins with " + quote_start(first_line) +
           "); put the header back";
  }
  if (is_onnxruntime_line(first_line)) {
    return "looks like onnxruntime's own calibration table (name and range, in decimal), which"
           " bears the same file name but is another format; calibrate again with"
           " --target tensorrt";
  }
  if (starts_with(first_line, "TRT-") || starts_with("TRT-", first_line)) {
    return "has the damaged first line " + quote_start(first_line) + "; write it again";
  }
  return "begins with " + quote_start(first_line) + ", which no known calibration tool writes";
}

}  // namespace

std::string likely_origin(std::string_view data) {
  for (const Magic& magic : kMagic) {
    if (starts_with(data, magic.bytes)) return std::string(magic.clause);
  }
  if (is_binary(data.substr(0, 4096))) return "is a binary file of another kind";
  return text_origin(data);
}

}  // namespace calib8

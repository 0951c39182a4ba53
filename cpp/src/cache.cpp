#include "calib8/cache.hpp"

#include <cmath>
#include <cstdio>
#include <map>
#include <set>

#include "calib8/errors.hpp"
#include "calib8/files.hpp"
#include "calib8/text.hpp"
#include "number.hpp"
#include "scan.hpp"

namespace calib8 {
namespace {

struct Line {
  std::string_view text;
  std::string_view end;
};

// Split at LF only; CR stays with the line end; only the last line may lack an end.
std::vector<Line> split(std::string_view data) {
  std::vector<Line> lines;
  while (!data.empty()) {
    const std::size_t newline = data.find('\n');
    const std::size_t size = newline == std::string_view::npos ? data.size() : newline + 1;
    std::size_t body = newline == std::string_view::npos ? size : newline;
    if (body > 0 && data[body - 1] == '\r') --body;
    lines.push_back({data.substr(0, body), data.substr(body, size - body)});
    data.remove_prefix(size);
  }
  return lines;
}

// TRT-<4 to 6 digits>-<letters, then digits>
std::optional<Header> labelled_header(std::string_view text) {
  if (text.substr(0, 4) != "TRT-") return std::nullopt;
  const std::size_t dash = text.find('-', 4);
  if (dash == std::string_view::npos) return std::nullopt;
  const std::string_view label = text.substr(4, dash - 4);
  const std::string_view algorithm = text.substr(dash + 1);
  std::size_t letters = 0;
  while (letters < algorithm.size() && scan::is_letter(algorithm[letters])) ++letters;
  const bool number = scan::are_digits(algorithm.substr(letters), 0, std::string_view::npos);
  if (!scan::are_digits(label, 4, 6) || letters == 0 || !number) return std::nullopt;
  Header header;
  header.text = text;
  header.label = std::stoi(std::string(label));
  header.algorithm = algorithm;
  return header;
}

double float64(std::string_view digits) {
  return number::bits<double>(std::stoull(std::string(digits), nullptr, 16));
}

// "0", then cutoff and quantile as the lower-case hex digits of two float64.
std::optional<Header> legacy_header(std::string_view text) {
  if (text.size() != 33 || text.front() != '0') return std::nullopt;
  for (const char c : text) {
    if (!scan::is_digit(c) && !(c >= 'a' && c <= 'f')) return std::nullopt;
  }
  Header header;
  header.text = text;
  header.algorithm = kLegacy;
  header.cutoff = float64(text.substr(1, 16));
  header.quantile = float64(text.substr(17, 16));
  return header;
}

std::optional<Header> parse_header(std::string_view text) {
  std::optional<Header> header = labelled_header(text);
  return header ? header : legacy_header(text);
}

Header make_header(const CacheOptions& options) {
  const int label = version_label(options.version);
  std::string text = "TRT-" + std::to_string(label) + "-" + options.algorithm;
  if (options.algorithm == kLegacy) {
    text = "0" + number::hex(number::bits<std::uint64_t>(options.cutoff), 16) +
           number::hex(number::bits<std::uint64_t>(options.quantile), 16);
  }
  const std::optional<Header> header = parse_header(text);
  if (!header) {
    throw CacheError("an algorithm is a word such as " + std::string(kEntropy2) + ", got " +
                     text::repr(options.algorithm));
  }
  return *header;
}

Entry parse_entry(const Line& line, std::size_t number, const std::string& origin) {
  const std::size_t colon = line.text.rfind(": ");
  const bool has_colon = colon != std::string_view::npos && colon > 0;
  const std::string_view digits = has_colon ? line.text.substr(colon + 2) : std::string_view{};
  const bool is_valid = has_colon && scan::is_hex(digits);
  const auto line_name = [&] { return "line " + std::to_string(number); };
  const auto quoted_line = [&] { return text::repr(text::head(line.text, 60)); };
  // Without its newline a last line may have lost digits: "3d8" reads as a number all the same.
  const bool has_newline = line.end.find('\n') != std::string_view::npos;
  if (!has_newline && !(is_valid && (digits.size() == 8 || digits == "0"))) {
    throw CacheError("the last line of a calibration cache ends in a newline; " + origin +
                     " stops in the midst of " + line_name() + " (" + quoted_line() +
                     "), so it was cut off; write it again");
  }
  if (!is_valid) {
    throw CacheError("a cache line reads 'name: hex' with 1 to 8 hex digits; " + line_name() +
                     " of " + origin + " is " + quoted_line() +
                     "; remove that line or calibrate again");
  }
  return {std::string(line.text.substr(0, colon)), std::string(digits), std::string(line.end)};
}

Entry make_entry(const std::string& name, float scale) {
  if (name.empty() || name.find_first_of("\r\n") != std::string::npos) {
    throw CacheError(
        "a cache holds one line a tensor, so a name has no line break and is not empty, got " +
        text::repr(name) + "; rename the tensor in the model");
  }
  if (std::isnan(scale) || scale < 0) {
    throw CacheError("a scale is zero or more, got " +
                     (std::isnan(scale) ? "nan" : number::repr_float(scale)) + " for " +
                     text::repr(name) + "; calibrate it again");
  }
  return {name, number::hex(number::bits<std::uint32_t>(std::fabs(scale))), "\n"};
}

}  // namespace

std::uint32_t Entry::bits() const {
  if (!scan::is_hex(digits)) {
    throw CacheError("a scale is 1 to 8 hex digits, got " + text::repr(digits) + " for " +
                     text::repr(name) + "; write it again");
  }
  return static_cast<std::uint32_t>(std::stoul(digits, nullptr, 16));
}

float Entry::scale() const { return number::bits<float>(bits()); }

std::optional<std::string> Entry::flaw() const {
  if (std::isnan(scale())) return "NaN";
  if ((bits() >> 31U) != 0) return "negative";
  if (std::isinf(scale())) return "inf";
  if (bits() == 0) return "zero";
  return std::nullopt;
}

std::vector<std::string> CalibrationCache::duplicates() const {
  std::map<std::string_view, int> counts;
  for (const Entry& entry : entries) counts[entry.name] += 1;
  std::vector<std::string> names;
  for (const Entry& entry : entries) {
    int& count = counts[entry.name];
    if (count > 1) names.push_back(entry.name);
    count = 0;
  }
  return names;
}

NamedScales CalibrationCache::scales() const {
  std::map<std::string_view, std::uint32_t> bits_by_name;
  NamedScales scales;
  for (const Entry& entry : entries) {
    const auto [entry_bits, is_new] = bits_by_name.emplace(entry.name, entry.bits());
    if (is_new) {
      scales.emplace_back(entry.name, entry.scale());
    } else if (entry_bits->second != entry.bits()) {
      throw CacheError("one tensor has one scale, got " + text::repr(entry.name) + " with " +
                       number::hex(entry_bits->second) + " and " + number::hex(entry.bits()) +
                       "; remove the wrong line");
    }
  }
  return scales;
}

std::string CalibrationCache::dump() const {
  std::string text = header.text + header.end;
  for (const Entry& entry : entries) text += entry.name + ": " + entry.digits + entry.end;
  return text;
}

CalibrationCache parse_cache(std::string_view data, const std::string& origin) {
  const std::vector<Line> lines = split(data);
  if (lines.empty()) throw CacheError(origin + " is empty; calibrate again to write it");
  std::optional<Header> header = parse_header(lines.front().text);
  if (!header) {
    throw CacheError("a TensorRT calibration cache starts with a line such as TRT-8503-" +
                     std::string(kEntropy2) + "; " + origin + " " + likely_origin(data));
  }
  header->end = lines.front().end;
  if (lines.size() == 1) {
    throw CacheError("a calibration cache holds one line a tensor; " + origin +
                     " ends after its first line, so it was cut off; write it again");
  }
  CalibrationCache cache{*header, {}};
  for (std::size_t k = 1; k < lines.size(); ++k) {
    cache.entries.push_back(parse_entry(lines[k], k + 1, origin));
  }
  return cache;
}

CalibrationCache read_cache(const std::filesystem::path& path) {
  try {
    return parse_cache(files::read(path, files::kMaxTextBytes), path.string());
  } catch (const FeedError& error) {
    throw CacheError(error.what());
  }
}

CalibrationCache cache_from_scales(const NamedScales& scales, const CacheOptions& options) {
  if (scales.empty()) throw CacheError("a calibration cache needs at least one scale, got none");
  CalibrationCache cache;
  for (const auto& [name, scale] : scales) cache.entries.push_back(make_entry(name, scale));
  cache.header = make_header(options);
  return cache;
}

CalibrationCache relabel(const CalibrationCache& cache, const std::string& version,
                         const std::optional<std::string>& algorithm) {
  if (!cache.header.label && !algorithm) {
    version_label(version);
    return cache;
  }
  CacheOptions options;
  options.version = version;
  options.algorithm = algorithm.value_or(cache.header.algorithm);
  options.quantile = cache.header.quantile.value_or(options.quantile);
  options.cutoff = cache.header.cutoff.value_or(options.cutoff);
  CalibrationCache relabelled = cache;
  relabelled.header = make_header(options);
  relabelled.header.end = cache.header.end;
  return relabelled;
}

int version_label(const std::string& version) {
  const std::string_view text = text::strip(version);
  std::vector<int> numbers;
  bool is_valid = true;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t dot = std::min(text.find('.', begin), text.size());
    const std::string_view part_text = text.substr(begin, dot - begin);
    const std::size_t max_digits = numbers.size() < 3 ? 2 : std::string_view::npos;
    is_valid = is_valid && numbers.size() < 4 && scan::are_digits(part_text, 1, max_digits);
    numbers.push_back(is_valid && numbers.size() < 3 ? std::stoi(std::string(part_text)) : 0);
    begin = dot + 1;
  }
  if (!is_valid || numbers.size() < 3 || numbers[0] == 0) {
    throw CacheError("a TensorRT version reads X.Y.Z, such as 8.5.3, got " + text::repr(version));
  }
  if (numbers[0] < 10 && numbers[1] > 9) {
    throw CacheError("TensorRT below 10 has one-digit minor versions, got " + text::repr(version));
  }
  return numbers[0] * (numbers[0] < 10 ? 1000 : 10000) + numbers[1] * 100 + numbers[2];
}

std::string label_to_version(int label) {
  const int base = label >= 100000 ? 10000 : 1000;
  return std::to_string(label / base) + "." + std::to_string(label % base / 100) + "." +
         std::to_string(label % 100);
}

}  // namespace calib8

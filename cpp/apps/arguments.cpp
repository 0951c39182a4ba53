#include "arguments.hpp"

#include <algorithm>

#include "calib8/errors.hpp"
#include "calib8/text.hpp"

namespace calib8::apps {

Arguments::Arguments(const std::vector<std::string>& words, const std::set<std::string>& options,
                     const std::set<std::string>& flags) {
  for (std::size_t k = 0; k < words.size(); ++k) {
    std::string word = words[k] == "-o" ? "--out" : words[k];
    if (word.rfind("--", 0) != 0) {
      positional_.push_back(word);
      continue;
    }
    const std::size_t equals = word.find('=');
    const std::string name = word.substr(2, equals == std::string::npos ? equals : equals - 2);
    if (flags.count(name) > 0 && equals == std::string::npos) {
      flags_.insert(name);
    } else if (options.count(name) == 0) {
      throw ConfigError("--" + name + " is no option of this command; see --help");
    } else if (equals != std::string::npos) {
      options_[name].push_back(word.substr(equals + 1));
    } else if (++k < words.size()) {
      options_[name].push_back(words[k]);
    } else {
      throw ConfigError("--" + name + " needs a value, got none; see --help");
    }
  }
}

std::optional<std::string> Arguments::option(const std::string& name) const {
  const auto found = options_.find(name);
  if (found == options_.end()) return std::nullopt;
  return found->second.back();
}

std::vector<std::string> Arguments::all(const std::string& name) const {
  const auto found = options_.find(name);
  return found == options_.end() ? std::vector<std::string>{} : found->second;
}

std::string Arguments::required(const std::string& name) const {
  const std::optional<std::string> value = option(name);
  if (!value) throw ConfigError("--" + name + " must be given, got nothing; see --help");
  return *value;
}

void Arguments::expect(const std::vector<std::string>& names) const {
  if (positional_.size() == names.size()) return;
  std::string all;
  for (const std::string& name : names) all += " " + name;
  throw ConfigError("this command takes" + all + ", got " + std::to_string(positional_.size()) +
                    " words; see --help");
}

std::optional<int> Arguments::number(const std::string& name, int least) const {
  const std::optional<std::string> value = option(name);
  if (!value) return std::nullopt;
  const bool digits =
      !value->empty() && value->size() < 10 &&
      std::all_of(value->begin(), value->end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits || std::stoi(*value) < least) {
    throw ConfigError("--" + name + " must be a whole number from " + std::to_string(least) +
                      ", got " + text::repr(*value));
  }
  return std::stoi(*value);
}

std::optional<double> Arguments::decimal(const std::string& name) const {
  const std::optional<std::string> value = option(name);
  if (!value) return std::nullopt;
  const bool plain = !value->empty() && value->size() < 10 && value->front() != '.' &&
                     std::count(value->begin(), value->end(), '.') < 2 &&
                     value->find_first_not_of("0123456789.") == std::string::npos;
  if (!plain) {
    throw ConfigError("--" + name + " must be a number from 0, such as 3 or 0.5, got " +
                      text::repr(*value));
  }
  double number = 0;  // by hand: a locale may want a comma
  double place = 0;
  for (const char c : *value) {
    if (c == '.') {
      place = 1;
    } else {
      place *= 10;
      number = number * 10 + (c - '0');
    }
  }
  return place > 0 ? number / place : number;
}

InputText parse_input(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  InputText input;
  if (colon != std::string::npos) input.name = text.substr(0, colon);
  std::string dims = colon == std::string::npos ? "" : text.substr(colon + 1);
  for (std::size_t at = 0; at < dims.size();) {
    const std::size_t end = std::min(dims.find('x', at), dims.size());
    input.dims.push_back(dims.substr(at, end - at));
    at = end + 1;
  }
  const auto empty = [](const std::string& dim) { return dim.empty() || dim.size() > 9; };
  if (input.name.empty() || input.dims.empty() ||
      std::any_of(input.dims.begin(), input.dims.end(), empty)) {
    throw ConfigError("an input reads NAME:DIMS, such as image:1x3x224x224, got " +
                      text::repr(text));
  }
  return input;
}

}  // namespace calib8::apps

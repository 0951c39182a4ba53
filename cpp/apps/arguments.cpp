#include "arguments.hpp"

#include <algorithm>

#include "calib8/errors.hpp"
#include "calib8/text.hpp"

namespace calib8::apps {

Arguments::Arguments(const std::vector<std::string>& argument_list,
                     const std::set<std::string>& options, const std::set<std::string>& flags) {
  for (std::size_t k = 0; k < argument_list.size(); ++k) {
    std::string argument = argument_list[k] == "-o" ? "--out" : argument_list[k];
    if (argument.rfind("--", 0) != 0) {
      positional_.push_back(argument);
      continue;
    }
    const std::size_t equals = argument.find('=');
    const std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
    if (flags.count(name) > 0 && equals == std::string::npos) {
      flags_.insert(name);
    } else if (options.count(name) == 0) {
      throw ConfigError("--" + name + " is no option of this command; see --help");
    } else if (equals != std::string::npos) {
      options_[name].push_back(argument.substr(equals + 1));
    } else if (++k < argument_list.size()) {
      options_[name].push_back(argument_list[k]);
    } else {
      throw ConfigError("--" + name + " needs a value, got none; see --help");
    }
  }
}

std::optional<std::string> Arguments::option(const std::string& name) const {
  const auto entry = options_.find(name);
  if (entry == options_.end()) return std::nullopt;
  return entry->second.back();
}

std::vector<std::string> Arguments::all(const std::string& name) const {
  const auto entry = options_.find(name);
  return entry == options_.end() ? std::vector<std::string>{} : entry->second;
}

std::string Arguments::required(const std::string& name) const {
  const std::optional<std::string> value = option(name);
  if (!value) throw ConfigError("--" + name + " must be given, got nothing; see --help");
  return *value;
}

void Arguments::expect(const std::vector<std::string>& names) const {
  if (positional_.size() == names.size()) return;
  std::string expected_list;
  for (const std::string& name : names) expected_list += " " + name;
  throw ConfigError("this command takes" + expected_list + ", got " +
                    std::to_string(positional_.size()) + " words; see --help");
}

std::optional<int> Arguments::number(const std::string& name, int min_value) const {
  const std::optional<std::string> value = option(name);
  if (!value) return std::nullopt;
  const bool is_number =
      !value->empty() && value->size() < 10 &&
      std::all_of(value->begin(), value->end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!is_number || std::stoi(*value) < min_value) {
    throw ConfigError("--" + name + " must be a whole number from " + std::to_string(min_value) +
                      ", got " + text::repr(*value));
  }
  return std::stoi(*value);
}

std::optional<double> Arguments::decimal(const std::string& name) const {
  const std::optional<std::string> value = option(name);
  if (!value) return std::nullopt;
  const bool is_plain = !value->empty() && value->size() < 10 && value->front() != '.' &&
                        std::count(value->begin(), value->end(), '.') < 2 &&
                        value->find_first_not_of("0123456789.") == std::string::npos;
  if (!is_plain) {
    throw ConfigError("--" + name + " must be a number from 0, such as 3 or 0.5, got " +
                      text::repr(*value));
  }
  double number = 0;  // by hand: a locale may want a comma
  double divisor = 0;
  for (const char c : *value) {
    if (c == '.') {
      divisor = 1;
    } else {
      divisor *= 10;
      number = number * 10 + (c - '0');
    }
  }
  return divisor > 0 ? number / divisor : number;
}

InputText parse_input(const std::string& text) {
  const std::size_t colon = text.rfind(':');
  InputText input;
  if (colon != std::string::npos) input.name = text.substr(0, colon);
  std::string dims = colon == std::string::npos ? "" : text.substr(colon + 1);
  for (std::size_t begin = 0; begin < dims.size();) {
    const std::size_t end = std::min(dims.find('x', begin), dims.size());
    input.dims.push_back(dims.substr(begin, end - begin));
    begin = end + 1;
  }
  const auto is_malformed = [](const std::string& dim) { return dim.empty() || dim.size() > 9; };
  if (input.name.empty() || input.dims.empty() ||
      std::any_of(input.dims.begin(), input.dims.end(), is_malformed)) {
    throw ConfigError("an input reads NAME:DIMS, such as image:1x3x224x224, got " +
                      text::repr(text));
  }
  return input;
}

}  // namespace calib8::apps

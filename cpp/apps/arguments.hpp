// A command line: positional words, options with a value, flags.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace calib8::apps {

class Arguments {
 public:
  // `--name value`, `--name=value`, or a flag of `flags` alone; "-o" is short for "--out".
  // Throws ConfigError on an option that is not in `options` or `flags`, or without its value.
  Arguments(const std::vector<std::string>& argument_list, const std::set<std::string>& options,
            const std::set<std::string>& flags);

  const std::vector<std::string>& positional() const { return positional_; }
  bool flag(const std::string& name) const { return flags_.count(name) > 0; }
  std::optional<std::string> option(const std::string& name) const;  // the last one given
  std::vector<std::string> all(const std::string& name) const;       // in their order
  std::string required(const std::string& name) const;               // throws ConfigError
  // The only positional words; throws ConfigError unless there are as many as `names`.
  void expect(const std::vector<std::string>& names) const;
  // A whole number from `min_value`; throws ConfigError.
  std::optional<int> number(const std::string& name, int min_value) const;
  // A number from 0, with or without decimals; throws ConfigError.
  std::optional<double> decimal(const std::string& name) const;

 private:
  std::vector<std::string> positional_;
  std::map<std::string, std::vector<std::string>> options_;
  std::set<std::string> flags_;
};

// "NAME:1x3x224x224", a dimension may be a word (symbolic): the input that a feed is made for.
// Throws ConfigError.
struct InputText {
  std::string name;
  std::vector<std::string> dims;
};
InputText parse_input(const std::string& text);

}  // namespace calib8::apps

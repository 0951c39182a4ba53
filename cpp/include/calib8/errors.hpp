// The error classes, as in deploy/errors.py. Every message states the rule, the value, and the remedy.
//
//   Error (std::runtime_error)
//   |-- CalibrationError   statistics or a search gave no usable scale
//   |-- FeedError          images that cannot be fed to the model
//   |-- CacheError         a cache that is damaged, of another tool, or out of date
//   |-- ConfigError        options that contradict the rules
//   |-- ExportError        a file that cannot be written
//   `-- BackendError       a runtime refused to build or to run
#pragma once

#include <stdexcept>
#include <string>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class CalibrationError : public Error {
 public:
  using Error::Error;
};

class FeedError : public Error {
 public:
  using Error::Error;
};

class CacheError : public Error {
 public:
  using Error::Error;
};

class ConfigError : public Error {
 public:
  using Error::Error;
};

class ExportError : public Error {
 public:
  using Error::Error;
};

class BackendError : public Error {
 public:
  using Error::Error;
};

}  // namespace calib8
CALIB8_EXPORT_END

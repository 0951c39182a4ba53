// TensorRT's log: prints warnings and errors to stderr and stores the last of the most severe ones.
#pragma once

#include <NvInfer.h>

#include <iostream>
#include <mutex>
#include <string>

namespace calib8::trt {

class Logger : public nvinfer1::ILogger {
 public:
  explicit Logger(Severity min_severity = Severity::kWARNING) : min_severity_(min_severity) {}

  void log(Severity severity, nvinfer1::AsciiChar const* message) noexcept override {
    try {
      const std::lock_guard lock(mutex_);
      if (severity <= Severity::kWARNING && (severity <= worst_severity_ || message_.empty())) {
        worst_severity_ = severity;
        message_ = message;
      }
      if (severity <= min_severity_) std::cerr << "TensorRT: " << message << "\n";
    } catch (...) {
      return;  // TensorRT takes no exception, and a line of log is worth none
    }
  }

  // The last error (where there is none, the last warning), or a sentence that there was none.
  std::string last_error() const {
    const std::lock_guard lock(mutex_);
    return message_.empty() ? "TensorRT logged no error" : message_;
  }

 private:
  Severity min_severity_;
  mutable std::mutex mutex_;
  Severity worst_severity_ = Severity::kVERBOSE;
  std::string message_;
};

}  // namespace calib8::trt

// TensorRT's log: warnings and errors to stderr, the last of the worst kept for messages.
#pragma once

#include <NvInfer.h>

#include <iostream>
#include <mutex>
#include <string>

namespace calib8::trt {

class Logger : public nvinfer1::ILogger {
 public:
  explicit Logger(Severity least = Severity::kWARNING) : least_(least) {}

  void log(Severity severity, nvinfer1::AsciiChar const* message) noexcept override {
    try {
      const std::lock_guard lock(mutex_);
      if (severity <= Severity::kWARNING && (severity <= worst_ || words_.empty())) {
        worst_ = severity;
        words_ = message;
      }
      if (severity <= least_) std::cerr << "TensorRT: " << message << "\n";
    } catch (...) {
      return;  // TensorRT takes no exception, and a line of log is worth none
    }
  }

  // The last error (where there is none, the last warning), or a sentence that there was none.
  std::string last_error() const {
    const std::lock_guard lock(mutex_);
    return words_.empty() ? "TensorRT logged no error" : words_;
  }

 private:
  Severity least_;
  mutable std::mutex mutex_;
  Severity worst_ = Severity::kVERBOSE;
  std::string words_;
};

}  // namespace calib8::trt

// TensorRT's log: warnings and errors to stderr, the last error kept for messages.
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
      if (severity <= Severity::kERROR) last_error_ = message;
      if (severity <= least_) std::cerr << "TensorRT: " << message << "\n";
    } catch (...) {
      return;  // TensorRT takes no exception, and a line of log is worth none
    }
  }

  // The last error, or a sentence that there was none.
  std::string last_error() const {
    const std::lock_guard lock(mutex_);
    return last_error_.empty() ? "TensorRT logged no error" : last_error_;
  }

 private:
  Severity least_;
  mutable std::mutex mutex_;
  std::string last_error_;
};

}  // namespace calib8::trt

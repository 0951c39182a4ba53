// CUDA's memory, streams and events, freed by themselves.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>

#include "calib8/errors.hpp"

namespace calib8::trt {

// Throws BackendError unless the call succeeded; `action` completes "CUDA could not ...".
inline void check(cudaError_t code, const std::string& action) {
  if (code != cudaSuccess) {
    throw BackendError("CUDA could not " + action + ": " + cudaGetErrorString(code));
  }
}

// Device memory that grows where it must.
class DeviceBuffer {
 public:
  // At least `bytes` bytes; what was there is lost where it grows.
  void* reserve(std::size_t bytes) {
    if (bytes > size_ || !memory_) {
      memory_.reset();
      void* fresh = nullptr;
      check(cudaMalloc(&fresh, bytes > 0 ? bytes : 1),
            "reserve " + std::to_string(bytes) + " bytes on the GPU");
      memory_.reset(fresh);
      size_ = bytes;
    }
    return memory_.get();
  }

  void* get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(void* memory) const { cudaFree(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t size_ = 0;
};

class CudaStream {
 public:
  CudaStream() {
    cudaStream_t fresh = nullptr;
    check(cudaStreamCreate(&fresh), "make a stream");
    stream_.reset(fresh);
  }
  cudaStream_t get() const { return stream_.get(); }
  void wait() const { check(cudaStreamSynchronize(stream_.get()), "finish the work"); }

 private:
  struct Free {
    void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
  };
  std::unique_ptr<CUstream_st, Free> stream_;
};

class CudaEvent {
 public:
  CudaEvent() {
    cudaEvent_t fresh = nullptr;
    check(cudaEventCreate(&fresh), "make an event");
    event_.reset(fresh);
  }
  void record(const CudaStream& stream) const {
    check(cudaEventRecord(event_.get(), stream.get()), "record an event");
  }
  // Milliseconds from `earlier` to this event; both must have passed.
  double since(const CudaEvent& earlier) const {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, earlier.event_.get(), event_.get()), "read an event");
    return static_cast<double>(ms);
  }

 private:
  struct Free {
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  };
  std::unique_ptr<CUevent_st, Free> event_;
};

}  // namespace calib8::trt

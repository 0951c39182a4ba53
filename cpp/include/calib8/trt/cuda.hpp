// CUDA memory, streams and events that free themselves.
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

// Selects the GPU (numbered from 0) for this thread.
inline void use_device(int number) {
  check(cudaSetDevice(number), "use GPU " + std::to_string(number));
}

// The kind of a buffer's memory: on the GPU, or pinned host memory, which is copied to the GPU directly.
struct OnDevice {
  static constexpr const char* kWhere = " bytes on the GPU";
  static cudaError_t reserve(void** memory, std::size_t bytes) { return cudaMalloc(memory, bytes); }
  void operator()(void* memory) const { cudaFree(memory); }
};
struct Pinned {
  static constexpr const char* kWhere = " bytes of pinned host memory";
  static cudaError_t reserve(void** memory, std::size_t bytes) {
    return cudaMallocHost(memory, bytes);
  }
  void operator()(void* memory) const { cudaFreeHost(memory); }
};

// Memory that grows on demand.
template <class Where>
class Buffer {
 public:
  // Reserves at least `bytes` bytes; the contents are lost if the memory grows.
  void* reserve(std::size_t bytes) {
    if (bytes > size_ || !memory_) {
      memory_.reset();
      void* allocated = nullptr;
      check(Where::reserve(&allocated, bytes > 0 ? bytes : 1),
            "reserve " + std::to_string(bytes) + Where::kWhere);
      memory_.reset(allocated);
      size_ = bytes;
    }
    return memory_.get();
  }

  void* get() const { return memory_.get(); }

 private:
  std::unique_ptr<void, Where> memory_;
  std::size_t size_ = 0;
};

using DeviceBuffer = Buffer<OnDevice>;
using HostBuffer = Buffer<Pinned>;

class CudaStream {
 public:
  CudaStream() {
    cudaStream_t created = nullptr;
    check(cudaStreamCreate(&created), "make a stream");
    stream_.reset(created);
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
    cudaEvent_t created = nullptr;
    check(cudaEventCreate(&created), "make an event");
    event_.reset(created);
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

// CUDA's runtime on host memory: what is the device's, what is pinned and what is neither is told
// apart, and every event comes a millisecond after the one before it.
#include "cuda.hpp"

#include <cuda_runtime_api.h>

#include <cstring>
#include <map>

#include "settings.hpp"

struct CUstream_st {};
struct CUevent_st {
  float ms = 0;
};

namespace fake {
namespace {

struct Memories {
  std::map<const char*, std::size_t> device;
  std::map<const char*, std::size_t> pinned;
  int copies = 0;
  float clock_ms = 0;
};

Memories& memories() {
  static Memories all;
  return all;
}

bool inside(const std::map<const char*, std::size_t>& pieces, const void* memory,
            std::size_t bytes) {
  const auto* begin = static_cast<const char*>(memory);
  auto piece = pieces.upper_bound(begin);
  if (piece == pieces.begin()) return false;
  --piece;
  return begin + bytes <= piece->first + piece->second;
}

cudaError_t reserve(std::map<const char*, std::size_t>& pieces, void** memory, std::size_t bytes) {
  if (asked("out-of-memory")) return cudaErrorMemoryAllocation;
  *memory = new char[bytes];
  pieces[static_cast<char*>(*memory)] = bytes;
  return cudaSuccess;
}

cudaError_t release(std::map<const char*, std::size_t>& pieces, void* memory) {
  if (memory == nullptr) return cudaSuccess;
  if (pieces.erase(static_cast<char*>(memory)) == 0) return cudaErrorInvalidValue;
  delete[] static_cast<char*>(memory);
  return cudaSuccess;
}

}  // namespace

bool on_device(const void* memory, std::size_t bytes) {
  return inside(memories().device, memory, bytes);
}

}  // namespace fake

extern "C" {

#pragma GCC visibility push(default)

cudaError_t cudaGetDeviceCount(int* count) {
  *count = fake::asked("no-gpu") ? 0 : 2;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  fake::trace("device " + std::to_string(device));
  return device < 2 ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  const std::string name = "Fake GPU " + fake::setting("CALIB8_FAKE_GPU");
  std::strncpy(properties->name, name.c_str(), sizeof(properties->name) - 1);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  if (fake::asked("no-gpu")) return cudaErrorInsufficientDriver;
  return fake::reserve(fake::memories().device, memory, bytes);
}

cudaError_t cudaFree(void* memory) { return fake::release(fake::memories().device, memory); }

cudaError_t cudaMallocHost(void** memory, std::size_t bytes) {
  return fake::reserve(fake::memories().pinned, memory, bytes);
}

cudaError_t cudaFreeHost(void* memory) { return fake::release(fake::memories().pinned, memory); }

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  const void* device = kind == cudaMemcpyHostToDevice ? to : from;
  if (!fake::on_device(device, bytes)) return cudaErrorInvalidValue;
  if (fake::asked("fail-second-copy") && ++fake::memories().copies == 2) {
    return cudaErrorIllegalAddress;
  }
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t /*stream*/) {
  const void* host = kind == cudaMemcpyHostToDevice ? from : to;
  const bool pinned = fake::inside(fake::memories().pinned, host, bytes);
  fake::trace(std::string("copy ") + (kind == cudaMemcpyHostToDevice ? "in " : "out ") +
              std::to_string(bytes) + (pinned ? "" : " from pageable memory"));
  return cudaMemcpy(to, from, bytes, kind);
}

const char* cudaGetErrorString(cudaError_t code) {
  switch (code) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    default: return "invalid argument";
  }
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) { return cudaSuccess; }

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t /*stream*/) {
  event->ms = ++fake::memories().clock_ms;
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = end->ms - start->ms;
  return cudaSuccess;
}

#pragma GCC visibility pop
}

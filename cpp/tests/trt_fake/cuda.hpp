// What the fake's engines ask of its CUDA.
#pragma once

#include <cstddef>

namespace fake {

// Whether so many bytes lie in one piece of memory that cudaMalloc gave.
bool on_device(const void* memory, std::size_t bytes);

}  // namespace fake

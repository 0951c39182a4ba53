// Inputs to time an engine with: random, and the same ones every time.
#pragma once

#include <NvInfer.h>

#include <cstddef>
#include <random>

namespace calib8::trt {

// One of random bits; the same numbers with every compiler.
using Random = std::mt19937_64;

// Fills the bytes with values of the type: floats of -1 to 1, as trtexec's (zeros would draw less
// power, and clock the GPU higher); bytes of any value; 0 or 1 for bools and for whole numbers,
// which may be places in a table.
void fill_random(void* memory, std::size_t bytes, nvinfer1::DataType type, Random& random);

}  // namespace calib8::trt

// An input's values as TensorRT reads them to calibrate: floats as float32, whatever the network's own
// float is; whole numbers in the network's type. As calibrators/tensorrt.py has it for Python.
#pragma once

#include <string>
#include <vector>

#include "calib8/export.hpp"
#include "calib8/feed.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

// `dtype` is the network's own (numpy's name). Throws CalibrationError: a value that it does not hold.
std::vector<char> binding_values(const Tensor& tensor, const std::string& dtype);

}  // namespace calib8
CALIB8_EXPORT_END

// An input's values as TensorRT reads them during calibration: floats as float32, whatever float type the
// network has; integers in the network's type. The same rules as calibrators/tensorrt.py.
#pragma once

#include <string>
#include <vector>

#include "calib8/export.hpp"
#include "calib8/feed.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

// `dtype` is the type of the network's input (numpy's name). Throws CalibrationError: a value does not fit it.
std::vector<char> binding_values(const Tensor& tensor, const std::string& dtype);

}  // namespace calib8
CALIB8_EXPORT_END

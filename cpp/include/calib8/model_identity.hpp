// Digests that identify a model, whichever program made a cache for it: deploy/frontends/base.py (the graph) and
// the Stamp of deploy/frontends/onnx_reader.py (the files).
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

// sha256 in hexadecimal digits, "" where it is not known.
struct ModelIdentity {
  std::string graph;    // of what the model computes, however its file stores it
  std::string file;     // of the ONNX file's bytes
  std::string weights;  // of its external data; "" where it has none
};

// Whether one identity is the same: the graph's, or that of all files.
bool same_model(const ModelIdentity& first, const ModelIdentity& second);

// Reads the ONNX file and the external data beside it, a piece at a time. What holds tensors that
// the digest is not defined for here (strings, types of less than a byte), or is no ONNX, has no
// `graph`.
// Throws FeedError: a file cannot be read; CacheError: external data that is not there whole, or
// outside of the model's folder.
ModelIdentity identity_of(const std::filesystem::path& onnx);

// Input -> numpy's name of its type in the model (TensorRT before 10 reads int64 as int32). Empty if the
// file is not ONNX. Throws FeedError: it cannot be read.
std::map<std::string, std::string> input_types(const std::filesystem::path& onnx);

// Whether the model fixes the type of every layer, as Python's NAME.tensorrt.typed.onnx does: it
// quantizes activations, and a Q/DQ node has a scale of float16 or bfloat16, or a zero point of
// float8. TensorRT 10 builds it as a strongly typed network. False if the file is not ONNX. Throws
// FeedError: it cannot be read.
bool is_typed(const std::filesystem::path& onnx);

}  // namespace calib8
CALIB8_EXPORT_END

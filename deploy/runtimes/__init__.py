"""Sessions: a model loaded in ONNX Runtime or OpenVINO on the CPU."""

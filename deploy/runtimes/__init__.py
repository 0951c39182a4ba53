"""Inference sessions on the CPU: ONNX Runtime or OpenVINO."""

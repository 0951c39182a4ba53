"""Inference sessions on the CPU: ONNX Runtime (`ort`) and OpenVINO (`openvino`).

Both offer the `Session` protocol of `deploy.tensors`. These are the only modules that import the
two packages. TensorRT's session lives with its target.
"""

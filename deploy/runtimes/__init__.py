"""Inference sessions on the CPU: ONNX Runtime (`ort`) and OpenVINO (`openvino`).

Both offer the `Session` protocol of `deploy.tensors`. No other module opens
a session of these packages. TensorRT's session lives with its target.
"""

"""ONNX graph analysis: index, edits, quantization plan, tensor bounds and opset lowering."""

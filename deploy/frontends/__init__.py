"""One file per source of models; each gives an ONNX model that the graph analysis accepts."""
